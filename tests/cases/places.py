"""Parts of a problem, computed where they stand in it, compared with the rows of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import attnbias as ab
from attnbias.backends.places import Places
from attnbias.layouts.costs import costs_of
from attnbias.layouts.host import lay_out_with_numpy
from attnbias.layouts.levels import TileStarts, add_levels
from attnbias.op.problem import Problem
from attnbias.op.run import attend
from attnbias.sets.bound import Bound
from attnbias.sets.edges import Edges
from attnbias.sets.intervals import Intervals
from attnbias.testing import assert_no_worse, magnitudes, make_inputs
from cases.interpreter import INTERPRETED

TILE = 64
B, H, HK = (1, 2, 1) if INTERPRETED else (2, 4, 2)  # the interpreter is slow
D, E = 16, 24
Q, K = 3 * TILE + 23, 3 * TILE + 40  # of the whole
START = K - Q  # no multiple of anything
GRID = (5, 48)
SEED = torch.tensor([2**40 + 17])

# Which rows of the whole a part has: whole tiles of it, of which the last may be cut short.
PICKS = {
    "scattered tiles": [*range(64), *range(128, 192)],
    "ragged end": [*range(64, 128), *range(192, Q)],
    "tile + 1": [*range(64, 128), 192],
    "97 rows": [*range(64), *range(128, 161)],
    "one row": [128],
}

RELATIONS = {
    "causal": ab.Causal(),
    "window": ab.Window(before=70, after=9),
    "documents": ab.Documents(torch.tensor([[0] * 80 + [1] * 100 + [2] * 52, [0] * 140 + [1] * 92])[:B]),
    "prefix": ab.Prefix([30, 200][:B]) | ab.Causal(),
    "empty rows": ab.Window(before=20) & ~ab.Bipartite(150),
    "per head": ab.PerHead([ab.Causal(), ab.Window(before=7), ab.Empty(), ab.Full()][:H]),
    "global": ab.Global([3, 150]) | ab.Window(before=5, after=5),
    "full": ab.Full(),
    "mixed": ab.Window(before=1) | (ab.Prefix(64) & ab.Where(lambda q, k: q < 81)),
}


def draw_graph(seed: int = 2) -> ab.Graph:
    """Draw edges in no order, some of them twice, that leave rows and keys without any."""
    rng = torch.Generator().manual_seed(seed)
    count = 200 if INTERPRETED else 900
    ends = torch.stack([torch.randint(0, n - 5, (count,), generator=rng) for n in (K, START + Q)])
    return ab.Graph(torch.cat((ends, ends[:, :70]), 1), size=(K, START + Q))


GRAPH = draw_graph()


@dataclass(frozen=True)
class Case:
    """Options of a call: leaves by shape, and functions that make terms and a score of them."""

    shapes: tuple[tuple[int, ...], ...] = ()
    terms: Callable[..., list[Any]] = field(default=lambda *leaves: [])
    score: Callable[..., Any] = field(default=lambda *leaves: None)
    sink: bool = False
    numbers: dict[str, float] = field(default_factory=dict)


def _all_terms(slopes, table, near, grid, key, pair):
    return [
        ab.ALiBi(slopes),
        ab.RelativeBias(table, ab.t5_buckets(True, 50)),
        ab.RelativeBias(near, ab.linear_buckets(10)),
        ab.GridBias(grid, GRID),
        ab.KeyBias(key),
        ab.PairBias(pair),
    ]


_TABLES = ((H,), (H, 16), (H, 21), (H, 9 * 95), (B, K), (1, H, K, K))
CASES = {
    "plain": Case(),
    "softcap and sink": Case(sink=True, numbers={"softcap": 2.0}),
    "dropout": Case(numbers={"dropout_p": 0.4}),
    "ALiBi": Case(((H,),), lambda x: [ab.ALiBi(x)]),
    "ALiBi by batch": Case(((B, H),), lambda x: [ab.ALiBi(x)]),
    "T5": Case(((H, 16),), lambda x: [ab.RelativeBias(x, ab.t5_buckets(True, 50))]),
    "linear": Case(((H, 21),), lambda x: [ab.RelativeBias(x, ab.linear_buckets(10))]),
    "grid": Case(((H, 9 * 95),), lambda x: [ab.GridBias(x, GRID)]),
    "key": Case(((B, K),), lambda x: [ab.KeyBias(x)]),
    "pair": Case(((1, H, K, K),), lambda x: [ab.PairBias(x)]),
    "pair for all": Case(((K, K),), lambda x: [ab.PairBias(x)]),
    "pair by row": Case(((B, 1, Q, 1),), lambda x: [ab.PairBias(x, q_start=START)]),
    "all": Case(_TABLES, _all_terms, sink=True, numbers={"softcap": 3.0, "dropout_p": 0.3}),
}
LEVELS = {
    "pair": Case(score=lambda: ab.MultiLevel([8, 4, 4])),
    "levels": Case(score=lambda: ab.MultiLevel([8, 4, 4], [None, 100, 20], "levels")),
    "none": Case(score=lambda: ab.MultiLevel([8, 4, 4], [128, 64, 32], None)),
    "all": Case(
        _TABLES,
        _all_terms,
        lambda *_: ab.MultiLevel([8, 4, 4], [None, 96, 24]),
        sink=True,
        numbers={"softcap": 3.0, "dropout_p": 0.3},
    ),
}
_EDGES = GRAPH.edge_index.shape[1]
GRAPHS = {
    "plain": Case(),
    "dropout": Case(numbers={"dropout_p": 0.4}),
    "edge bias": Case(((_EDGES, H),), lambda x: [ab.EdgeBias(x)], sink=True),
    "all": Case(
        (*_TABLES, (_EDGES, 1)),
        lambda *x: [*_all_terms(*x[:-1]), ab.EdgeBias(x[-1])],
        sink=True,
        numbers={"softcap": 3.0, "dropout_p": 0.3},
    ),
    "additive": Case(
        ((H, D), (H,)),
        lambda weight, slopes: [ab.ALiBi(slopes)],
        lambda weight, slopes: ab.AdditiveScore(weight),
        numbers={"dropout_p": 0.3},
    ),
}


@dataclass(frozen=True)
class Part:
    """Some rows of a problem, and the keys that they need."""

    whole: ab.Layout
    local: ab.Layout
    places: Places


def cut(relation, case: Case, rows, form="tiles", tile=TILE, q_start=START) -> Part:
    """Take some rows of a relation, with the tiles of keys that they need; single keys for edges."""
    score = case.score(*case.shapes)
    levels = score.bind(Q, K, q_start) if isinstance(score, ab.MultiLevel) else None
    options = {"q_start": q_start, "form": form, "tile": tile, "batch": B, "heads": H}
    whole = ab.Layout.build(relation, Q, K, **options, score=score if levels else None)
    rows = np.array(rows)
    pairs = whole.rows(0, Q)[:, :, rows].any(2).any(0).any(0).numpy()  # keys that are needed
    keys = np.flatnonzero(pairs)
    if form != "edges":
        keys = np.flatnonzero(np.isin(np.arange(K) // TILE, np.unique(keys // TILE)))
    bound = _take(whole, rows, keys, form)
    local = lay_out_with_numpy(bound, form, tile, costs_of(torch.device("cpu")), q_start)
    if levels:
        starts = TileStarts(rows[::tile] + q_start, keys[::tile])
        local = add_levels(local, levels, starts)
    queries, places = (torch.from_numpy(x).int() for x in (rows + q_start, keys))
    made = ab.Layout(local.buffer, local.where)
    made.validate()
    return Part(whole, made, Places(queries, places, Q, K, q_start))


def _take(whole: ab.Layout, rows, keys, form) -> Bound:
    """Return the pairs of a layout in some of its rows and keys, numbered anew."""
    group, groups = whole.group.long().numpy(), whole.groups
    if form == "edges":
        ptr = whole.edge_ptr.numpy() if whole.edges else np.zeros(groups * Q + 1, np.int64)
        listed = np.repeat(np.arange(groups * Q), np.diff(ptr))
        inside = np.isin(listed % Q, rows)
        row = listed[inside] // Q * len(rows) + np.searchsorted(rows, listed[inside] % Q)
        key = np.searchsorted(keys, whole.edge_key.numpy()[inside])
        number = whole.edge_id.numpy()[inside].astype(np.int64)
        return Bound(None, Edges.from_pairs(len(rows), len(keys), group, row, key, number))
    one = [np.argwhere(group == g)[0] for g in range(groups)]
    counts = whole.rows(0, Q).numpy()
    dense = np.concatenate([counts[b, h][rows][:, keys] for b, h in one])
    row, key = np.nonzero(dense)
    return Bound(Intervals.empty(len(rows), len(keys), group).from_ranges(row, key, key + 1), None)


def run(backend, inputs, case: Case, layout, places=None, q_start=START):
    """Return out, lse and the largest scores; inputs are query, key, value, sink and the leaves of terms."""
    query, key, value, sink, *leaves = inputs
    problem = Problem(
        *(query, key, value, layout),
        return_lse=True,
        return_max=True,
        places=places,
        terms=case.terms(*leaves),
        score=case.score(*leaves),
        sink=sink if case.sink else None,
        q_start=q_start,
        **case.numbers,
    )
    problem.seed = SEED if case.numbers.get("dropout_p") else None
    return attend(problem, backend)


def draw(case: Case, dtype=torch.float32):
    """Draw query, key, value, sink and the leaves of terms, of the whole."""
    rng = torch.Generator().manual_seed(3)
    tensors = make_inputs(1, B, H, HK, Q, K, D, E, dtype)
    leaves = [torch.randn(shape, generator=rng).to(dtype) for shape in ((H,), *case.shapes)]
    return [x.detach().requires_grad_() for x in (*tensors, *leaves)]


def results(backend, case, part: Part, inputs, *, is_part: bool, places=None, q_start=START):
    """Return out, lse, maxima of the part's rows, and gradients by the inputs of the whole."""
    given = part.places if places is None else places
    rows, keys = given.queries.long() - q_start, given.keys.long()
    if is_part:
        query, key, value, *rest = inputs
        local = [query.index_select(2, rows), key.index_select(2, keys), value.index_select(2, keys), *rest]
        got = run(backend, local, case, part.local, given, q_start)
    else:
        got = [x.index_select(2, rows) for x in run(backend, inputs, case, part.whole, q_start=q_start)]
    out, lse, top = got
    rng = torch.Generator().manual_seed(7)
    d_out, d_lse = (torch.randn(x.shape, generator=rng, dtype=torch.float64) for x in (out, lse))
    loss = (out * d_out.to(out.dtype)).sum()
    loss = loss + (lse * d_lse.to(lse.dtype)).masked_fill(lse == -torch.inf, 0).sum()
    grads = torch.autograd.grad(loss, inputs, materialize_grads=True)
    return {"out": out, "lse": lse, "max": top}, dict(zip(_names(inputs), grads, strict=True))


def _names(inputs):
    return ["query", "key", "value", "sink", *(f"leaf {i}" for i in range(len(inputs) - 4))]


def check_exact(backend, case: Case, part: Part, q_start=START) -> None:
    """Compare a part with the whole in float64, to 1e-12."""
    inputs = draw(case, torch.float64)
    mine, theirs = (
        results(backend, case, part, inputs, is_part=is_part, q_start=q_start) for is_part in (True, False)
    )
    for got, want in zip(mine, theirs, strict=True):
        for name in want:
            gone = want[name] == -torch.inf
            assert torch.equal(got[name] == -torch.inf, gone), name
            a, b = (x[name].masked_fill(gone, 0) for x in (got, want))
            assert (a - b).abs().max() <= 1e-12 * (1 + b.abs().max()), name


def check_bits(backend, case: Case, part: Part, *, same: bool = True, q_start=START) -> None:
    """Compare a part with the whole in float32: the same bits of out, lse and maxima, near gradients."""
    inputs, exact = draw(case), draw(case, torch.float64)
    mine, grads = results(backend, case, part, inputs, is_part=True, q_start=q_start)
    theirs, their_grads = results(backend, case, part, inputs, is_part=False, q_start=q_start)
    truths, true_grads = results("rows", case, part, exact, is_part=False, q_start=q_start)
    random = torch.ones(B, H, len(part.places.queries), E)
    sizes = magnitudes(*inputs[:3], random, random[..., 0], D**-0.5, 0.4, 8.0, truths["out"])
    for name, want in theirs.items():
        if same:
            assert torch.equal(mine[name], want), name
        else:
            magnitude = sizes.get(name, sizes["lse"])
            assert_no_worse(name, mine[name], want, truths[name], 2.0, magnitude=magnitude)
    for name, want in their_grads.items():
        magnitude = sizes.get(name, sizes["sink"])
        assert_no_worse(name, grads[name], want, true_grads[name], 3.0, magnitude=magnitude)

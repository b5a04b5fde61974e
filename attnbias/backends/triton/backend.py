"""The Triton kernels for NVIDIA GPUs; ``attnbias.kernels`` holds them."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ...kernels.launch.config import target_of
from ...layouts.streams import is_capturing
from ...scores.additive import why_not_terms
from ..call import Grads, empty_row_numbers
from ..strides import copy_back, dense_rows, empty_dense_rows, empty_grads, empty_like_query
from . import terms
from .work import work_of

if TYPE_CHECKING:
    from ...kernels.edges.items import EdgeLists
    from ...kernels.edges.launch import Score
    from ...kernels.launch.config import Target
    from ...kernels.records import Lists
    from ...kernels.records import Places as KernelPlaces
    from ...kernels.tiles.extras import Extras
    from ...kernels.tiles.levels import Levels
    from ...kernels.tiles.terms import Dropout
    from ...layouts.layout import Layout
    from ...op.problem import Problem
    from ...scores.multilevel import MultiLevel
    from ..call import Call, Needs
    from ..places import Places

name = "triton"

LARGEST = 256  # of D and E
LOG2E = 1 / math.log(2)
DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))

_NOTHING = nullcontext()
T = TypeVar("T")


def why_not(problem: Problem) -> list[str]:
    """Say what keeps the Triton kernels from running this problem."""
    query, value = problem.query, problem.value
    D, E = query.shape[3], value.shape[3]
    target = target_of(query.device)
    if isinstance(target, str):  # asked in every call on a CPU, so nothing else is looked at
        return [target]
    reasons = []
    if target.is_interpreted and query.dtype == torch.bfloat16:
        reasons.append("dtype: Triton's interpreter computes with the bits of bfloat16, not with its numbers")
    if query.dtype not in DTYPES:
        reasons.append(f"dtype: float32, float16 or bfloat16, got {query.dtype}")
    if D > LARGEST or E > LARGEST:
        reasons.append(f"head size: at most {LARGEST}, got D={D} and E={E}")
    if problem.terms:
        reasons += why_not_terms(problem.terms, problem.score)
    return reasons


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute out [B, H, Q, E] and lse [B, H, Q]."""
    kernels = _kernels()
    query = call.query
    out = empty_like_query(query, call.value.shape[3])
    lse = empty_row_numbers(query)
    if not lse.numel():
        return out, lse
    with _on(query.device):
        _run(call, kernels.FORWARD, (out, lse, call.row_max), lambda: _forward(call, out, lse))
    return out, lse


def _forward(call: Call, out: Tensor, lse: Tensor) -> None:
    """Run the kernels, which write out and lse."""
    kernels, query, layout = _kernels(), call.query, call.layout
    extras, factors = _extras(call)
    inputs = dense_rows(query), dense_rows(call.key), dense_rows(call.value)
    sink = None if call.sink is None else call.sink.float()
    by_query, _, edges = _lists(layout)
    has_tiles, has_edges = by_query.tile.shape[0] > 1, edges.edges > 0
    # The edges go on from the tiles' result, which is not rounded in between; the last one adds the sink.
    partly = torch.empty_like(out, dtype=torch.float32) if has_tiles and has_edges else out
    if has_tiles or not has_edges:
        last_sink = None if has_edges else sink
        target = _target(query.device)
        kernels.tiles_forward(
            *(_before_tiles(query, factors), *inputs[1:], partly, lse, by_query, target),
            sink=last_sink,
            extras=extras,
            row_max=call.row_max,
            **_numbers(call),
        )
    if has_edges:
        start = (partly, lse) if has_tiles else None
        kernels.edges_forward(
            *(*inputs, edges, out, lse, _score(call, extras.dropout)),
            sink=sink,
            start=start,
            row_max=call.row_max,
        )


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Needs,
) -> Grads:
    """Compute the gradients that are needed."""
    dq, dk, dv = grads = empty_grads(call.inputs[:3], needs[:3])
    parts = terms.Gradients(call, needs)
    d_sink: Tensor | None = None
    if not lse.numel():
        if call.sink is not None and needs.sink:
            d_sink = torch.zeros_like(call.sink)
        for grad in grads:
            if grad is not None:
                grad.zero_()
        return Grads(dq, dk, dv, d_sink, **parts.finish())
    # A gradient lies in memory like its input; the kernels write dense rows.
    written = list(map(empty_dense_rows, grads))
    out, grad_out = dense_rows(out), dense_rows(grad_out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    sums: tuple[Tensor, Tensor] | None = None
    with _on(call.query.device):
        results = out, lse, grad_out, grad_lse

        def run() -> None:
            nonlocal sums
            # Layouts of edges only compute them on their way.
            if call.layout.tiles > 0 or not call.layout.edges or needs.sink:
                sums = _kernels().row_sums(*results)
            _backward(call, *results, sums, written, parts)

        if needs.sink or parts.wanted or parts.needs_weight:
            run()  # some gradients are added up by torch
        else:
            _run(call, _kernels().BACKWARD, (*results, *written), run)
    copy_back(grads, written)
    if needs.sink:
        assert call.sink is not None and sums is not None
        delta, lse2 = sums
        share = torch.exp2(call.sink.float()[:, None] * LOG2E - lse2)  # [B, H, Q padded]
        d_sink = torch.empty_like(call.sink).copy_(-(share * delta).sum((0, 2), dtype=torch.float64))
    return Grads(dq, dk, dv, d_sink, **parts.finish())


def _backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    sums: tuple[Tensor, Tensor] | None,
    written: Sequence[Tensor | None],
    parts: terms.Gradients,
) -> None:
    """Run the kernels, which write the gradients of query, key and value, and those of the parts."""
    kernels, layout = _kernels(), call.layout
    (extras, factors), numbers = _extras(call), _numbers(call)
    inputs = dense_rows(call.query), dense_rows(call.key), dense_rows(call.value)
    by_query, by_key, edges = _lists(layout)
    has_tiles, has_edges = by_query.tile.shape[0] > 1, edges.edges > 0
    starts: list[Tensor | None] = [None, None, None]
    if sums is not None and (has_tiles or not has_edges):
        starts = dq, dk, dv = [
            None if x is None else torch.empty_like(x, dtype=torch.float32) if has_edges else x
            for x in written
        ]
        given = _before_tiles(call.query, factors), *inputs[1:], grad_out, *sums
        target = _target(call.query.device)
        grads = parts.by_query(by_query)
        if dq is not None or grads is not None:
            kernels.tiles_backward_query(
                *(*given, torch.empty_like(inputs[0]) if dq is None else dq, by_query, target),
                extras=extras,
                grads=grads,
                **numbers,
            )
        if (dk is not None or dv is not None or parts.key is not None) and call.key.shape[2]:
            kernels.tiles_backward_key(
                *(*given, dk, dv, by_key, target),
                extras=extras,
                d_key_bias=parts.key,
                **numbers,
            )
        if dq is not None and factors is not None:
            dq.mul_(factors)
    if has_edges and (parts.wanted or parts.needs_weight or any(x is not None for x in written)):
        given_out = out, lse, grad_out, grad_lse
        parts.edges, parts.weight = kernels.edges_backward(
            *(*inputs, edges, *given_out, written, _score(call, extras.dropout)),
            needs_weight=parts.needs_weight,
            needs_bias=bool(parts.wanted),
            starts=starts,
        )


def _run(
    call: Call, which: tuple[Any, ...], results: tuple[Tensor | None, ...], run: Callable[[], None]
) -> None:
    """Run a pass with some of these kernels, from what its layout keeps, if it can.

    Scores of their own and places compute tensors in other ways. What is made while a graph is captured is
    there only when the graph is replayed.
    """
    layout, query = call.layout, call.query
    if call.score is not None or call.places is not None or is_capturing(query.device):
        run()
        return
    kernels, prepared = _kernels(), layout.kept.prepared
    passes = prepared.get("triton passes")
    if passes is None:
        passes = prepared["triton passes"] = kernels.Passes()
    numbers = call.scale, call.softcap, call.dropout_p, kernels.precision(query.dtype)
    given = *call.given, call.slopes, call.seed, *results, *call.codes

    def owned() -> Iterator[Tensor]:
        by_query, by_key, edges = _lists(layout)
        return _tensors_of((by_query, by_key, *vars(edges).values()))

    kernels.run_pass(passes, which, numbers, given, run, owned)


def _tensors_of(x: object) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for y in x:
            yield from _tensors_of(y)


@functools.cache
def _kernels() -> Any:
    """Import the kernels, and with them Triton."""
    from . import kernels

    return kernels


def _numbers(call: Call) -> dict[str, float]:
    """Return what kernels over tiles take, for which q comes negated where the scale is."""
    score = call.multilevel
    scale = call.kernel_scale if score is None else call.kernel_scale / min(score.ranks)
    return {"scale": -scale if _negates(call) else scale, "softcap": call.softcap}


def _negates(call: Call) -> bool:
    """Say whether the scale is negative: kernels over tiles take c > 0, the scale's share of a weight."""
    return call.scale < 0 and not call.softcap


def _before_tiles(query: Tensor, factors: Tensor | float | None) -> Tensor:
    """Return the query as kernels over tiles read it."""
    return dense_rows(query if factors is None else (query * factors).to(query.dtype))


def _levels(call: Call, score: MultiLevel) -> tuple[Levels, Tensor]:
    """Return the levels of a multi-level score, and what multiplies the query in front of them, [D].

    That is the least rank over each level's, and the scale divides by the least: these are powers of 2 for
    most ranks that are in use, so that the query is not rounded again.
    """
    from ...kernels.tiles.levels import Levels, table

    layout = call.layout
    kept, device = layout.kept, layout.device
    found = kept.header.levels
    assert found is not None  # the layout fits the score

    def make() -> tuple[Tensor, Tensor]:
        ranks = torch.tensor(score.ranks, device=device)
        factors = (min(score.ranks) / ranks).repeat_interleave(ranks, output_size=found.prefixes[-1])
        return table(found.widths, found.prefixes, kept.header.q_start, device), factors

    made = _prepare(layout, "triton levels", make)  # a copy to the device for each layout, not for each call
    per_pair = score.normalize == "pair"
    return Levels(made[0], found.prefixes, per_pair, shares_first=found.widths[0] == 0), made[1]


def _score(call: Call, dropout: Dropout) -> Score:
    """Say how the edge kernels score."""
    kernels, found = _kernels(), call.additive
    additive = None if found is None else kernels.Additive(found[0].contiguous(), found[1])
    score: Score = kernels.Score(
        scale=call.kernel_scale,
        softcap=call.softcap,
        additive=additive,
        bias=terms.bias_of_edges(call),
        dropout=dropout,
    )
    return score


def _extras(call: Call) -> tuple[Extras, Tensor | float | None]:
    """Return what a call has besides its inputs, and what multiplies the query before tiles.

    That is -1 for a negative scale, and what ``_levels`` says.
    """
    q_start = call.layout.q_start
    factors: Tensor | float | None = -1.0 if _negates(call) else None
    plain: Extras = _kernels().PLAIN
    extras = plain._replace(terms=terms.pack(call), q_start=q_start, work=work_of(call.layout))
    if call.places is not None:
        extras = extras._replace(places=_places(call.places))
    if call.dropout_p:
        from ...kernels.tiles.terms import Dropout

        dropout = Dropout.of(call.dropout_p, call.seed, q_start, extras.places)
        extras = extras._replace(dropout=dropout)
    if call.multilevel is not None:
        levels, ranked = _levels(call, call.multilevel)
        extras, factors = extras._replace(levels=levels), ranked if factors is None else -ranked
    return extras, factors


def _places(places: Places) -> KernelPlaces:
    """Return places as kernels take them: None for what is not given."""
    from ...kernels.records import Places as KernelPlaces

    firsts = places.first_batch, places.first_head
    if places.queries is None:
        return KernelPlaces(first_batch=firsts[0], first_head=firsts[1])
    return KernelPlaces(places.queries, places.keys, places.q_len, places.k_len, *firsts)


def _target(device: torch.device) -> Target:
    found = target_of(device)
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on this device and its current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


def _prepare(layout: Layout, what: str, make: Callable[[], T]) -> T:
    """Return what ``make`` gives, made once for a layout and each stream: another one would not wait for it.

    A graph that is being captured gets what there is for any stream, since whoever captures has waited. What
    it makes is not kept: it is there only when the graph is replayed.
    """
    prepared, device = layout.kept.prepared, layout.device
    if is_capturing(device):
        return next((made for key, made in prepared.items() if key.startswith(f"{what},")), None) or make()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = f"{what}, stream {stream}"
    made: T | None = prepared.get(key)
    if made is None:
        made = prepared[key] = make()
    return made


def _lists(layout: Layout) -> tuple[Lists, Lists, EdgeLists]:
    """Return the tiles by query and by key, and the edges."""
    kept = layout.kept
    if not kept.is_trusted:
        layout.validate()

    def make() -> tuple[Lists, Lists, EdgeLists]:
        from ...kernels.edges.items import EdgeLists
        from ...kernels.records import Lists

        f, tile = layout.fields, kept.header.tile
        by_query = Lists(f.group, f.q_ptr, f.q_tile, f.q_mark, f.patterns, f.q_order, tile)
        by_key = Lists(f.group, f.k_ptr, f.k_tile, f.k_mark, f.patterns_t, f.k_order, tile)
        edges = EdgeLists(
            *(f.group, f.edge_ptr, f.edge_key, f.edge_id, f.col_ptr, f.col_query, f.col_edge),
            kept.header.groups,
            layout.longest,
        )
        return by_query, by_key, edges

    by_query, by_key, edges = _prepare(layout, "triton", make)
    # A copy: lists that it derives while a graph is captured stay its own.
    return by_query, by_key, copy.copy(edges) if is_capturing(layout.device) else edges

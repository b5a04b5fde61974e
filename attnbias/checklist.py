"""What ``attnbias verify`` goes through: every kernel of a backend, relation by relation, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dispatch, relations, soak, testing
from .buckets import t5_buckets
from .layouts.layout import Form
from .ops import attention
from .problem import Problem
from .relations import Relation
from .terms import ALiBi, KeyBias, RelativeBias

FORWARD, BACKWARD, ANY_PASS = "forward", "backward", "any pass"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# B, H, Hk, Q, K, D, E: one tile, ragged ones with shared keys, odd sizes, few queries.
SHAPES = (
    (1, 1, 1, 64, 64, 64, 64),
    (2, 4, 2, 97, 129, 16, 24),
    (1, 2, 2, 130, 260, 80, 33),
    (1, 4, 1, 3, 200, 128, 128),
)
LONG_TOKENS, LONG_ROWS, LONG_CHUNK = 65536, 256, 64


def _every_third(q: Tensor, k: Tensor) -> Tensor:
    return (q * 7 + k * 3) % 5 == 0


def _graph(q_len: int, k_len: int) -> Relation:
    """A graph with hubs, isolated nodes and duplicate edges."""
    generator = torch.Generator().manual_seed(q_len)
    source = torch.randint(k_len, (4 * q_len,), generator=generator)
    target = torch.randint(q_len, (4 * q_len,), generator=generator) // 3 * 2 % q_len
    return relations.Graph(torch.stack((source, target)), size=(k_len, q_len))


def _neighbours(q_len: int, k_len: int) -> Relation:
    """Nine keys a query at most, and some with none."""
    index = torch.rand(q_len, k_len, generator=torch.Generator().manual_seed(k_len)).topk(9).indices
    index[:, 6:] = torch.where(index[:, 6:] % 2 == 0, index[:, 6:], -1)
    index[1::7] = -1
    return relations.Neighbors(index)


def _documents(q_len: int, k_len: int) -> Relation:
    return relations.Documents(torch.arange(q_len) // 40, torch.arange(k_len) // 40)


# By name, for a number of queries and keys; those that compare positions stand at the end, as in decoding.
RELATIONS: dict[str, Callable[[int, int], Relation]] = {
    "full": lambda q, k: relations.Full(),
    "empty": lambda q, k: relations.Empty(),
    "causal": lambda q, k: relations.Causal(),
    "window": lambda q, k: relations.Window(before=31),
    "strictly past": lambda q, k: relations.Causal() & ~relations.Window(before=0),
    "documents": _documents,
    "global and window": lambda q, k: relations.Window(9, 9) | relations.Global([0, 17]),
    "dilated": lambda q, k: relations.Dilated(3, before=20),
    "scattered": lambda q, k: relations.Where(_every_third),
    "neighbours": _neighbours,
    "graph": _graph,
}
# Options of ``attention`` that other code runs for, on one relation each.
OPTIONS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "softcap and sink": lambda heads, k: {"softcap": 3.0, "sink": torch.linspace(-1, 2, heads)},
    "negative scale": lambda heads, k: {"scale": -0.3},
    "dropout": lambda heads, k: {"dropout_p": 0.3},
    "ALiBi and T5 table": lambda heads, k: {
        "terms": [
            ALiBi(torch.linspace(0.05, 0.2, heads)),
            RelativeBias(torch.linspace(-1, 1, heads * 16).view(heads, 16), t5_buckets(True, 64)),
        ]
    },
    "key bias": lambda heads, k: {"terms": [KeyBias(torch.linspace(-1, 1, k)[None])]},
}


class Line(NamedTuple):
    """One check: what, on which pass, and what is wrong with it ("" = nothing)."""

    backend: str
    what: str
    which: str
    fault: str

    def __str__(self) -> str:
        return f"{self.backend:10}{self.what:86}{self.which:10}{self.fault or 'ok'}"


@dataclass(frozen=True)
class Check:
    """One problem: a relation, how it is laid out, sizes, dtype and options."""

    relation: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    form: Form | None = None  # None: the relation itself is given
    option: str = ""

    def __str__(self) -> str:
        B, H, Hk, Q, K, D, E = self.shape
        sizes = f"{B} x {H}/{Hk} heads, {Q} x {K}, D {D}, E {E}"
        dtype = str(self.dtype).removeprefix("torch.")
        name = self.relation + (f", {self.option}" if self.option else "")
        return f"{name:32}{self.form or 'any':6} {dtype:9} {sizes}"

    def drawn(self) -> soak.Drawn:
        """The problem as random ones are: with inputs between NaNs."""
        B, H, Hk, Q, K, D, E = self.shape
        inputs = testing.make_inputs(sum(self.shape), B, H, Hk, Q, K, D, E, self.dtype)
        options: dict[str, Any] = {"q_start": 0 if Q > K else "end"}
        if self.option:
            options |= OPTIONS[self.option](H, K)
        relation = RELATIONS[self.relation](K if self.relation == "documents" else Q, K)
        if self.relation in ("neighbours", "graph"):  # rows are queries, wherever these stand
            options["q_start"] = 0
        return soak.Drawn(0, inputs, relation, options, self.form)


def checks() -> Iterator[Check]:
    """Every relation, laid out as tiles and as edges, in each dtype and shape; then the options."""
    for name in RELATIONS:
        forms: tuple[Form | None, ...] = (None, "edges") if name == "graph" else (None, "tiles", "edges")
        for form in forms:
            for dtype in DTYPES:
                # Logic shows in float32; half precision is rounded alike in every shape.
                for shape in SHAPES if dtype == torch.float32 else SHAPES[1:3]:
                    yield Check(name, shape, dtype, form)
    for option in OPTIONS:
        for name in ("causal", "window", "neighbours"):
            for shape in SHAPES[1:3]:
                yield Check(name, shape, option=option, form=None)


def backends_of(device: torch.device | str) -> dict[str, str]:
    """Each backend with the reasons why it cannot run on a device; none = it can."""
    x = torch.zeros(1, 1, 128, 64, device=device)
    problem = Problem(x, x, x, relations.Full())
    return {name: "; ".join(backend.why_not(problem)) for name, backend in dispatch.BACKENDS.items()}


def lines(device: torch.device | str, backend: str | None, wanted: str = "") -> Iterator[Line]:
    """Compare every check whose words hold ``wanted``, on one backend or on each that can run, a pass a line.

    What a backend refuses by design (sdpa all but full and causal, the reference layouts) is passed over.
    """
    names = [backend] if backend else [name for name, why in backends_of(device).items() if not why]
    for name in names:
        for check in checks():
            if wanted in str(check):
                run = partial(_compare, check, name, device)
                yield from _judge(name, str(check), run)


def _compare(check: Check, backend: str, device: torch.device | str) -> list[str]:
    return soak.compare(check.drawn(), backend, device)


def _judge(backend: str, what: str, compare: Callable[[], list[str]]) -> Iterator[Line]:
    """Run one comparison: a line for each pass, one if it raises, none if the backend refuses it."""
    try:
        faults = compare()
    except NotImplementedError:
        return
    except Exception as error:  # the checks that follow are still of use
        yield Line(backend, what, ANY_PASS, f"RAISED {words_of(error)}")
        return
    for which in (FORWARD, BACKWARD):
        mine = [fault for fault in faults if fault.startswith(("out", "lse")) == (which == FORWARD)]
        yield Line(backend, what, which, "WRONG " + "; ".join(mine) if mine else "")


def words_of(error: Exception) -> str:
    """Return an exception's type, its first two lines and its last, where compilers name the cause.

    Example:
        >>> words_of(RuntimeError("no kernel\\nfor this\\n  a trace\\nit does not fit"))
        'RuntimeError: no kernel | for this | it does not fit'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *([" | ".join(lines[:2] + lines[2:][-1:])] if lines else [])])


# -- long inputs: some rows of the reference at a time ----------------------------------------------


def _long_relations(tokens: int) -> dict[str, Relation]:
    ids = torch.arange(tokens) * 37 // tokens
    index = torch.arange(tokens)[:, None] + torch.tensor([-4000, -64, -1, 0, 1, 77, 5000])
    return {
        "causal": relations.Causal(),
        "window": relations.Window(before=1023),
        "documents and causal": relations.Documents(ids) & relations.Causal(),
        "window or global": relations.Window(before=255) | relations.Global(range(64)),
        "neighbours": relations.Neighbors(torch.where((index >= 0) & (index < tokens), index, -1)),
    }


def long_lines(device: torch.device | str, backend: str | None, tokens: int = LONG_TOKENS) -> Iterator[Line]:
    """Compare 64 k tokens: all of them take part, and chunks of query rows are looked at."""
    names = [backend] if backend else [dispatch.KERNELS.get(torch.device(device).type, "rows")]
    starts = torch.linspace(0, tokens - LONG_CHUNK, LONG_ROWS // LONG_CHUNK).long()
    rows = (starts[:, None] + torch.arange(LONG_CHUNK)).reshape(-1)
    q, k, v = (x.to(device) for x in testing.make_inputs(0, 1, 1, 1, tokens, tokens, 16, 16))
    for name in names:
        for what, relation in _long_relations(tokens).items():

            def attend(q: Tensor, k: Tensor, v: Tensor, r: Relation = relation, b: str = name) -> Tensor:
                return attention(q, k, v, r, backend=b)

            title = f"{what:32}{tokens:,} tokens, {len(rows):,} rows looked at"
            yield from _judge(name, title, partial(compare_rows, attend, relation, (q, k, v), rows))


def compare_rows(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    relation: Relation,
    inputs: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    q_start: int = 0,
) -> list[str]:
    """What is wrong with some query rows and with the gradients that come from them; empty = nothing.

    All keys take part, and memory and time are those of the rows, not of all pairs.

    Args:
        attend: what is checked.
        relation: its definition, which all heads and batch elements share.
        inputs: query [B, H, Q, D], key [B, Hk, K, D], value [B, Hk, K, E].
        rows: [n], numbers of query rows.
        q_start: position of the first query row.
    """
    query, key, value = inputs
    device, dtype = query.device, query.dtype
    generator = torch.Generator().manual_seed(0)
    shape = (*query.shape[:2], len(rows), value.shape[3])
    d_out = torch.randn(shape, generator=generator).to(device, dtype)
    rows = rows.to(device)
    keys = torch.arange(key.shape[2], device=device)

    def textbook(dtype: torch.dtype) -> list[Tensor]:
        outs, d_queries = [], []
        d_key = torch.zeros_like(key, dtype=torch.float64)
        d_value = torch.zeros_like(value, dtype=torch.float64)
        for part, d_part in zip(rows.split(LONG_CHUNK), d_out.split(LONG_CHUNK, 2), strict=True):
            q, k, v = (x.detach().to(dtype).requires_grad_() for x in (query[:, :, part], key, value))
            mask = relation.related((part + q_start)[:, None], keys)
            out = testing.eager(q, k, v, mask)[0]
            grads = torch.autograd.grad(out, (q, k, v), d_part.to(dtype))
            outs.append(out.detach())
            d_queries.append(grads[0])
            d_key += grads[1]  # in float64: the chunks are our doing, their sum must not add to the error
            d_value += grads[2]
        return [torch.cat(outs, 2), torch.cat(d_queries, 2), d_key, d_value]

    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out = attend(q, k, v)[:, :, rows]
    d_query, d_key, d_value = torch.autograd.grad(out, (q, k, v), d_out)
    got = [out, d_query[:, :, rows], d_key, d_value]
    same, exact = textbook(dtype), textbook(torch.float64)
    sizes = testing.magnitudes(query[:, :, rows], key, value, d_out, torch.zeros(1), query.shape[3] ** -0.5)
    faults = []
    for name, mine, theirs, truth in zip(("out", "query", "key", "value"), got, same, exact, strict=True):
        try:
            factor = 2.0 if name == "out" else 3.0
            testing.assert_no_worse(name, mine, theirs, truth, factor, magnitude=sizes[name])
        except AssertionError as error:
            faults.append(str(error))
    return faults

"""The checks of ``attnbias verify``: every kernel of a backend, relation by relation, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import relations
from ..attention import attention
from ..layouts.fill import Form
from ..op import dispatch
from ..op.problem import Problem
from ..relations import Relation
from . import shipped, soak
from .compare import by_relation, compare_rows
from .draw import Drawn
from .inputs import make_inputs
from .shipped import OPTIONS

FORWARD, BACKWARD, ANY_PASS = "forward", "backward", "any pass"
SHIPPED = "shipped kernels"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# B, H, Hk, Q, K, D, E: one tile, ragged ones with shared keys, odd sizes, few queries.
SHAPES = (
    (1, 1, 1, 64, 64, 64, 64),
    (2, 4, 2, 97, 129, 16, 24),
    (1, 2, 2, 130, 260, 80, 33),
    (1, 4, 1, 3, 200, 128, 128),
)
LONG_TOKENS = 65536
LONG_CHUNKS, LONG_CHUNK = 4, 64  # query rows that are compared


def _every_third(q: Tensor, k: Tensor) -> Tensor:
    return (q * 7 + k * 3) % 5 == 0


def _graph(q_len: int, k_len: int) -> Relation:
    """Build a graph with hubs, isolated nodes and duplicate edges."""
    generator = torch.Generator().manual_seed(q_len)
    source = torch.randint(k_len, (4 * q_len,), generator=generator)
    target = torch.randint(q_len, (4 * q_len,), generator=generator) // 3 * 2 % q_len
    return relations.Graph(torch.stack((source, target)), size=(k_len, q_len))


def _neighbours(q_len: int, k_len: int) -> Relation:
    """Build lists of at most nine keys per query; some queries have none."""
    index = torch.rand(q_len, k_len, generator=torch.Generator().manual_seed(k_len)).topk(9).indices
    index[:, 6:] = torch.where(index[:, 6:] % 2 == 0, index[:, 6:], -1)
    index[1::7] = -1
    return relations.Neighbors(index)


def _documents(q_len: int, k_len: int) -> Relation:
    return relations.Documents(torch.arange(q_len) // 40, torch.arange(k_len) // 40)


# By name, for a number of queries and keys; the queries are the last positions, as in decoding.
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


class Line(NamedTuple):
    """The verdict on one pass of one check: what is wrong with it ("" = nothing)."""

    backend: str
    what: str
    which: str
    fault: str
    relation: str  # or what else the check is of

    def __str__(self) -> str:
        return f"{self.backend:10}{self.what:86}{self.which:10}{self.fault or 'ok'}"


@dataclass(frozen=True)
class Check:
    """One problem: a relation, its form of layout, sizes, dtype and option."""

    relation: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    form: Form | None = None  # None: pass the relation itself
    option: str = ""

    def __str__(self) -> str:
        B, H, Hk, Q, K, D, E = self.shape
        sizes = f"{B} x {H}/{Hk} heads, {Q} x {K}, D {D}, E {E}"
        dtype = str(self.dtype).removeprefix("torch.")
        name = self.relation + (f", {self.option}" if self.option else "")
        return f"{name:32}{self.form or 'any':6} {dtype:9} {sizes}"

    def drawn(self) -> Drawn:
        """Return the problem in the form of the random ones, with inputs surrounded by NaN."""
        B, H, Hk, Q, K, D, E = self.shape
        inputs = make_inputs(sum(self.shape), B, H, Hk, Q, K, D, E, self.dtype)
        options: dict[str, Any] = {"q_start": 0 if Q > K else "end"}
        if self.option:
            options |= OPTIONS[self.option](H, K)
        relation = RELATIONS[self.relation](K if self.relation == "documents" else Q, K)
        if self.relation in ("neighbours", "graph"):  # their data starts at query 0
            options["q_start"] = 0
        return Drawn(0, inputs, relation, options, self.form)


def checks() -> Iterator[Check]:
    """Yield every relation, laid out as tiles and as edges, in each dtype and shape; then the options."""
    for name in RELATIONS:
        forms: tuple[Form | None, ...] = (None, "edges") if name == "graph" else (None, "tiles", "edges")
        for form in forms:
            for dtype in DTYPES:
                # Logic errors show in float32; half precision rounds alike in every shape.
                for shape in SHAPES if dtype == torch.float32 else SHAPES[1:3]:
                    yield Check(name, shape, dtype, form)
    for option in OPTIONS:
        for name in ("causal", "window", "neighbours"):
            for shape in SHAPES[1:3]:
                yield Check(name, shape, option=option, form=None)


def backends_of(device: torch.device | str) -> dict[str, str]:
    """Return why each backend cannot run on a device; "" = it can."""
    # Some backends for GPUs compute in half precision only, some for CPUs not in every one.
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    x = torch.zeros(1, 1, 128, 64, device=device, dtype=dtype)
    problem = Problem(x, x, x, relations.Full())
    return {name: "; ".join(backend.why_not(problem)) for name, backend in dispatch.BACKENDS.items()}


def lines(device: torch.device | str, backend: str | None, wanted: str = "") -> Iterator[Line]:
    """Run every check whose title contains ``wanted``; yield one line per pass.

    Runs on one backend, or on each that can run. Skips what a backend refuses by design (sdpa: all but full
    and causal; the reference: layouts). On a GPU its kernels come first, as they are shipped.
    """
    names = [backend] if backend else [name for name, why in backends_of(device).items() if not why]
    kernels = dispatch.KERNELS.get(torch.device(device).type)
    if torch.device(device).type == "cuda" and kernels in names:
        yield from shipped_lines(device, kernels, wanted)
    for name in names:
        for check in checks():
            if wanted in str(check):
                find = partial(soak.find_faults, check.drawn(), name, device)
                yield from _judge(name, check.relation, str(check), find)


def shipped_lines(device: torch.device | str, backend: str, wanted: str = "") -> Iterator[Line]:
    """Run the checks of the shipped kernels; each line has their configurations."""
    for check in shipped.checks(backend, torch.device(device)):
        if wanted not in check.name:
            continue
        title = f"shipped: {check.name}"
        try:
            verdict = check.run()
        except NotImplementedError:
            continue
        except Exception as error:  # the checks that follow are still useful
            yield Line(backend, title, ANY_PASS, f"RAISED {words_of(error)}", SHIPPED)
            continue
        if verdict.skipped:
            yield Line(backend, f"{title} (skipped: {verdict.skipped})", ANY_PASS, "", SHIPPED)
            continue
        words = f"  {verdict.kernels}" if verdict.kernels else ""
        yield from _by_pass(backend, SHIPPED, f"{title}{words}", list(verdict.faults.values()))


def _judge(backend: str, relation: str, what: str, find: Callable[[], list[str]]) -> Iterator[Line]:
    """Run one comparison; yield a line per pass, one line if it raises, none if the backend refuses it."""
    try:
        faults = find()
    except NotImplementedError:
        return
    except Exception as error:  # the checks that follow are still useful
        yield Line(backend, what, ANY_PASS, f"RAISED {words_of(error)}", relation)
        return
    yield from _by_pass(backend, relation, what, faults)


def _by_pass(backend: str, relation: str, what: str, faults: list[str]) -> Iterator[Line]:
    for which in (FORWARD, BACKWARD):
        mine = [fault for fault in faults if fault.startswith(("out", "lse", "max")) == (which == FORWARD)]
        yield Line(backend, what, which, "WRONG " + "; ".join(mine) if mine else "", relation)


def words_of(error: Exception) -> str:
    """Return an exception's type, its first two lines and its last one, where compilers name the cause.

    Example:
        >>> words_of(RuntimeError("no kernel\\nfor this\\n  a trace\\nit does not fit"))
        'RuntimeError: no kernel | for this | it does not fit'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *([" | ".join(lines[:2] + lines[2:][-1:])] if lines else [])])


# -- long inputs: only some query rows are compared --------------------------------------------------


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
    """Compare chunks of query rows among 64 k tokens, all of which take part; yield one line per pass."""
    names = [backend] if backend else [dispatch.KERNELS.get(torch.device(device).type, "rows")]
    starts = torch.linspace(0, tokens - LONG_CHUNK, LONG_CHUNKS).long()
    rows = (starts[:, None] + torch.arange(LONG_CHUNK)).reshape(-1)
    q, k, v = (x.to(device) for x in make_inputs(0, 1, 1, 1, tokens, tokens, 16, 16))
    for name in names:
        for what, relation in _long_relations(tokens).items():
            title = f"{what:32}{tokens:,} tokens, {len(rows):,} rows compared"
            attend, textbook = partial(attention, relation=relation, backend=name), by_relation(relation)
            yield from _judge(name, what, title, partial(compare_rows, attend, textbook, (q, k, v), rows))

"""The checks that ``attnbias verify`` and ``attnbias report`` run first on a GPU: the shipped kernels.

The table of configurations is for head sizes of 64, 128 and 256 in 16 bits. Each entry runs once, each option
runs once, layouts are made on the device, and the promises that only hardware can break are put to the test:
the same bits in every run and stream, another device than the current one, CUDA graphs, offsets above 2^31.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import relations
from ..attention import attention
from ..layouts.layout import Layout
from ..relations import Relation
from ..scores.buckets import t5_buckets
from ..scores.terms import ALiBi, KeyBias, RelativeBias
from . import soak
from .built import describe
from .compare import by_relation, compare_rows
from .draw import Drawn
from .inputs import make_inputs
from .locate import locate

LENGTH, HEADS, KEY_HEADS = 1000, 4, 1
HALVES = (torch.bfloat16, torch.float16)
SIZES = (64, 128, 256)
TILES = (128, 64)
FAR = 1 << 31  # elements: offsets from here on need 64 bits
ROOM = 3 * FAR  # bytes: a 16-bit tensor of FAR elements, and half as much besides

# Options of ``attention`` that have code of their own, for heads and keys.
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


class Verdict(NamedTuple):
    """What a check found: the fault of each wrong result, and the kernels that ran."""

    faults: dict[str, str]
    kernels: str = ""
    skipped: str = ""  # why it did not run


class Check(NamedTuple):
    """One check."""

    name: str
    run: Callable[[], Verdict]


class Problem(NamedTuple):
    """A comparison with float64, on a layout of a given tile."""

    relation: Relation
    dtype: torch.dtype
    size: int  # D and E
    tile: int = 128
    option: str = ""
    length: int = LENGTH

    @property
    def name(self) -> str:
        """Name the check."""
        more = f", {self.option}" if self.option else ""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{type(self.relation).__name__} {kind} D {self.size}, tile {self.tile}{more}"

    def check(self, backend: str | None, device: torch.device) -> Verdict:
        """Compare results and gradients with float64; say where wrong ones are and whether they stay so."""
        n = self.length
        inputs = make_inputs(self.size, 1, HEADS, KEY_HEADS, n, n, self.size, self.size, self.dtype)
        options = OPTIONS[self.option](HEADS, n) if self.option else {}
        layout = Layout.build(self.relation, n, n, form="tiles", tile=self.tile, heads=HEADS, device=device)
        return judge(Drawn(0, inputs, self.relation, options, None), backend, device, layout)


def judge(drawn: Drawn, backend: str | None, device: torch.device, layout: Layout) -> Verdict:
    """Compare a call with float64; a wrong one twice, to see whether the same numbers are wrong again.

    Args:
        drawn: the call, on the CPU.
        backend: by name.
        device: where it runs.
        layout: on the device.
    """
    results = soak.find_results(drawn, backend, device, layout)
    query, _, value = drawn.inputs
    kernels = "" if layout.tiles else "edges"
    if layout.tiles and backend in (None, "triton"):  # others run none, though the process may have some
        kernels = describe(query.dtype, query.shape[3], value.shape[3], layout.tile)
    if not any(x.fault for x in results.values()):
        return Verdict({}, kernels)
    again = soak.find_results(drawn, backend, device, layout)
    faults = {}
    for name, result in results.items():
        if result.fault and result.got is not None:
            other = again[name].got
            words = [result.fault]
            if result.wrong is not None:
                words.append(locate(name, result.wrong, result.got, layout))
            words.append(
                "a second run is right"
                if other is None
                else f"a second run gives {'the same' if same_bits([result.got], [other]) else 'other'} bits"
            )
            faults[name] = "; ".join(words)
    return Verdict(faults, kernels)


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    """Tell whether tensors are equal bit by bit; NaN equals NaN.

    Example:
        >>> x = torch.tensor([0.0, torch.nan])
        >>> same_bits([x], [x.clone()]), same_bits([x], [-x])
        (True, False)
    """
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    pairs = zip(left, right, strict=True)
    return all(
        torch.equal(x.contiguous().view(kind), y.contiguous().view(kind))
        for x, y in pairs
        for kind in [whole[x.element_size()]]
    )


def checks(backend: str | None, device: torch.device, *, quick: bool = False) -> Iterator[Check]:
    """Yield the checks, the most telling first.

    Args:
        backend: by name; None for the chosen one.
        device: where they run.
        quick: leave out float16, tiles of 64 and head sizes of 256.
    """
    causal = relations.Causal()
    for dtype in HALVES[:1] if quick else HALVES:
        for tile in TILES[:1] if quick else TILES:
            for size in SIZES[:2] if quick else SIZES:
                yield _of(Problem(causal, dtype, size, tile), backend, device)
    for option in OPTIONS:
        yield _of(Problem(causal, torch.bfloat16, 64 if quick else 128, option=option), backend, device)
    yield _of(Problem(relations.Window(before=99), torch.bfloat16, 64), backend, device)
    yield _of(Problem(causal, torch.float32, 64), backend, device)
    for name, make in _MADE_THERE.items():
        yield Check(f"{name} made on the device", partial(_made_there, make, backend, device))
    for name, promise in _PROMISES.items():
        yield Check(name, partial(promise, backend, device))


def _of(problem: Problem, backend: str | None, device: torch.device) -> Check:
    return Check(problem.name, partial(problem.check, backend, device))


# -- layouts made where the tensors are -------------------------------------------------------------


def _draw_graph(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(n, (2, 6 * n), generator=generator)


def _draw_neighbours(n: int) -> Tensor:
    return torch.rand(n, n, generator=torch.Generator().manual_seed(1)).topk(9).indices


# By name: the data, and the relation that it makes on whichever device it is.
_MADE_THERE: dict[str, tuple[Callable[[int], Tensor], Callable[[Tensor], Relation]]] = {
    "Graph": (_draw_graph, lambda x: relations.Graph(x, size=(LENGTH, LENGTH))),
    "Neighbors": (_draw_neighbours, relations.Neighbors),
    "Documents": (lambda n: torch.arange(n) // 170, lambda x: relations.Documents(x) & relations.Causal()),
}


def _made_there(
    make: tuple[Callable[[int], Tensor], Callable[[Tensor], Relation]],
    backend: str | None,
    device: torch.device,
) -> Verdict:
    draw, relate = make
    data = draw(LENGTH)
    inputs = make_inputs(1, 1, HEADS, KEY_HEADS, LENGTH, LENGTH, 64, 64, torch.bfloat16)
    layout = relate(data.to(device)).layout(LENGTH, LENGTH, heads=HEADS, device=device)
    return judge(Drawn(0, inputs, relate(data), {}, None), backend, device, layout)


# -- promises ---------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """A training step on the device, whose bits are compared."""

    leaves: list[Tensor]
    layout: Layout
    grad: Tensor
    backend: str | None

    @classmethod
    def make(cls, backend: str | None, device: torch.device, size: int = 64) -> _Step:
        inputs = make_inputs(3, 1, HEADS, KEY_HEADS, LENGTH, LENGTH, size, size, torch.bfloat16)
        leaves = [x.to(device).requires_grad_() for x in inputs]
        relation = relations.Causal() & relations.Window(before=299)
        layout = relation.layout(LENGTH, LENGTH, form="tiles", heads=HEADS, device=device)
        return cls(leaves, layout, torch.randn_like(leaves[0]), backend)

    def run(self) -> list[Tensor]:
        out = attention(self.leaves[0], self.leaves[1], self.leaves[2], self.layout, backend=self.backend)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)]

    def differs(self, found: list[Tensor], wanted: list[Tensor], words: str) -> dict[str, str]:
        names = "out", "query", "key", "value"
        pairs = zip(names, found, wanted, strict=True)
        return {name: f"{name}: {words}" for name, x, y in pairs if not same_bits([x], [y])}


def _two_runs(backend: str | None, device: torch.device) -> Verdict:
    step = _Step.make(backend, device)
    first = step.run()
    faults: dict[str, str] = {}
    for _ in range(4):
        faults |= step.differs(step.run(), first, "a second run gives other bits")
    return Verdict(faults)


def _two_streams(backend: str | None, device: torch.device) -> Verdict:
    if device.type != "cuda":
        return Verdict({}, skipped="only CUDA has streams")
    step = _Step.make(backend, device)
    wanted = step.run()
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    found = []
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(step.run())
    torch.cuda.synchronize(device)
    faults: dict[str, str] = {}
    for each in found:
        faults |= step.differs(each, wanted, "two streams at once give other bits")
    return Verdict(faults)


def _other_device(backend: str | None, device: torch.device) -> Verdict:
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return Verdict({}, skipped="there is one device")
    here = device.index or 0
    other = torch.device("cuda", (here + 1) % torch.cuda.device_count())
    with torch.cuda.device(here):
        step = _Step.make(backend, other)
        rows = torch.arange(0, LENGTH, 31, device=other)
        relation = relations.Causal() & relations.Window(before=299)
        q, k, v = (x.detach() for x in step.leaves)
        mine = q[:, :1], k, v
        attend = partial(attention, relation=relation, backend=backend)
        faults = compare_rows(attend, by_relation(relation), mine, rows)
    return Verdict({fault.partition(":")[0]: fault for fault in faults}, f"on {other}, current cuda:{here}")


def _graph_replay(backend: str | None, device: torch.device) -> Verdict:
    if device.type != "cuda":
        return Verdict({}, skipped="only CUDA has graphs")
    step = _Step.make(backend, device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # compiled before it is captured
        for _ in range(2):
            step.run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.run()
    with torch.no_grad():
        for x in step.leaves:
            x.mul_(-0.5)
    graph.replay()
    torch.cuda.synchronize(device)
    return Verdict(step.differs(captured, step.run(), "the replay of a graph gives other bits than a call"))


def _far_offsets(backend: str | None, device: torch.device) -> Verdict:
    if device.type != "cuda":
        return Verdict({}, skipped="only GPUs: it takes gigabytes")
    free = torch.cuda.mem_get_info(device)[0]
    if free < ROOM:
        return Verdict({}, skipped=f"it needs {ROOM >> 30} GiB, and {free >> 30} are free")
    length = 512
    buffer = torch.empty(FAR + 3 * length * 64, dtype=torch.bfloat16, device=device)
    batches = FAR, length * 64, 64, 1  # the second batch element lies behind 2^31 elements
    inputs = [buffer.as_strided((2, 1, length, 64), batches, i * length * 64) for i in range(3)]
    for i, x in enumerate(inputs):
        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(i))
        x.copy_(drawn)
    q, k, v = inputs
    rows = torch.arange(0, length, 17, device=device)
    relation = relations.Causal()
    attend = partial(attention, relation=relation, backend=backend)
    faults = compare_rows(attend, by_relation(relation), (q, k, v), rows)
    return Verdict({fault.partition(":")[0]: fault for fault in faults})


def _compiled(backend: str | None, device: torch.device) -> Verdict:
    step = _Step.make(backend, device)
    q, k, v = (x.detach() for x in step.leaves)
    relation = relations.Window(before=99)
    attend = partial(attention, relation=relation, backend=backend)
    found = torch.compile(attend, fullgraph=True)(q, k, v)
    same = same_bits([found], [attend(q, k, v)])
    return Verdict({} if same else {"out": "out: torch.compile gives other bits than a call"})


_PROMISES: dict[str, Callable[[str | None, torch.device], Verdict]] = {
    "two runs have equal bits": _two_runs,
    "two streams have equal bits": _two_streams,
    "a device that is not current": _other_device,
    "CUDA graph captured and replayed": _graph_replay,
    "offsets above 2^31": _far_offsets,
    "torch.compile": _compiled,
}

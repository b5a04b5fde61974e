"""Host time of attention calls: what Python, PyTorch and Triton's launcher take until the driver is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch

import attnbias as ab

from .driver import fake_gpu

LENGTH, HEADS, SIZE = 256, 4, 64
CALLS = 40  # in a round


class Cost(NamedTuple):
    """CPU time of one call, in microseconds, and what it launched."""

    microseconds: float
    launches: int
    descriptors: int


class Case(NamedTuple):
    """A call to time, and the same with its backward."""

    name: str
    forward: Callable[[], object]
    both: Callable[[], object]


def cases() -> Iterator[Case]:
    """Yield calls of each kind of kernel, small ones: host time does not depend on lengths."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.zeros(1, HEADS, LENGTH, SIZE, dtype=torch.bfloat16) for _ in range(4))
    ends = torch.randint(0, LENGTH, (2, 600), generator=generator)
    hub = torch.stack((torch.randint(0, LENGTH, (400,), generator=generator), torch.zeros(400).long()))
    slopes = torch.linspace(0.05, 0.2, HEADS)
    layout = ab.Causal().layout(LENGTH, LENGTH)
    yield _case("tiles, a layout", (q, k, v, grad), layout)
    yield _case("tiles, a relation", (q, k, v, grad), ab.Causal())
    yield _case("tiles, dropout", (q, k, v, grad), layout, dropout_p=0.1)
    yield _case("terms, ALiBi", (q, k, v, grad), layout, terms=[ab.ALiBi(slopes)])
    learned = ab.ALiBi(slopes.clone().requires_grad_())
    yield _case("terms, learned ALiBi", (q, k, v, grad), layout, terms=[learned])
    table = torch.zeros(HEADS, 32, requires_grad=True)
    yield _case(
        "terms, learned T5", (q, k, v, grad), layout, terms=[ab.RelativeBias(table, ab.t5_buckets(True))]
    )
    yield _case("edges", (q, k, v, grad), ab.Graph(ends, LENGTH).layout(LENGTH, LENGTH))
    both = ab.Graph(torch.cat((ends, hub), 1), LENGTH).layout(LENGTH, LENGTH)
    yield _case("edges, one long row", (q, k, v, grad), both)


def _case(name: str, given: tuple[torch.Tensor, ...], relation: ab.Relation | ab.Layout, **more: Any) -> Case:
    *inputs, grad = given
    leaves = [x.clone().requires_grad_() for x in inputs]
    learned = [x for term in more.get("terms", ()) for x in vars(term).values() if _is_learned(x)]

    def run(tensors: list[torch.Tensor]) -> torch.Tensor:
        query, key, value = tensors
        out: torch.Tensor = ab.attention(query, key, value, relation, backend="triton", **more)
        return out

    def forward() -> object:
        with torch.no_grad():
            return run(inputs)

    def both() -> object:
        return torch.autograd.grad(run(leaves), (*leaves, *learned), grad)

    return Case(name, forward, both)


def _is_learned(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


class Timer:
    """Times a function on a fake GPU, round by round."""

    def __init__(self, gpu: fake_gpu, run: Callable[[], object]) -> None:
        self.gpu, self.run = gpu, run
        for _ in range(CALLS // 4):  # compiles, and fills caches
            run()
        self.rounds: list[float] = []

    def time(self) -> float:
        """Run a round; return the microseconds of CPU time that a call of it took."""
        start = time.process_time()
        for _ in range(CALLS):
            self.run()
        self.rounds.append((time.process_time() - start) / CALLS * 1e6)
        return self.rounds[-1]

    def cost(self) -> Cost:
        """Return the median of the rounds, with the launches of one call."""
        self.gpu.reset()
        self.run()
        return Cost(median(self.rounds), self.gpu.count(), self.gpu.count("descriptors"))


def measure(gpu: fake_gpu, run: Callable[[], object], rounds: int = 9) -> Cost:
    """Return the host cost of a call that launches kernels; inside ``with gpu``."""
    timer = Timer(gpu, run)
    for _ in range(rounds):
        timer.time()
    return timer.cost()

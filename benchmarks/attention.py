"""Time a case here and by its peers, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .cases import Attend, Case
from .peers import BY_HEAD, BY_NODE, FORWARD_ONLY, PEERS, CannotRunError
from .timing import Spread, interleave

OURS = "attnbias"
MATMUL = "torch.mm"  # of 2048 x 2048 in float32, the yardstick of the same run
MATMUL_SIZE = 2048


class Result(NamedTuple):
    """One case and pass: seconds by name, and the ratio of each peer's to ours, round by round.

    The ratio of torch.mm is our share of its rate, in useful operations.
    """

    case: Case
    backward: bool
    times: dict[str, Spread]
    ratios: dict[str, Spread]
    refused: dict[str, str]  # why a peer did not run

    @property
    def rate(self) -> float:
        """Useful operations a second."""
        return self.case.flops(backward=self.backward) / self.times[OURS].median


def steps(attend: Attend, inputs: tuple[Tensor, ...], *, backward: bool) -> Callable[[], object]:
    """What is timed: one forward pass, or a forward and a backward pass; results are fresh memory."""
    q, k, v, d_out = inputs
    if not backward:

        def forward() -> object:
            with torch.no_grad():
                return attend(q, k, v)

        return forward
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, d_out)


def scaling(case: Case, *, backward: bool, rounds: int, threads: int) -> Spread:
    """Wall time on one thread over that on several, in turn; on a busy machine it says little."""
    step = steps(case.attend, case.inputs(), backward=backward)
    ratios = []
    for _ in range(rounds + 1):  # the first warms up
        seconds = []
        for count in (1, threads):
            torch.set_num_threads(count)
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return Spread.of(ratios[1:])


def race(case: Case, names: Iterable[str], *, backward: bool, rounds: int) -> Result:
    """Time a case beside the named peers.

    Raises:
        AssertionError: if the results are wrong; wrong results are not timed.
    """
    if case.fault:
        raise AssertionError(f"{case.name}: wrong results\n{case.fault}")
    inputs = case.inputs()
    functions = {OURS: steps(case.attend, inputs, backward=backward)}
    refused = {}
    for name in names:
        if name == MATMUL:
            square = torch.randn(MATMUL_SIZE, MATMUL_SIZE)
            functions[name] = partial(torch.mm, square, square)
            continue
        if backward and name in FORWARD_ONLY:
            refused[name] = "has no backward pass on CPUs"
            continue
        try:
            attend = PEERS[name](case)
        except CannotRunError as error:
            refused[name] = str(error)
            continue
        theirs = inputs
        if name in BY_NODE:
            theirs = tuple(x.transpose(1, 2).contiguous() for x in inputs)  # type: ignore[assignment]
        elif name in BY_HEAD:
            theirs = tuple(x.contiguous() for x in inputs)  # type: ignore[assignment]
        functions[name] = steps(attend, theirs, backward=backward)
    samples = dict(zip(functions, interleave(list(functions.values()), rounds), strict=True))
    mine = samples.pop(OURS)
    times = {OURS: Spread.of(mine), **{name: Spread.of(each) for name, each in samples.items()}}
    work = dict.fromkeys(samples, 1.0)  # of ours over the peer's
    work[MATMUL] = case.flops(backward=backward) / (2 * MATMUL_SIZE**3)
    ratios = {
        name: Spread.of([work[name] * peer / ours for peer, ours in zip(each, mine, strict=True)])
        for name, each in samples.items()
    }
    return Result(case, backward, times, ratios, refused)

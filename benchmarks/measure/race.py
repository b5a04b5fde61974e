"""Time a case and its peers in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from attnbias.testing.checklist import words_of

from ..cases.tokens import Attend, Case
from ..peers.reasons import is_on_gpu
from ..peers.registry import BY_HEAD, BY_NODE, DENSE, FORWARD_ONLY, PEERS, CannotRunError
from .timing import CPU, Spread, Timer, alternate

OURS = "attnbias"
DEFAULT = "attnbias, default call"  # with the relation, and with whatever backend then runs
MATMUL = "torch.mm"  # of square matrices in the case's dtype: the yardstick of a run
MATMUL_SIZE = 2048
FAILED = "failed"  # the first word of the reason of a peer that raised
# A peer whose results differ from ours by more than this share of their norm computes another relation: no
# rounding comes near it. How exact peers are is not judged.
ANOTHER = 0.05


class Result(NamedTuple):
    """One case and pass: seconds by name, and the ratio of each peer's time to ours, round by round.

    The ratio of torch.mm is our share of its rate, in useful operations.
    """

    case: Case
    backward: bool
    times: dict[str, Spread]
    ratios: dict[str, Spread]
    refused: dict[str, str]  # why a peer did not run
    bytes: Mapping[str, int] = MappingProxyType({})  # peak memory of a call, if it was measured
    eager: Mapping[str, Spread] = MappingProxyType({})  # with Python's part, where ``times`` are the device's
    notes: Mapping[str, str] = MappingProxyType({})  # what is odd about a time

    @property
    def rate(self) -> float:
        """Return the useful operations per second."""
        return self.case.flops(backward=self.backward) / self.times[OURS].median


def steps(attend: Attend, inputs: tuple[Tensor, ...], *, backward: bool) -> Callable[[], object]:
    """Return the function to time: a forward pass, or forward and backward; results are fresh memory."""
    q, k, v, d_out = inputs
    if not backward:

        def forward() -> object:
            with torch.no_grad():
                return attend(q, k, v)

        return forward
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, d_out)


def scaling(case: Case, *, backward: bool, rounds: int, threads: int) -> Spread:
    """Measure wall time on one thread over that on several, in turn; unreliable on a busy machine."""
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


def peer_step(case: Case, name: str, inputs: tuple[Tensor, ...], *, backward: bool) -> Callable[[], object]:
    """Check a peer's results and return the function to time.

    Raises:
        CannotRunError: with the reason.
    """
    if backward and FORWARD_ONLY.get(name) == torch.device(case.device).type:
        raise CannotRunError(f"has no backward pass on {'CPUs' if case.device == 'cpu' else 'GPUs'}")
    attend = PEERS[name](case)
    theirs = inputs
    if name in BY_NODE:
        theirs = tuple(x.transpose(1, 2).contiguous() for x in inputs)
    elif name in BY_HEAD:
        theirs = tuple(x.contiguous() for x in inputs)
    with torch.no_grad():
        got = attend(*theirs[:3])
        want = case.attend(*inputs[:3])
    got = got.transpose(1, 2) if name in BY_NODE else got
    if name != DENSE and not (got - want).norm() <= ANOTHER * want.norm():
        raise CannotRunError("gives other results, so it is not timed")
    return steps(attend, theirs, backward=backward)


def race(
    case: Case,
    names: Iterable[str],
    *,
    backward: bool,
    rounds: int,
    timer: Timer = CPU,
    square: int = MATMUL_SIZE,
    with_memory: bool = False,
    budget: float = math.inf,
) -> Result:
    """Time a case and the named peers.

    Args:
        case: the problem.
        names: names of the peers; :data:`MATMUL` is the matrix product, :data:`DEFAULT` our call with the
            relation in place of the layout.
        backward: also run the backward pass.
        rounds: samples of each.
        timer: the clock.
        square: rows of the matrices.
        with_memory: also measure the memory of one call of each.
        budget: seconds of samples after which no further round begins, see :func:`~.timing.alternate`.

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
            matrix = torch.randn(square, square, device=case.device).to(case.dtype)
            functions[name] = partial(torch.mm, matrix, matrix)
            continue
        if name == DEFAULT:
            functions[name] = steps(case.attend_by_default, inputs, backward=backward)
            continue
        try:
            functions[name] = peer_step(case, name, inputs, backward=backward)
        except CannotRunError as error:
            refused[name] = str(error)
        except Exception as error:  # whatever a peer raises is its reason
            refused[name] = f"{FAILED}: {words_of(error)}"
            _recover(case)
    known = list(functions)

    def fail(number: int, error: Exception) -> None:
        """Refuse a peer that raises, usually in its backward pass."""
        if known[number] in (OURS, MATMUL):  # there are no ratios without these
            raise error
        refused[known[number]] = f"{FAILED}: {words_of(error)}"
        _recover(case)

    timed = dict(zip(known, alternate(list(functions.values()), rounds, timer, fail, budget), strict=True))
    sizes = {}
    for number, (name, step) in enumerate(functions.items()):
        if with_memory and name != MATMUL and name not in refused:
            try:
                sizes[name] = timer.peak_bytes(step)
            except Exception as error:
                fail(number, error)
    timed = {name: each for name, each in timed.items() if name not in refused}
    mine = timed[OURS].device
    work = dict.fromkeys(timed, 1.0)  # our work over the peer's
    work[MATMUL] = case.flops(backward=backward) / (2 * square**3)
    ratios = {
        name: Spread.of([work[name] * peer / ours for peer, ours in zip(each.device, mine, strict=True)])
        for name, each in timed.items()
        if name != OURS
    }
    return Result(
        case,
        backward,
        {name: Spread.of(each.device) for name, each in timed.items()},
        ratios,
        refused,
        sizes,
        {name: Spread.of(each.eager) for name, each in timed.items() if each.eager},
        {name: each.note for name, each in timed.items() if each.note},
    )


def _recover(case: Case) -> None:
    """Free what a failed peer left on a GPU; raise if it took the CUDA context with it."""
    if is_on_gpu(case):
        torch.cuda.synchronize(case.device)
        torch.cuda.empty_cache()

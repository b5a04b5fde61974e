"""What a multi-level score takes: over the plain kernel's time, and beside the formula of its definition."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import attnbias as ab

from . import report
from .attention import steps
from .cases import Case, causal
from .floors import Line, at_least, at_most
from .timing import Spread, interleave

# Ranks of the levels, whose widths halve, and the time over the plain kernel's at most: forward, and with
# the backward pass.
LIMITS = {
    (8,) * 8: (0.72, 0.66),
    (32, 8, 6, 4, 4, 4, 4, 2): (0.88, 0.86),
}
TOKENS, FORMULA_TOKENS = 4096, 1024
FORMULA_FLOOR = 10.0  # the formula's time over ours, forward and backward


def lines(rounds: int) -> Iterator[Line]:
    """A line for each score and pass, then one for the formula."""
    case = causal(TOKENS)
    for ranks, limits in LIMITS.items():
        for limit, backward in zip(limits, (False, True), strict=True):
            what = "forward + backward" if backward else "forward"
            title = f"causal@{TOKENS}, levels {', '.join(map(str, ranks))} over plain"
            report.progress(f"{title}, {what}")
            yield at_most(title, what, limit, over_plain(case, ranks, rounds, backward=backward))
    title = f"causal@{FORMULA_TOKENS}, levels {', '.join('8' * 8)}"
    report.progress(title)
    gain = over_formula(causal(FORMULA_TOKENS), (8,) * 8, rounds)
    yield at_least(title, "forward + backward", "formula", FORMULA_FLOOR, gain)


def over_plain(case: Case, ranks: tuple[int, ...], rounds: int, *, backward: bool) -> Spread:
    """Time with the score over that of the plain kernel, in turn."""
    attend = partial(ab.attention, relation=case.relation)
    calls = [attend, partial(attend, score=ab.MultiLevel(ranks))]
    functions = [steps(call, case.inputs(), backward=backward) for call in calls]
    return Spread.of([mine / plain for plain, mine in zip(*interleave(functions, rounds), strict=True)])


def over_formula(case: Case, ranks: tuple[int, ...], rounds: int) -> Spread:
    """The formula's time over ours, forward and backward, after a look at its results."""
    inputs = case.inputs()
    ours = partial(ab.attention, relation=case.relation, score=ab.MultiLevel(ranks))
    theirs = partial(by_formula, ranks=ranks)
    torch.testing.assert_close(ours(*inputs[:3]), theirs(*inputs[:3]), rtol=1e-3, atol=1e-4)
    functions = [steps(call, inputs, backward=True) for call in (ours, theirs)]
    return Spread.of([formula / mine for mine, formula in zip(*interleave(functions, rounds), strict=True)])


def by_formula(q: Tensor, k: Tensor, v: Tensor, *, ranks: tuple[int, ...]) -> Tensor:
    """Causal attention whose scores are the sum of a zero-filled matrix for each level, as it is defined."""
    tokens = q.shape[2]
    total, shared = torch.zeros(2, *q.shape[:3], tokens, dtype=q.dtype)
    first = 0
    for level, rank in enumerate(ranks):
        width = tokens >> level
        # [B, H, blocks, width, rank]
        blocks = [x[..., first : first + rank].unflatten(2, (-1, width)) for x in (q, k)]
        products = blocks[0] @ blocks[1].mT / rank
        matrices = torch.zeros_like(total)
        for at, product in enumerate(products.unbind(2)):
            inside = slice(at * width, (at + 1) * width)
            matrices[:, :, inside, inside] = product
            shared[:, :, inside, inside] += 1
        total = total + matrices
        first += rank
    scores = (total / shared).masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    out: Tensor = scores.softmax(-1) @ v
    return out

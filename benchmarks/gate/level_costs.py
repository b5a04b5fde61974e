"""Multi-level scores: their time over the plain kernel's, and over the formula of their definition."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import attnbias as ab
from attnbias.testing.compare import compare_rows

from ..cases.tokens import Case, causal
from ..measure import terminal
from ..measure.race import steps
from ..measure.timing import Spread, interleave
from .lines import Line, at_least, at_most

# Ranks of the levels, whose widths halve, and limits of the time over the plain kernel's: forward, and with
# the backward pass.
LIMITS = {
    (8,) * 8: (0.72, 0.66),
    (32, 8, 6, 4, 4, 4, 4, 2): (0.88, 0.86),
}
TOKENS, FORMULA_TOKENS = 4096, 1024
FORMULA_FLOOR = 10.0  # the formula's time over ours, forward and backward


def lines(rounds: int) -> Iterator[Line]:
    """Yield one line per score and pass, then one for the formula."""
    case = causal(TOKENS)
    for ranks, limits in LIMITS.items():
        for limit, backward in zip(limits, (False, True), strict=True):
            what = "forward + backward" if backward else "forward"
            title = f"causal@{TOKENS}, levels {', '.join(map(str, ranks))} over plain"
            terminal.progress(f"{title}, {what}")
            yield at_most(title, what, limit, over_plain(case, ranks, rounds, backward=backward))
    title = f"causal@{FORMULA_TOKENS}, levels {', '.join('8' * 8)}"
    terminal.progress(title)
    gain = over_formula(causal(FORMULA_TOKENS), (8,) * 8, rounds)
    yield at_least(title, "forward + backward", "formula", FORMULA_FLOOR, gain)


def over_plain(case: Case, ranks: tuple[int, ...], rounds: int, *, backward: bool) -> Spread:
    """Measure the time with the score over the plain kernel's, in turn."""
    attend = partial(ab.attention, relation=case.relation)
    calls = [attend, partial(attend, score=ab.MultiLevel(ranks))]
    functions = [steps(call, case.inputs(), backward=backward) for call in calls]
    return Spread.of([mine / plain for plain, mine in zip(*interleave(functions, rounds), strict=True)])


def over_formula(case: Case, ranks: tuple[int, ...], rounds: int) -> Spread:
    """Return the formula's time over ours, forward and backward, after comparing their results."""
    inputs = case.inputs()
    ours = partial(ab.attention, relation=case.relation, score=ab.MultiLevel(ranks))
    theirs = partial(by_formula, ranks=ranks)
    faults = compare_rows(ours, lambda q, k, v, rows: theirs(q, k, v), inputs[:3], scale=1 / min(ranks))
    if faults:
        raise AssertionError("\n".join(faults))
    functions = [steps(call, inputs, backward=True) for call in (ours, theirs)]
    return Spread.of([formula / mine for mine, formula in zip(*interleave(functions, rounds), strict=True)])


def by_formula(q: Tensor, k: Tensor, v: Tensor, *, ranks: tuple[int, ...]) -> Tensor:
    """Compute causal attention by the definition: scores are a sum of one zero-filled matrix per level."""
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

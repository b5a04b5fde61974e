"""Basic blocks and natural loops of machine code."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol


class Instruction(Protocol):
    """The fields of an instruction that determine control flow."""

    @property
    def addr(self) -> int: ...
    @property
    def pred(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def args(self) -> str: ...
    @property
    def base(self) -> str: ...


Blocks = dict[int, tuple[int, int]]  # index of its first instruction -> from, to
Successors = dict[int, list[int]]

_ENDS = frozenset(("BRA", "JMP", "EXIT", "RET"))


def cfg(ins: Sequence[Instruction], labels: Mapping[str, int]) -> tuple[Blocks, Successors]:
    """Split code into basic blocks, and return which may follow which.

    Raises:
        ValueError: if there is a jump through a table.
    """
    place = {x.addr: i for i, x in enumerate(ins)}
    target: dict[int, int] = {}
    leaders = {0, *(place[at] for at in labels.values() if at in place)}
    for i, x in enumerate(ins):
        if x.base == "BRX":
            raise ValueError(f"wanted direct jumps, got a jump through a table at {x.addr:#x}")
        named = re.findall(r"`\((\.L_\w+)\)", x.args)
        # ptxas jumps far with CALL.REL.NOINC.
        if x.base in ("BRA", "CALL") and named and labels.get(named[-1]) in place:
            target[i] = place[labels[named[-1]]]
            leaders.add(target[i])
        if (x.base in _ENDS or i in target) and i + 1 < len(ins):
            leaders.add(i + 1)
    starts = sorted(leaders)
    blocks = {start: (start, stop) for start, stop in zip(starts, [*starts[1:], len(ins)], strict=True)}
    return blocks, {start: _followers(ins, stop, blocks, target) for start, stop in blocks.values()}


def _followers(ins: Sequence[Instruction], stop: int, blocks: Blocks, target: Mapping[int, int]) -> list[int]:
    """Return the blocks that may follow the one that ends before ``stop``."""
    last = ins[stop - 1]
    below = [stop] if stop in blocks else []
    if stop - 1 in target:
        if ".DIV" in last.op:  # the slow path of a shuffle in a diverged warp, never taken in these kernels
            return below
        is_conditional = (
            last.pred or re.match(r"!?U?P\d", last.args) or (".U" in last.op and "," in last.args)
        )
        return [target[stop - 1], *(below if is_conditional else [])]
    return [] if last.base in ("EXIT", "RET") and not last.pred else below


def loops(successors: Successors) -> dict[int, set[int]]:
    """Return the blocks of each natural loop by its head; edges into the middle of a loop are ignored."""
    before: dict[int, list[int]] = defaultdict(list)
    for block, after in successors.items():
        for follower in after:
            before[follower].append(block)
    order = _reverse_postorder(successors)
    number = {block: i for i, block in enumerate(order)}
    above = _dominators(order, number, before)
    found: dict[int, set[int]] = {}
    for block in order:
        for head in successors[block]:
            if not _dominates(above, head, block):
                continue
            body, waiting = {head}, [block]
            while waiting:
                at = waiting.pop()
                if at not in body:
                    body.add(at)
                    waiting += [p for p in before[at] if p in number]
            found.setdefault(head, set()).update(body)
    return found


def _reverse_postorder(successors: Successors) -> list[int]:
    order, seen, stack = [], {0}, [(0, iter(successors[0]))]
    while stack:
        block, rest = stack[-1]
        following = next((f for f in rest if f not in seen), None)
        if following is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(successors[following])))
    return order[::-1]


def _dominators(order: list[int], number: dict[int, int], before: dict[int, list[int]]) -> dict[int, int]:
    """Map each reachable block to the one that immediately dominates it (Cooper, Harvey, Kennedy)."""
    above = {0: 0}

    def meet(a: int, b: int) -> int:
        while a != b:
            a, b = (above[a], b) if number[a] > number[b] else (a, above[b])
        return a

    has_changed = True
    while has_changed:
        has_changed = False
        for block in order[1:]:
            known = [p for p in before[block] if p in above]
            common = functools.reduce(meet, known)
            if above.get(block) != common:
                above[block] = common
                has_changed = True
    return above


def _dominates(above: dict[int, int], a: int, b: int) -> bool:
    while b not in (0, a):
        b = above[b]
    return a == b

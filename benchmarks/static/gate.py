"""The limits of the counts: floors against FlexAttention's kernels, and the stored counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .figures import LOOPS, PASSES, Figures, Key, Rows, Table

# Figures that are compared with stored ones, and their names in messages.
MORE_IS_WORSE = {
    "instructions": "instructions",
    "spills": "spills",
    "barriers": "barriers",
    "shared": "uses of shared memory",
}
LESS_IS_WORSE = {"ctas": "blocks on an SM", "bound": "bound", "in_flight": "bytes in flight"}

MASK_COST = 0.90  # of FlexAttention's own: masked minus unmasked instructions
WHOLE = 0.995  # a bound of 100 %


class Floor(NamedTuple):
    """The least that a pass must reach; pairs are for the unmasked and the masked loop."""

    instructions: tuple[float, float]  # at most, as a ratio to FlexAttention's
    goal: tuple[float, float]
    bound: tuple[float, float] = (0.0, 0.0)
    lead: float = 1.0  # of the bound, as a ratio to FlexAttention's
    spills: tuple[int, int] = (0, 0)
    ctas: int | None = None  # None: FlexAttention's


_ALL = (WHOLE, WHOLE)
FLOORS: dict[tuple[int, int], dict[str, Floor]] = {
    (80, 64): {
        "forward": Floor((0.87, 0.78), (0.80, 0.70), bound=(WHOLE, 0.97)),
        "backward_query": Floor((0.87, 0.76), (0.80, 0.70), bound=(0.97, 0.97)),
        "backward_key": Floor((0.80, 0.68), (0.72, 0.60), bound=(0.97, 0.97)),
    },
    (80, 128): {
        "forward": Floor((1.00, 0.97), (0.90, 0.85), bound=(0.97, 0.97), spills=(4, 4), ctas=2),
        "backward_query": Floor((0.80, 0.80), (0.75, 0.70), lead=1.08),
        "backward_key": Floor((0.82, 0.72), (0.72, 0.62), lead=1.15, spills=(10, 10), ctas=1),
    },
    (90, 64): {
        "forward": Floor((0.84, 0.85), (0.75, 0.75), bound=(0.95, 0.82)),
        "backward_query": Floor((0.73, 0.58), (0.68, 0.54), bound=_ALL),
        "backward_key": Floor((0.86, 0.69), (0.80, 0.62), lead=1.04),
    },
    (90, 128): {
        "forward": Floor((0.62, 0.60), (0.58, 0.55), bound=_ALL),
        "backward_query": Floor((0.91, 0.75), (0.85, 0.70), bound=_ALL),
        "backward_key": Floor((0.84, 0.70), (0.78, 0.65), bound=_ALL, spills=(0, 12)),
    },
    (100, 64): {
        "forward": Floor((0.71, 0.54), (0.56, 0.44), lead=1.4, ctas=2),
        "backward_query": Floor((0.92, 0.63), (0.85, 0.58), lead=1.15, ctas=2),
        "backward_key": Floor((0.72, 0.44), (0.65, 0.39), lead=1.3),
    },
    (100, 128): {
        "forward": Floor((0.40, 0.37), (0.36, 0.33), bound=(0.95, 0.95)),
        "backward_query": Floor((0.82, 0.59), (0.78, 0.55), lead=1.25),
        "backward_key": Floor((0.66, 0.42), (0.62, 0.38), lead=1.15),
    },
    (120, 64): {
        "forward": Floor((0.89, 0.75), (0.83, 0.70), bound=_ALL),
        "backward_query": Floor((0.86, 0.76), (0.80, 0.68), bound=_ALL),
        "backward_key": Floor((0.76, 0.62), (0.70, 0.58), bound=_ALL),
    },
    (120, 128): {
        "forward": Floor((0.93, 0.90), (0.85, 0.82), bound=_ALL),
        "backward_query": Floor((0.72, 0.71), (0.68, 0.65), bound=_ALL),
        "backward_key": Floor((0.75, 0.71), (0.68, 0.65), bound=_ALL, spills=(8, 8)),
    },
}
# Since Triton 3.9 LLVM keeps masks apart, so FlexAttention's masked loops are cheaper. For a masked loop with
# a floor here the cost of its mask is not checked: the floor is the stronger test.
_SINCE_39 = {
    (80, 64, "forward", "masked"): 0.95,
    (80, 64, "backward_key", "masked"): 0.72,
    (80, 128, "forward", "unmasked"): 1.05,
    (80, 128, "forward", "masked"): 1.10,
    (90, 128, "forward", "masked"): 0.67,
    (100, 128, "forward", "masked"): 0.43,
    (120, 64, "forward", "masked"): 0.90,
    (120, 128, "forward", "masked"): 1.00,
}
# No configuration that was tried there meets these floors without a spill.
_SPILLS_SINCE_39 = {(100, 128, "forward"): (4, 5), (120, 64, "forward"): (0, 1)}


def most_instructions(key: Key, version: tuple[int, int]) -> float:
    """Return the floor of a loop, as a ratio to FlexAttention's, for a version of Triton."""
    most = FLOORS[key.sm, key.d][key.which].instructions[LOOPS.index(key.loop)]
    if version < (3, 9):
        return most
    return _SINCE_39.get((key.sm, key.d, key.which, key.loop), most + (0.03 if key.loop == "unmasked" else 0))


def most_spills(key: Key, version: tuple[int, int]) -> int:
    """Return the spills that a loop may have, for a version of Triton."""
    most = FLOORS[key.sm, key.d][key.which].spills
    if version >= (3, 9):
        most = _SPILLS_SINCE_39.get((key.sm, key.d, key.which), most)
    return most[LOOPS.index(key.loop)]


def goal(key: Key) -> float:
    """Return the long-term goal of a loop."""
    return FLOORS[key.sm, key.d][key.which].goal[LOOPS.index(key.loop)]


def broken_floors(ours: Table, peer: Table, version: tuple[int, int]) -> list[str]:
    """Return which floors break; each of FlexAttention's loops must have a counterpart of ours."""
    found = [fault for key in peer for fault in _against_peer(key, ours.get(key), peer[key], version)]
    for sm, d in sorted({(key.sm, key.d) for key in peer}):
        for which in PASSES:
            full, masked = (Key(sm, d, 128, which, loop) for loop in LOOPS)
            if not {full, masked} <= ours.keys() or (
                version >= (3, 9) and (sm, d, which, "masked") in _SINCE_39
            ):
                continue
            cost, theirs = (table[masked].instructions - table[full].instructions for table in (ours, peer))
            if cost > MASK_COST * theirs:
                found.append(
                    f"{masked}: the mask costs {cost:.0f} instructions, FlexAttention's {theirs:.0f}"
                )
    return found


def _against_peer(key: Key, mine: Figures | None, peer: Figures, version: tuple[int, int]) -> Iterator[str]:
    if mine is None:
        yield f"{key}: not counted"
        return
    floor, at = FLOORS[key.sm, key.d][key.which], LOOPS.index(key.loop)
    ratio, most = mine.instructions / peer.instructions, most_instructions(key, version)
    # To two decimals, as the floors are stated.
    if round(ratio, 2) > most:
        yield f"{key}: instructions {ratio:.3f} of FlexAttention's, at most {most:.2f}"
    if mine.spills > most_spills(key, version):
        yield f"{key}: {mine.spills} spills in the loop, at most {most_spills(key, version)}"
    least = max(floor.bound[at], min(floor.lead * peer.bound, WHOLE))
    if round(mine.bound, 3) < round(least, 3):
        yield f"{key}: bound {mine.bound:.3f} ({mine.limiter}), at least {least:.3f}"
    ctas = peer.ctas if floor.ctas is None else floor.ctas
    if mine.ctas < ctas:
        yield f"{key}: {mine.ctas} blocks on an SM, at least {ctas}"


def worse(now: Rows, stored: Rows) -> list[str]:
    """Return which counts got worse than the stored ones, or are missing."""
    found = []
    for loop, before in stored.items():
        if loop not in now:
            found.append(f"{loop}: no longer counted")
            continue
        for name, words in {**MORE_IS_WORSE, **LESS_IS_WORSE}.items():
            was, is_now = before.get(name, 0), now[loop].get(name, 0)
            if is_now > was if name in MORE_IS_WORSE else is_now < was:
                found.append(f"{loop}: {words} {was:g} -> {is_now:g}")
    return found

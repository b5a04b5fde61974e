"""Lines of the gate's table: a ratio against its floor or limit."""

from __future__ import annotations

from . import report
from .timing import Spread

Line = tuple[list[str], bool]  # cells of the table, and whether the floor held


def at_least(case: str, what: str, peer: str, floor: float, ratio: Spread, goal: float = 0.0) -> Line:
    """A peer's time over ours; a floor of 0 is none, a goal of 0 neither."""
    if not floor:
        return [case, what, peer, "", "", report.ratio(ratio), "reported"], True
    held = ratio.median >= floor
    verdict = "below floor" if not held else "goal" if goal and ratio.median >= goal else "ok"
    wanted = f"{goal:g}" if goal else ""
    return [case, what, peer, f"{floor:g}", wanted, report.ratio(ratio), verdict], held


def at_most(case: str, what: str, limit: float, measured: Spread) -> Line:
    """A time over that of something else of ours."""
    held = measured.median <= limit
    verdict = "ok" if held else "above limit"
    return [case, what, "", f"<= {limit:g}", "", report.ratio(measured), verdict], held

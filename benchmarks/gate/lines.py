"""Lines of the gate's table: a ratio against its floor or limit."""

from __future__ import annotations

from ..measure import terminal
from ..measure.timing import Spread

Line = tuple[list[str], bool]  # cells of the table, and whether the floor held

# Seconds of samples of a case, unless two rounds take longer: slow peers took most of the gate's time.
BUDGET = 2.0


def at_least(case: str, what: str, peer: str, floor: float, ratio: Spread, goal: float = 0.0) -> Line:
    """Compare a peer's time over ours with a floor and a goal; 0 means none."""
    if not floor:
        return [case, what, peer, "", "", terminal.ratio(ratio), "reported"], True
    held = ratio.median >= floor
    verdict = "below floor" if not held else "goal" if goal and ratio.median >= goal else "ok"
    wanted = f"{goal:g}" if goal else ""
    return [case, what, peer, f"{floor:g}", wanted, terminal.ratio(ratio), verdict], held


def at_most(case: str, what: str, limit: float, measured: Spread) -> Line:
    """Compare a ratio of two of our own times with a limit."""
    held = measured.median <= limit
    verdict = "ok" if held else "above limit"
    return [case, what, "", f"<= {limit:g}", "", terminal.ratio(measured), verdict], held


def summary(lines: list[Line]) -> str:
    """Count the lines that held, and name each that did not."""
    failed = [cells for cells, held in lines if not held]
    named = [f"  {', '.join(filter(None, cells[:3]))}: {cells[5]}, wanted {cells[3]}" for cells in failed]
    return "\n".join([f"{len(lines) - len(failed)} held, {len(failed)} below floor", *named])

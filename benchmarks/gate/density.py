"""Limits of the sweep over density; ``make bench-gate ARGS="--case density"`` checks only these."""

from __future__ import annotations

from collections.abc import Iterator

from ..measure import terminal
from ..measure.sweep import AUTO, MASKED, QUICK_DENSITIES, STRUCTURES, TOLERATED, measure_density, regret
from ..measure.timing import CPU, Spread
from ..peers.registry import DENSE
from .lines import Line, at_least

TOKENS = 2048
NEVER_SLOWER = 1.0  # SDPA's time over ours, where it gives the same result


def lines(rounds: int) -> Iterator[Line]:
    """Yield, per structure and pass, the least gain over SDPA and the regret of the automatic choice."""
    for structure in STRUCTURES:
        for backward in (False, True):
            what = "forward + backward" if backward else "forward"
            points = []
            for density in QUICK_DENSITIES:
                terminal.progress(f"{structure}, {density:.1%}, {what}")
                points.append(
                    measure_density(structure, density, TOKENS, backward=backward, rounds=rounds, timer=CPU)
                )
            # If all pairs are related, SDPA needs no mask.
            gains = [(p["ratios"][DENSE if p["density"] == 1 else MASKED], p["density"]) for p in points]
            ratio, at = min(gains)
            yield at_least(
                f"{structure}, least gain, at {at:.1%}", what, "SDPA", NEVER_SLOWER, Spread(*ratio)
            )
            worst = max(points, key=regret)
            held = regret(worst) <= TOLERATED
            verdict = "ok" if held else "above limit"
            cells = [f"<= {TOLERATED:g}", "", f"{regret(worst):.3g}x", verdict]
            yield (
                [f"{structure}, {AUTO} over the better form, at {worst['density']:.1%}", what, "", *cells],
                held,
            )

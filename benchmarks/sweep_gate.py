"""What the sweep over density must hold, part of ``make bench-gate``; ``--case density`` takes it alone."""

from __future__ import annotations

from collections.abc import Iterator

from . import report
from .floors import Line, at_least
from .peers import DENSE
from .sweep import AUTO, MASKED, QUICK_DENSITIES, STRUCTURES, TOLERATED, measure_density, regret
from .timing import CPU, Spread

TOKENS = 2048
NEVER_SLOWER = 1.0  # SDPA's time over ours, where it gives the same result


def lines(rounds: int) -> Iterator[Line]:
    """Each structure and pass: the least gain over SDPA, and how near the automatic choice is to the best."""
    for structure in STRUCTURES:
        for backward in (False, True):
            what = "forward + backward" if backward else "forward"
            points = []
            for density in QUICK_DENSITIES:
                report.progress(f"{structure}, {density:.1%}, {what}")
                points.append(
                    measure_density(structure, density, TOKENS, backward=backward, rounds=rounds, timer=CPU)
                )
            # With all pairs related SDPA needs no mask.
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

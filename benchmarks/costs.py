"""What a pair costs in a tile and as an edge: the constants of ``attnbias/layouts/build.py``.

Random pairs in a band of tiles, forward and backward, as tiles of 64, of 128 and as edges. The time of a pair
in a full tile of 128 is 1.
"""

from __future__ import annotations

from functools import partial

import torch

import attnbias as ab

from . import report
from .attention import steps
from .timing import Spread, interleave, one_thread

TOKENS, BAND = 4096, 256
DENSITIES = (0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0)


def _mask(density: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(TOKENS)
    near = positions[:, None] // BAND == positions // BAND
    return near & (torch.rand(TOKENS, TOKENS, generator=generator) < density)


def run(rounds: int, size: int = 64, heads: int = 4) -> int:
    """Measure and print the table and the crossover."""
    lines = []
    inputs = tuple(torch.randn(4, 1, heads, TOKENS, size))
    unit: dict[bool, float] = {}  # seconds of a pair in a full tile, by pass
    with one_thread():
        for backward in (False, True):
            for density in sorted(DENSITIES, reverse=True):  # the full band first: it gives the unit
                report.progress(f"density {density:.0%}, {'backward' if backward else 'forward'}")
                relation = ab.Dense(_mask(density))
                layouts = [
                    ab.Layout.build(relation, TOKENS, TOKENS, form="tiles", tile=128),
                    ab.Layout.build(relation, TOKENS, TOKENS, form="tiles", tile=64),
                    ab.Layout.build(relation, TOKENS, TOKENS, form="edges"),
                ]
                functions = [
                    steps(partial(ab.attention, relation=layout), inputs, backward=backward)
                    for layout in layouts
                ]
                seconds = [Spread.of(samples).median for samples in interleave(functions, rounds)]
                unit.setdefault(backward, seconds[0] / (TOKENS * BAND))
                pairs = relation.count(TOKENS, TOKENS)
                edge = seconds[2] / pairs / unit[backward]
                lines.append(
                    [
                        "forward + backward" if backward else "forward",
                        f"{density:.0%}",
                        *(f"{1e3 * each:.2f}" for each in seconds),
                        f"{seconds[1] / seconds[0]:.2f}",
                        f"{edge:.2f}",
                    ]
                )
    report.progress("")
    report.table(
        f"Costs, H = {heads}, D = {size}: ms as tiles of 128, of 64, as edges; what an edge takes in pairs",
        ["pass", "density", "128", "64", "edges", "64 / 128", "edge"],
        lines,
    )
    return 0

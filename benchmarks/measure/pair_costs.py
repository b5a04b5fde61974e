"""The cost of a pair in a tile and as an edge, for the constants in ``attnbias/layouts/costs.py``.

Random pairs in a band of tiles, and windows, forward and backward, as tiles of 64, of 128 and as edges. The
time of a pair in a full tile of 128 is 1.
"""

from __future__ import annotations

from functools import partial

import torch

import attnbias as ab

from . import terminal
from .race import steps
from .timing import Spread, interleave, one_thread

TOKENS, BAND = 4096, 256
DENSITIES = (0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0)
WINDOWS = (7, 21, 45, 61, 101)  # keys of a row


def _mask(density: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(TOKENS)
    near = positions[:, None] // BAND == positions // BAND
    return near & (torch.rand(TOKENS, TOKENS, generator=generator) < density)


def _measure(
    relation: ab.Relation, inputs: tuple[torch.Tensor, ...], *, backward: bool, rounds: int
) -> list[float]:
    """Measure the seconds as tiles of 128, as tiles of 64 and as edges."""
    layouts = [
        ab.Layout.build(relation, TOKENS, TOKENS, form="tiles", tile=128),
        ab.Layout.build(relation, TOKENS, TOKENS, form="tiles", tile=64),
        ab.Layout.build(relation, TOKENS, TOKENS, form="edges"),
    ]
    functions = [
        steps(partial(ab.attention, relation=layout), inputs, backward=backward) for layout in layouts
    ]
    return [Spread.of(samples).median for samples in interleave(functions, rounds)]


def run(rounds: int, size: int = 64, heads: int = 4) -> int:
    """Measure and print the table and the crossover."""
    pairs_lines, window_lines = [], []
    inputs = tuple(torch.randn(4, 1, heads, TOKENS, size))
    with one_thread():
        for backward in (False, True):
            name = "forward + backward" if backward else "forward"
            unit = 0.0  # seconds of a pair in a full tile
            for density in sorted(DENSITIES, reverse=True):  # the full band first: it gives the unit
                terminal.progress(f"density {density:.0%}, {name}")
                relation: ab.Relation = ab.Dense(_mask(density))
                seconds = _measure(relation, inputs, backward=backward, rounds=rounds)
                unit = unit or seconds[0] / (TOKENS * BAND)
                edge = seconds[2] / relation.count(TOKENS, TOKENS) / unit
                times = [f"{1e3 * each:.2f}" for each in seconds]
                ratio = f"{seconds[1] / seconds[0]:.2f}"
                pairs_lines.append([name, f"{density:.0%}", *times, ratio, f"{edge:.2f}"])
            for width in WINDOWS:
                terminal.progress(f"window {width}, {name}")
                relation = ab.Window(before=width // 2, after=width // 2)
                seconds = _measure(relation, inputs, backward=backward, rounds=rounds)
                window_lines.append([name, str(width), *(f"{each / unit / TOKENS:.0f}" for each in seconds)])
    terminal.progress("")
    terminal.table(
        f"Costs, H = {heads}, D = {size}: ms as tiles of 128, of 64, as edges; cost of an edge in pairs",
        ["pass", "density", "128", "64", "edges", "64 / 128", "edge"],
        pairs_lines,
    )
    header = ["pass", "keys", "128", "64", "edges"]
    terminal.table("A row of a window, in pairs of a full tile", header, window_lines)
    return 0

"""Costs of pairs in tiles and as edges, by device: every constant that chooses a form."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Costs:
    """Time of one executed pair in a tile (of each size) and of one edge, in arbitrary units.

    A kernel that skips what is empty inside partial tiles takes, in a row of them, the time of its pairs,
    of ``run`` more for each run of consecutive keys and of ``partial`` more for each tile.
    """

    tile: dict[int, float]
    edge: float
    run: float | None  # None: nothing is skipped
    partial: float = 0.0
    # Ranges and predicates become edges only in rows of at most so many keys on average: a list takes 20
    # bytes a pair, tiles do not.
    keys_listed: int = 256
    # A mask whose pairs are scattered is listed up to this share of related pairs: denser ones are quicker as
    # tiles. Timed on CPUs, where it is 1 / edge; not timed on GPUs.
    most_listed: float = 0.37

    def sizes(self, tile: int | None) -> tuple[int, ...]:
        """Return the tile sizes to try; the first is taken when all are the same work."""
        return tuple(self.tile) if tile is None else (tile,)


# Fitted by hand to timings of windows, grids and random pairs (Zen 4, D = 64), of the kind that
# `attnbias bench costs` prints. Kernels skip panels of 16 keys in strips of six rows, so that a small tile
# saves next to nothing (1.00 to 1.02). An edge takes the time of 2.2 pairs in a tile where its keys lie
# together and of 3 where they are scattered. Windows are quicker as edges below about 55 keys, scattered
# pairs below 37 % fill.
CPU_COSTS = Costs(tile={128: 1.0, 64: 1.02}, edge=2.7, run=24.0, partial=24.0)

# By compute capability x 10: instructions per pair in tiles of 64 over those in tiles of 128, forward, the
# mean of D = 64 and 128; an edge takes about 45 times those of a pair (14.6 against 1223 per MFLOP on sm_80,
# D = 64). Static: counted by `make static`, not timed. A device between two takes the older one's.
GPU_COSTS = {
    arch: Costs(tile={128: 1.0, 64: small}, edge=45.0, run=None)
    for arch, small in ((80, 1.18), (86, 1.29), (90, 1.37), (100, 2.0), (120, 1.24))
}


def costs_of(device: torch.device) -> Costs:
    """Return the costs of pairs on a device."""
    if device.type == "cpu":
        return CPU_COSTS
    arch = min(GPU_COSTS)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = max((known for known in GPU_COSTS if known <= 10 * major + minor), default=arch)
    return GPU_COSTS[arch]

"""Counts of a launch: blocks run, bytes moved, multiply-adds, shared-memory bank conflicts."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from .values import Array


@dataclass
class Wavefronts:
    """Passes through shared memory, 128 bytes each."""

    ideal: int = 0
    actual: int = 0


@dataclass
class Counters:
    """Counts of one launch.

    Attributes:
        blocks: number of warps that ran each basic block.
        bytes: bytes moved to or from global memory, by kind of instruction.
        macs: multiply-adds of tensor-core instructions.
        conflicts: bank conflicts by kind of instruction; None if they are not counted.
    """

    blocks: Counter[int] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    macs: int = 0
    conflicts: defaultdict[str, Wavefronts] | None = None

    def shared_access(self, kind: str, addresses: Array, size: int) -> None:
        """Count the wavefronts of ``size`` bytes at each lane's address, [warps, 32] or [warps, rows]."""
        if self.conflicts is None:
            return
        per_pass = min(addresses.shape[1], max(1, 128 // size)) if size > 4 else addresses.shape[1]
        passes = addresses.reshape(-1, per_pass)
        words = (passes[:, :, None] + np.arange(0, max(size, 4), 4)).reshape(len(passes), -1) >> 2
        found = self.conflicts[kind]
        found.ideal += len(passes)
        # Lanes that read the same word are served together; different words of a bank are not.
        found.actual += sum(int(np.bincount(np.unique(row) & 31).max()) for row in words)


def pipe(opcode: str) -> str:
    """Return the part of the machine that an instruction keeps busy, roughly."""
    name = opcode.partition(".")[0]
    if name == "mma" or opcode.startswith(("wgmma.mma", "tcgen05.mma")):
        return "tensor"
    if name in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos"):
        return "xu"
    if "commit" in opcode or "wait" in opcode or name in ("bra", "brx", "ret", "bar", "barrier"):
        return "control"
    if name in ("ld", "st", "ldmatrix", "stmatrix", "atom", "red", "shfl", "cp") and ".param" not in opcode:
        return "lsu"
    if opcode.endswith((".f32", ".f32x2")) and name in (
        "add",
        "sub",
        "mul",
        "fma",
        "max",
        "min",
        "neg",
        "div",
    ):
        return "f32"
    return "integer"

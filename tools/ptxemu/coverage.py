"""Coverage: the basic blocks of compiled kernels that ran, over many launches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .kernel import Kernel


@dataclass
class Covered:
    """The blocks of one compiled kernel."""

    name: str
    blocks: list[str]  # the first instruction of each
    ran: set[int] = field(default_factory=set)


class Coverage:
    """The blocks that ran, by compiled kernel; a kernel compiled for two kinds of arguments counts as two."""

    def __init__(self) -> None:
        self.kernels: dict[str, Covered] = {}

    def add(self, key: str, name: str, kernel: Kernel, ran: Iterable[int]) -> None:
        """Record a launch; ``key`` identifies the compilation, ``name`` groups compilations in reports."""
        if key not in self.kernels:
            self.kernels[key] = Covered(name, [str(body[0]) for body in kernel.texts])
        self.kernels[key].ran.update(ran)

    def dump(self) -> dict[str, dict[str, Any]]:
        """Return everything as plain lists, to pass to another process."""
        return {key: {**asdict(covered), "ran": sorted(covered.ran)} for key, covered in self.kernels.items()}

    def load(self, dumped: dict[str, dict[str, Any]]) -> None:
        """Add what another process found."""
        for key, found in dumped.items():
            mine = self.kernels.setdefault(key, Covered(found["name"], found["blocks"]))
            mine.ran.update(found["ran"])

    def lines(self, missing: bool = False) -> list[str]:
        """Return a line per name and one for all; with ``missing``, also the blocks that did not run."""
        names = sorted({covered.name for covered in self.kernels.values()})
        parts = [(name, [c for c in self.kernels.values() if c.name == name]) for name in names]
        lines = []
        for name, each in [*parts, ("all", list(self.kernels.values()))]:
            ran, blocks = sum(len(c.ran) for c in each), sum(len(c.blocks) for c in each)
            lines.append(
                f"{name:40} {len(each):3} compiled {ran:6} of {blocks:6} blocks {ran / max(blocks, 1):7.1%}"
            )
            for covered in each if missing and name != "all" else ():
                left = (i for i in range(len(covered.blocks)) if i not in covered.ran)
                lines += [f"    {i:4} {covered.blocks[i]}" for i in left]
        return lines

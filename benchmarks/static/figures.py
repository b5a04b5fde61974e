"""The figures of one loop, their keys, and the file that keeps them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .sass import Loop, Report

STORE = Path(__file__).with_name("counts.json")

PASSES = {"forward": "forward", "backward_query": "dQ", "backward_key": "dK/dV"}
PRODUCTS = {"forward": 2, "backward_query": 3, "backward_key": 4}  # matrix products of a tile in each pass
LOOPS = ("unmasked", "masked")


class Key(NamedTuple):
    """The key of a loop: one pass over full (unmasked) or partial (masked) tiles."""

    sm: int  # compute capability x 10
    d: int  # head size
    tile: int  # of the lists
    which: str  # pass
    loop: str

    def __str__(self) -> str:
        lists = "" if self.tile == 128 else f" lists of {self.tile}"
        return f"sm_{self.sm} D={self.d}{lists} {PASSES[self.which]} {self.loop}"

    def order(self) -> tuple[int, ...]:
        """Return the loop's place in a table."""
        return self.sm, self.d, -self.tile, list(PASSES).index(self.which), LOOPS.index(self.loop)


@dataclass(frozen=True)
class Figures:
    """The counts of a loop; ``bound`` and ``model`` are modelled, the rest is static.

    Instructions are a block's warp instructions per million floating-point operations of tensor work.
    """

    config: str
    regs: int
    spills: int  # instructions per warp
    ctas: int
    instructions: float
    fma: float
    alu: float
    xu: float
    lsu: float
    bound: float  # tensor share of the busiest pipe's time
    limiter: str
    model: float  # tensor share by the issue model; without overlap on sm_100

    @classmethod
    def of(cls, report: Report, loop: Loop, config: str) -> Figures:
        """Read the figures from a report."""
        counts = {name: round(loop.per_mflop(loop.counts[name]), 1) for name in ("fma", "alu", "xu", "lsu")}
        return cls(
            config,
            report.regs,
            loop.spills,
            report.ctas,
            round(loop.instructions, 1),
            **counts,
            bound=round(loop.bound, 4),
            limiter=loop.limiter,
            model=round(loop.model, 4),
        )


def loops_of(report: Report, which: str, d: int, area: int) -> dict[str, Loop]:
    """Find the unmasked and the masked loop of a pass among a kernel's loops.

    A pass is recognised by the work of its tiles, the masked loop by its additional integer work.

    Args:
        report: the kernel.
        which: the pass.
        d: head size.
        area: queries x keys of its tiles.

    Raises:
        ValueError: if there are not exactly two such loops.
    """
    flops = 2 * PRODUCTS[which] * area * d
    found = sorted((x for x in report.loops if x.flops == flops), key=lambda x: x.per_mflop(x.counts["alu"]))
    if len(found) != 2:
        there = [x.flops for x in report.loops]
        raise ValueError(f"{report.name}, sm_{report.cc}: wanted two loops of {flops} flops, found {there}")
    return dict(zip(LOOPS, found, strict=True))


Table = dict[Key, Figures]
Rows = dict[str, dict[str, Any]]  # figures by name, by the name of a loop


def _parse(text: str) -> Key:
    found = re.fullmatch(r"sm_(\d+) D=(\d+)(?: lists of (\d+))? (\S+) (\S+)", text)
    if found is None:
        raise ValueError(f"counts: wanted the name of a loop, got {text!r}")
    sm, d, tile, shown, loop = found.groups()
    which = next(name for name, other in PASSES.items() if other == shown)
    return Key(int(sm), int(d), int(tile or 128), which, loop)


def rows_of(table: Table) -> Rows:
    """Return figures by the names of their loops, as they are stored."""
    return {str(key): asdict(table[key]) for key in sorted(table, key=Key.order)}


def read(name: str, path: Path = STORE) -> Rows:
    """Read stored figures; empty if there are none of this name."""
    rows: Rows = json.loads(path.read_text()).get(name, {}) if path.is_file() else {}
    return rows


def load(name: str, path: Path = STORE) -> Table:
    """Read a stored table of tile loops."""
    return {_parse(key): Figures(**row) for key, row in read(name, path).items()}


def store(found: Mapping[str, Rows], path: Path = STORE) -> None:
    """Write figures, keeping those of other names; one line per loop makes changes easy to see."""
    kept = {**(json.loads(path.read_text()) if path.is_file() else {}), **found}
    parts = []
    for name in sorted(kept):
        lines = ",\n".join(f" {json.dumps(loop)}: {json.dumps(row)}" for loop, row in kept[name].items())
        parts.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")

"""Check the kernels of every row of the configuration table; all figures are static.

For each architecture, dtype, head size and pass it compiles what ships and reads from the machine code: the
registers, the spills inside loops, the shared memory, the products that a loop executes over those that its
tile needs, and whether ptxas runs wgmma one after the other. Counts of float16 are those of bfloat16 (at
every size that was tried), so float16 is sampled at one head size.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from ..measure import terminal
from .arch import ARCH
from .figures import PASSES, PRODUCTS, Rows, read, store

STORE = Path(__file__).with_name("whole_table.json")
# A head size for each entry of the table, and some whose tiles are padded.
SIZES = (16, 64, 80, 128, 192, 256)
SAMPLED = 64  # head size at which float16 and the entries for lists of 64 are checked
LISTS = 128  # tile of the lists of the rest
MOST_SPILLS = 25  # in a loop, per warp and trip
CLIFF = 128, 50  # ptxas gave up: this many registers or fewer, and more spills


class Kernels(NamedTuple):
    """What is compiled in one go: the passes of one head size."""

    sm: int  # compute capability x 10
    dtype: str
    d: int  # head size
    tile: int = LISTS

    def name_of(self, which: str) -> str:
        """Name the row of a pass, as it is stored."""
        lists = "" if self.tile == LISTS else f" lists of {self.tile}"
        return f"sm_{self.sm} {self.dtype} D={self.d}{lists} {PASSES[which]}"


class Row(NamedTuple):
    """The figures of one pass in its shipped configuration."""

    sm: int
    config: str
    regs: int
    spills: int  # in the loop that has most, per warp and trip
    all_spills: int  # of the kernel
    shared: int  # bytes
    work: float  # products that a loop executes, over those that it needs; of the loop farthest from 1
    serial: str = ""  # ptxas's reasons to run wgmma one after the other
    smaller: int = 0  # configurations that did not fit before this one

    def faults(self) -> Iterator[str]:
        """Say what must not be, whatever is stored."""
        if self.smaller:
            yield f"the table's configuration does not fit, {self.config} runs"
        if self.shared > ARCH[self.sm].smem_cta:
            yield f"{self.shared} bytes of shared memory, at most {ARCH[self.sm].smem_cta}"
        if self.regs <= CLIFF[0] and self.all_spills > CLIFF[1]:
            yield f"{self.all_spills} spills with {self.regs} registers: ptxas gave up"
        if self.work != 1:
            yield f"{self.work:.2f} of the needed products executed"
        if self.serial:
            yield f"wgmma serialised: {self.serial}"


# What is known to break a limit: by the name of a row, the start of a fault.
KNOWN = {
    # Four warps side by side take 64 rows where a tile has no more columns than rows, and these have 32.
    **{f"sm_{sm} float32 D=16 {which}": ("2.00 of",) for sm in ARCH for which in ("dQ", "dK/dV")},
    # The same with 16 rows; larger tiles do not fit in 99 KB.
    **{f"sm_{sm} float32 D={d} dK/dV": ("1.50 of",) for sm in (86, 89, 120) for d in (192, 256)},
    # wgmma takes 64 keys for four warps, whose registers do not hold dK and dV; so eight share the scores.
    "sm_90 bfloat16 D=192 dK/dV": ("1.50 of",),
    "sm_90 bfloat16 D=256 dK/dV": ("1.50 of",),
    "sm_90 bfloat16 D=256 lists of 64 dK/dV": ("1.50 of",),
}


def grid(capabilities: Sequence[int], sizes: Sequence[int] = SIZES) -> list[Kernels]:
    """List what is compiled."""
    found = []
    for sm in capabilities:
        found += [Kernels(sm, dtype, d) for dtype in ("bfloat16", "float32") for d in sizes]
        found += [Kernels(sm, "bfloat16", d, 64) for d in (64, 128, 256) if d in sizes]
        found += [Kernels(sm, "float16", d) for d in sizes if d == SAMPLED]
    return found


def needed(which: str, area: int, d_columns: int, e_columns: int, dtype: str) -> int:
    """Return the floating-point operations of a tile: products with D and with E columns.

    A float32 product is three of TF32.
    """
    with_d = PRODUCTS[which] - PRODUCTS[which] // 2  # scores, dQ and dK read D columns; values E
    columns = with_d * d_columns + (PRODUCTS[which] - with_d) * e_columns
    return 2 * area * columns * (3 if dtype == "float32" else 1)


def measure(kernels: Kernels) -> dict[str, Row | str]:
    """Compile the passes of one head size and read their figures.

    Returns:
        By the name of a row its figures, or why there are none.
    """
    from attnbias.kernels.launch import launch
    from attnbias.kernels.launch.config import Target, candidates

    from . import ours

    sm, name, d, tile = kernels
    dtype = getattr(torch, name)
    target = Target(sm, tuple(map(int, triton.__version__.split(".")[:2])))
    found: dict[str, Row | str] = {}
    try:
        with ours.as_shipped():
            launch._fitting.clear()
            built = ours.build(sm, d, tile, dtype)
            for which, kernel in built.items():
                place = max([at for key, at in launch._fitting.items() if key[0] == which], default=0)
                config = candidates(target, which, dtype, d, d, tile)[place]
                chunks = launch.cut(d, config.chunk)
                d_columns, e_columns = chunks[-1].first + chunks[-1].columns, launch.columns(d)
                work = needed(which, config.rows * config.cols, d_columns, e_columns, name)
                found[kernels.name_of(which)] = figures_of(kernel, str(config), work, place)
    except Exception as error:  # one kernel that does not compile is a line, not the end of the run
        words = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        found |= {kernels.name_of(which): words for which in PASSES if kernels.name_of(which) not in found}
    return found


def figures_of(kernel: Any, config: str, work: float, smaller: int = 0) -> Row:
    """Read the figures of a compiled kernel whose loops need this many floating-point operations each."""
    from .options import why_serial
    from .sass import analyse

    report = analyse(kernel, model=False)
    ratios = [x.flops / work for x in report.loops]
    if len(ratios) != 2:  # over full and over partial tiles
        raise ValueError(f"{report.name}: wanted two loops with products, found {len(ratios)}")
    is_wgmma = 90 <= kernel.cc < 100
    return Row(
        kernel.cc,
        config,
        report.regs,
        max(x.spills for x in report.loops),
        report.spills,
        kernel.shared,
        max(ratios, key=lambda x: abs(x - 1)),
        ", ".join(why_serial(kernel.cc, kernel.ptx)) if is_wgmma else "",
        smaller,
    )


MORE_IS_WORSE = {"spills": "spills in a loop", "all_spills": "spills"}


def faults(found: dict[str, Row | str], stored: Rows) -> list[str]:
    """Return what is wrong, one line each: what must not be, and what got worse than stored.

    Rows that spill a lot may do so if that is stored: a run with --store has said so.
    """
    lines = []
    for name, row in found.items():
        if isinstance(row, str):
            lines.append(f"{name}: {row}")
            continue
        new = [x for x in row.faults() if not x.startswith(KNOWN.get(name, ()) or "\0")]
        lines += [f"{name}: {row.config}: {x}" for x in new]
        before = stored.get(name, {"spills": MOST_SPILLS})
        for field, words in MORE_IS_WORSE.items():
            was, now = before.get(field), getattr(row, field)
            if was is not None and now > was:
                lines.append(f"{name}: {row.config}: {words} {was} -> {now}")
    return lines


def show(found: dict[str, Row | str]) -> None:
    """Print a line for each row."""
    width = max(map(len, found), default=0)
    print(f"\n{'static':{width}}  {'configuration':24} regs  spills in a loop, in all  shared  work")
    for name, row in found.items():
        if isinstance(row, str):
            print(f"{name:{width}}  {row}")
            continue
        counts = f"{row.regs:4}  {row.spills:16} {row.all_spills:7} {row.shared:7}  {row.work:.2f}"
        print(f"{name:{width}}  {row.config:24} {counts} {row.serial}".rstrip())


def count(
    wanted: Sequence[Kernels], jobs: int | None = None, measure: Callable[..., Any] = measure
) -> dict[str, Row | str]:
    """Measure all in several processes, one per core by default, and show how far it is."""
    found: dict[str, Row | str] = {}
    with multiprocessing.get_context("spawn").Pool(jobs or os.cpu_count(), maxtasksperchild=8) as pool:
        for done, rows in enumerate(pool.imap(measure, wanted), 1):
            found |= rows
            terminal.progress(f"{done} of {len(wanted)}: {', '.join(rows)}")
    terminal.progress("")
    return found


def check(
    capabilities: Sequence[int], sizes: Sequence[int], jobs: int | None, path: Path, is_stored: bool
) -> list[str]:
    """Compile, print and compare; with ``is_stored`` store the figures of what was compiled.

    Returns:
        What is wrong, one line each.
    """
    name = f"attnbias table, triton {triton.__version__}"
    stored = read(name, path)
    found = count(grid(capabilities, sizes), jobs)
    show(found)
    rows = {key: _as_stored(row) for key, row in found.items() if isinstance(row, Row)}
    wrong = faults(found, {} if is_stored else stored)
    if is_stored:
        store({name: dict(sorted({**stored, **rows}.items(), key=_order))}, path)
    elif missing := [key for key in rows if key not in stored]:
        print(f"\n{len(missing)} rows have no stored counts: {missing[0]}, ...")
    return wrong


def _as_stored(row: Row) -> dict[str, Any]:
    return {field: getattr(row, field) for field in ("config", "regs", "spills", "all_spills", "shared")}


def _order(item: tuple[str, Any]) -> tuple[Any, ...]:
    """Return the place of a stored row: numbers count as numbers."""
    return tuple(int(x) if x.isdigit() else x for x in re.split(r"(\d+)", item[0]))

"""Counts of the kernels of multi-level scores, compared with plain kernels of the same tile.

Also a command: ``python -m attnbias.benchmarks.static.levels``. A loop over full tiles is recognised by its
tensor work: its prefix in the products over the head's dims, and all dims in those over the values.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple
from unittest import mock

import torch
import triton

import attnbias as ab
from attnbias.backends.call import Call, Inputs, Needs
from attnbias.kernels.launch import launch
from attnbias.kernels.launch.config import Config, Pass, Target, candidates

from ..measure import terminal as report
from .figures import PASSES
from .ours import KERNELS, as_shipped, recording
from .sass import Compiled, Loop, Report, analyse

CAPABILITIES = (80, 90, 100, 120)
TOKENS, TILE = 1024, 128
PREFIXES = {64: (16, 32, 48, 64), 128: (32, 64, 96, 128)}  # by head size, of four equal ranks
# Limits in a loop and in a kernel where plain spills less; tiles without these spills have more instructions.
SPILLS = {
    (80, 128, "backward_query"): (0, 2),
    (90, 128, "backward_key"): (4, 19),
    (100, 128, "forward"): (0, 46),
    (100, 128, "backward_query"): (0, 62),
    (100, 128, "backward_key"): (0, 114),
    (120, 128, "backward_key"): (5, 41),
}
PRODUCTS = {"forward": (1, 1), "backward_query": (2, 1), "backward_key": (2, 2)}  # over dims, over values


class Figures(NamedTuple):
    """The counts of one depth's loop and of its kernel; all static."""

    sm: int
    d: int  # head size
    which: str  # pass
    prefix: int
    config: str
    instructions: int  # of a block's warps, per tile
    tensor: int  # per warp, on tensor cores
    score: float  # tensor work over the head's dims, as a share of plain's
    regs: int
    ctas: int
    inside: int  # spills in this loop
    spills: int  # in the whole kernel
    plain_instructions: int  # the fewest of a plain loop
    plain_inside: int
    plain_spills: int

    @property
    def name(self) -> str:
        """Return the name of the loop."""
        return f"sm_{self.sm} D={self.d} levels {PASSES[self.which]} {self.prefix}"


def build(
    cc: int, d: int, score: ab.MultiLevel | None, configs: dict[Pass, Config] | None = None
) -> dict[Pass, Compiled]:
    """Compile the kernels of a training step of causal attention, bfloat16.

    Args:
        cc: compute capability x 10.
        d: head size.
        score: None for plain attention.
        configs: configurations to use instead of their own.
    """
    from attnbias.backends import triton as adapter

    def choose(target: Target, which: Pass, *given: object) -> tuple[Config, ...]:
        return (configs[which],) if configs else candidates(target, which, *given)

    layout = ab.Layout.build(ab.Causal(), TOKENS, TOKENS, tile=TILE, form="tiles", score=score)
    q, k, v, grad = (torch.empty(1, 2, TOKENS, d, dtype=torch.bfloat16) for _ in range(4))
    call = Call(Inputs(q, k, v), layout, 1.0, score=score)
    with as_shipped(), mock.patch.object(launch, "candidates", choose), recording(cc) as launched:
        out, lse = adapter.forward(call)
        adapter.backward(call, out, lse, grad, None, Needs(True, True, True))
    return {KERNELS[kernel.name]: kernel for kernel in launched if kernel.name in KERNELS}


def find(kernel: Report, which: str, area: int, dims: int, size: int) -> list[Loop]:
    """Return the loops whose tiles do the tensor work of this many dims of a head of this size."""
    over_dims, over_values = PRODUCTS[which]
    return [x for x in kernel.loops if x.flops == 2 * area * (over_dims * dims + over_values * size)]


def figures(cc: int, d: int) -> list[Figures]:
    """Count the loops of every pass at one head size, and plain ones to compare.

    Raises:
        ValueError: if a prefix does not have exactly one loop with its tensor work.
    """
    major, minor = map(int, triton.__version__.split(".")[:2])
    with as_shipped():
        configs: dict[Pass, Config] = {
            which: candidates(Target(cc, (major, minor)), which, torch.bfloat16, d, d, TILE, has_levels=True)[
                0
            ]
            for which in KERNELS.values()
        }
    plain = {which: analyse(kernel, model=False) for which, kernel in build(cc, d, None, configs).items()}
    score = ab.MultiLevel([d // 4] * 4, widths=[None, 512, 256, 128])
    found = []
    for which, compiled in build(cc, d, score).items():
        config, kernel, beside = configs[which], analyse(compiled, model=False), plain[which]
        area = config.rows * config.cols
        whole = find(beside, which, area, d, d)
        for prefix in PREFIXES[d]:
            loops = find(kernel, which, area, prefix, d)
            if len(loops) != 1 or len(whole) != 2:
                there = [x.flops for x in (*kernel.loops, *beside.loops)]
                raise ValueError(
                    f"{which}, sm_{cc}, D={d}: wanted one loop for the prefix {prefix}, found {there}"
                )
            over_dims, over_values = PRODUCTS[which]
            values = over_values / (over_dims + over_values) * whole[0].flops
            found.append(
                Figures(
                    *(cc, d, which, prefix, str(config)),
                    loops[0].n * kernel.warps,
                    loops[0].counts["tensor"],
                    (loops[0].flops - values) / (whole[0].flops - values),
                    *(kernel.regs, kernel.ctas, loops[0].spills, kernel.spills),
                    min(x.n for x in whole) * beside.warps,
                    min(x.spills for x in whole),
                    beside.spills,
                )
            )
    return found


def broken_floors(found: Sequence[Figures]) -> list[str]:
    """Return where a prefix does not save its work, or a kernel spills more than the plain one or SPILLS."""
    faults = []
    for x in found:
        if x.score != x.prefix / x.d:
            faults.append(f"{x.name}: {x.score:.3f} of plain's tensor work for scores, not {x.prefix / x.d}")
        inside, spills = SPILLS.get((x.sm, x.d, x.which), (x.plain_inside, x.plain_spills))
        if x.inside > inside:
            faults.append(f"{x.name}: {x.inside} spills in the loop, at most {inside}")
        if x.spills > spills:
            faults.append(f"{x.name}: {x.spills} spills in the kernel, at most {spills}")
    for x, y in pairwise(found):
        if (x.sm, x.d, x.which) != (y.sm, y.d, y.which):
            continue
        for name, fewer, more in (
            ("instructions", x.instructions, y.instructions),
            ("instructions on tensor cores", x.tensor, y.tensor),
        ):
            if fewer >= more:
                faults.append(f"{x.name}: {fewer} {name}, {more} with the prefix {y.prefix}")
    return faults


def count(capabilities: Sequence[int]) -> list[Figures]:
    """Count every pass."""
    found = []
    for cc in capabilities:
        report.progress(f"counting levels, sm_{cc}")
        found += [x for d in PREFIXES for x in figures(cc, d)]
    report.progress("")
    return found


def show(found: Sequence[Figures]) -> None:
    """Print a row per pass: figures by prefix, then those of the plain kernel."""
    header = [
        "levels: pass",
        "tile, warps, stages",
        "regs",
        "blocks/SM",
        "instr/tile",
        "tensor instr",
        "spills",
    ]
    rows = [["", *["static"] * 6]]
    for x in found:
        if x.prefix != PREFIXES[x.d][0]:
            continue
        all_of = [y for y in found if (y.sm, y.d, y.which) == (x.sm, x.d, x.which)]
        instructions = " ".join(str(y.instructions) for y in all_of)
        rows.append(
            [
                f"sm_{x.sm} D={x.d} {PASSES[x.which]}",
                *(x.config, str(x.regs), str(x.ctas), f"{instructions}/{x.plain_instructions}"),
                " ".join(str(y.tensor) for y in all_of),
                f"{x.spills} ({sum(y.inside for y in all_of)} in loops)/{x.plain_spills}",
            ]
        )
    title = (
        "multi-level scores of four equal ranks, bfloat16: at each prefix/the plain kernel of the same tile"
    )
    print(f"\n{report.plain(title, header, rows)}")


def main() -> None:
    """Print the table; with --gate, fail where a floor breaks."""
    parser = argparse.ArgumentParser(prog="python -m attnbias.benchmarks.static.levels")
    parser.add_argument("--sm", type=lambda text: [int(x) for x in text.split(",")], default=CAPABILITIES)
    parser.add_argument("--gate", action="store_true", help="exit with 1 where a floor breaks")
    options = parser.parse_args()
    found = count(options.sm)
    print(f"triton {triton.__version__}")
    show(found)
    faults = broken_floors(found)
    print(f"\n{len(faults)} floors broken" + "".join(f"\n  {fault}" for fault in faults))
    if options.gate and faults:
        sys.exit(1)


if __name__ == "__main__":
    main()

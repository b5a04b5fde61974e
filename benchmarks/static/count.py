"""Count both sides, each architecture in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..measure import terminal as report
from . import edges, levels, options
from .edges import Figures as EdgeFigures
from .figures import STORE, Table, load
from .levels import CAPABILITIES as WITH_LEVELS
from .levels import Figures as LevelFigures
from .options import CAPABILITIES as WITH_OPTIONS
from .options import Figures as OptionFigures

PEERED = (80, 90, 100, 120)  # compared with FlexAttention's kernels
SIZES = (64, 128)
TILES = (128, 64)


def count_ours(cc: int) -> Table:
    """Count our loops for one capability."""
    from . import ours

    return ours.measure(cc, SIZES, TILES)


def count_flex(cc: int, d: int) -> Table:
    """Count FlexAttention's loops; call it in a process of its own, because it patches torch."""
    from . import flex

    return flex.measure(cc, d)


def count_edges(cc: int) -> list[EdgeFigures]:
    """Count our loops over edges, and those of a kernel that takes one at a time."""
    return edges.count([cc])


def count_levels(cc: int) -> list[LevelFigures]:
    """Count our loops of multi-level scores, and plain ones in their tiles."""
    return levels.count([cc])


def count_options(cc: int) -> list[OptionFigures]:
    """Count what options add to our loops."""
    return options.measure([cc])


def versions() -> tuple[str, str]:
    """Return the versions of torch, without the build suffix, and of Triton."""
    import torch
    import triton

    return torch.__version__.partition("+")[0], triton.__version__


class Counts(NamedTuple):
    """Counted loops: over tiles, ours and FlexAttention's; over edges; of multi-level scores; of options."""

    ours: Table
    peer: Table
    edges: list[EdgeFigures]
    levels: list[LevelFigures]
    options: list[OptionFigures]


def count(capabilities: Sequence[int], jobs: int, rebuild: bool, path: Path = STORE) -> Counts:
    """Count ours, and FlexAttention's if they are not stored or ``rebuild`` is set."""
    stored = load(peer_name(), path)
    peered = [cc for cc in capabilities if cc in PEERED]
    known = set() if rebuild else {(key.sm, key.d) for key in stored}
    wanted = [(cc, d) for cc in peered for d in SIZES if (cc, d) not in known]
    found = Counts({}, {key: figures for key, figures in stored.items() if key.sm in peered}, [], [], [])
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        peers = [pool.apply_async(count_flex, pair) for pair in wanted]
        tasks = [
            (pool.apply_async(count_ours, (cc,)), pool.apply_async(count_edges, (cc,))) for cc in capabilities
        ]
        of_levels = [pool.apply_async(count_levels, (cc,)) for cc in capabilities if cc in WITH_LEVELS]
        of_options = [pool.apply_async(count_options, (cc,)) for cc in capabilities if cc in WITH_OPTIONS]
        for (cc, d), task in zip(wanted, peers, strict=True):
            report.progress(f"counting FlexAttention's, sm_{cc}, D={d}")
            found.peer.update(task.get())
        for cc, (of_tiles, of_edges) in zip(capabilities, tasks, strict=True):
            report.progress(f"counting ours, sm_{cc}")
            found.ours.update(of_tiles.get())
            found.edges.extend(of_edges.get())
        report.progress("counting levels")
        for by_depth in of_levels:
            found.levels.extend(by_depth.get())
        report.progress("counting options")
        for by_option in of_options:
            found.options.extend(by_option.get())
    report.progress("")
    return found


def names() -> tuple[str, str, str, str, str]:
    """Name the stored counts: ours, FlexAttention's, those of edges, of multi-level scores, with options."""
    torch, triton = versions()
    return (
        f"attnbias, triton {triton}",
        f"FlexAttention, torch {torch}, triton {triton}",
        f"attnbias edges, triton {triton}",
        f"attnbias levels, triton {triton}",
        f"attnbias options, triton {triton}",
    )


def peer_name() -> str:
    """Name FlexAttention's stored counts."""
    return names()[1]

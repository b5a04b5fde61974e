"""Layouts drawn: tiles as characters, or as an image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .record import Record

_CHARACTERS = ".+#e*"  # empty, partial, full, edges, edges and a tile
_MOST = 4096  # tiles along a side that are still worth drawing


def draw(layout: Record, path: str | Path | None, group: int) -> str:
    """See :meth:`Layout.picture`."""
    if not 0 <= group < layout.groups:
        raise ValueError(f"group: wanted 0..{layout.groups - 1}, got {group}")
    kinds = tile_kinds(layout, group)
    if path is not None:
        _save_image(layout, kinds, Path(path))
    return "\n".join("".join(_CHARACTERS[kind] for kind in row) for row in kinds.tolist())


def tile_kinds(layout: Record, group: int) -> NDArray[np.int64]:
    """Return the kind of each tile of a group, [q_tiles, k_tiles], as an index into ``.+#e*``."""
    tile = layout.tile
    shape = (-(-layout.q_len // tile), -(-layout.k_len // tile))
    if max(shape) > _MOST:
        raise ValueError(f"picture: {shape[0]} x {shape[1]} tiles are too many to draw")
    kinds = np.zeros(shape, np.int64)
    listed = layout.q_tile.cpu().numpy()
    for t, (begin, *_, middle, end) in enumerate(layout.q_ptr[group].tolist()):
        kinds[t, listed[begin:middle]] = 2
        kinds[t, listed[middle:end]] = 1
    if layout.edges:
        first = group * layout.q_len
        ptr = layout.edge_ptr[first : first + layout.q_len + 1].cpu().numpy()
        key = layout.edge_key[int(ptr[0]) : int(ptr[-1])].cpu().numpy()
        row = np.repeat(np.arange(layout.q_len), np.diff(ptr)) // tile
        listed_too = kinds[row, key // tile] > 0
        kinds[row, key // tile] = np.where(listed_too, 4, 3)
    return kinds


def _save_image(layout: Record, kinds: NDArray[np.int64], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ImportError("drawing needs matplotlib: pip install 'attnbias[plot]'") from None
    colours = ["#f3f3f3", "#8fb8de", "#1f5a99", "#f2b134", "#c8553d"]
    names = ["empty", "partial", "full", "edges", "edges and tile"]
    figure = Figure(figsize=(6, 6 * kinds.shape[0] / max(kinds.shape[1], 1) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(kinds, cmap=ListedColormap(colours), vmin=0, vmax=4, interpolation="nearest")
    axes.set_xlabel(f"key tile ({layout.tile} keys)")
    axes.set_ylabel(f"query tile ({layout.tile} queries)")
    axes.set_title(f"{layout.q_len} queries, {layout.k_len} keys")
    present = [Patch(color=colours[kind], label=names[kind]) for kind in np.unique(kinds)]
    figure.legend(handles=present, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)

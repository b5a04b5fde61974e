"""Pictures drawn by matplotlib, which is imported here only: the extra ``plot``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .html import COLOURS, opacity_of
from .picture import KINDS, Cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _MOST_LINES = 64, 3  # of a title
_MOST_RATIO = 8  # of the sides, up to which cells are squares
_MOST_GRID = 48  # tokens along a side up to which lines part the pairs


def plot(cells: Cells, title: str, axes: Axes | None = None) -> Axes:
    """Draw on axes, those of a new figure of pyplot if None; return them."""
    try:
        from matplotlib import colors, patches, ticker
    except ImportError:
        raise _missing() from None
    if axes is None:
        from matplotlib import pyplot

        axes = pyplot.subplots(layout="constrained")[1]
    palette = np.array([colors.to_rgba(COLOURS[name]) for name in KINDS])
    image = palette[cells.kinds]  # [rows, columns, 4]
    image[..., 3] = opacity_of(cells)
    rows, columns = cells.kinds.shape
    edge = 0.5 if cells.size == 1 else 0.0  # a pair lies around its numbers, a larger cell between them
    (q_len, k_len), size = cells.lengths, cells.size
    extent = (-edge, columns * size - edge, rows * size - edge, -edge)
    if image.size:
        is_thin = max(rows, columns) > _MOST_RATIO * min(rows, columns)
        axes.imshow(image, extent=extent, interpolation="nearest", aspect="auto" if is_thin else "equal")
    axes.set_xlim(-edge, max(k_len, 1) - edge)
    axes.set_ylim(max(q_len, 1) - edge, -edge)
    for axis, mine, other in ((axes.xaxis, columns, rows), (axes.yaxis, rows, columns)):
        bins = max(8 * min(mine, other) // max(other, 1), 2)
        axis.set_major_locator(ticker.MaxNLocator(nbins=bins, integer=True, min_n_ticks=1))
    if size == 1 and max(q_len, k_len) <= _MOST_GRID:  # tell neighbours apart
        axes.set_xticks(np.arange(0.5, k_len), minor=True)
        axes.set_yticks(np.arange(0.5, q_len), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    axes.set_facecolor("#f4f4f4")
    axes.set_xlabel("key" if size == 1 else f"key (a cell is {size} x {size} pairs, shaded by its share)")
    axes.set_ylabel("query")
    axes.set_title("\n".join(textwrap.wrap(title, _WIDTH, max_lines=_MOST_LINES)), fontsize="medium")
    present = [KINDS[kind] for kind in np.unique(cells.kinds) if kind]
    if present and present != ["related"]:
        handles = [patches.Patch(color=COLOURS[name], label=name) for name in present]
        axes.legend(
            handles=handles,
            ncols=len(present),
            frameon=False,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.0),
            borderaxespad=4.0,  # the height of the ticks, in sizes of the letters
        )
    return axes


def save(cells: Cells, path: str | Path, title: str, kind: str | None = None) -> None:
    """Draw into a file as png, svg or pdf; its suffix says which if ``kind`` does not."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise _missing() from None
    rows, columns = cells.kinds.shape
    height = min(max(5.0 * rows / max(columns, 1), 1.5), 10.0) + 1.2
    figure = Figure(figsize=(6, height), layout="constrained")
    FigureCanvasAgg(figure)
    plot(cells, title, figure.subplots())
    figure.savefig(path, dpi=150, format=kind)


def _missing() -> ImportError:
    return ImportError("drawing needs matplotlib: pip install 'attnbias[plot]'")

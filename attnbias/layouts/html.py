"""Pictures for notebooks, as inline SVG that reads on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from .picture import KINDS, Cells

# Told apart with every kind of colour blindness; text and lines take the page's own colour.
COLOURS = dict(zip(KINDS, ("none", "#56b4e9", "#0077bb", "#ee9f27", "#cc5577", "#2b8cbe"), strict=True))
_LEAST, _SHADES = 0.4, 8  # opacity of a cell with hardly any pair; how many are told apart
_SIDE, _LEAST_SIDE, _MOST_OF_CELL = 260, 12, 20  # pixels: of a picture's longer and shorter side, of a cell
_MOST_LINES = 32  # cells along a side, or twice the tiles, that lines still tell apart
_MOST_TITLE = 160  # characters


def page(cells: Cells, title: str, notes: Sequence[str], *, tile: int | None = None) -> str:
    """Return a picture with its title above, a legend and notes below.

    Args:
        cells: the picture.
        title: what it shows; long ones are cut.
        notes: lines below.
        tile: tokens of a tile, whose bounds are drawn.
    """
    cut = title if len(title) <= _MOST_TITLE else f"{title[:_MOST_TITLE]}..."
    present = [KINDS[kind] for kind in np.unique(cells.kinds) if kind]
    legend = [
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:.8em;height:.8em;'
        f'background:{COLOURS[name]}"></span> {name}</span>'
        for name in present
        if present != ["related"]
    ]
    lines = [*([" &ensp;".join(legend)] if legend else []), *map(escape, notes)]
    below = "".join(f'<div style="font-size:.85em;opacity:.8">{line}</div>' for line in lines)
    return (
        '<div style="font-family:sans-serif;text-align:left">'
        f'<code style="background:none;color:inherit">{escape(cut)}</code>'
        f'<div style="margin:4px 0">{_svg(cells, cut, tile)}</div>{below}</div>'
    )


def opacity_of(cells: Cells) -> NDArray[np.float64]:
    """Return how strongly each cell is coloured: by its share of related pairs beside the largest share."""
    shade: NDArray[np.float64] = cells.share / max(float(cells.share.max(initial=0)), 1e-30)
    return np.where(cells.kinds > 0, _LEAST + (1 - _LEAST) * shade, 0.0)


def _svg(cells: Cells, label: str, tile: int | None) -> str:
    rows, columns = cells.kinds.shape
    scale = min(_SIDE / max(rows, columns, 1), _MOST_OF_CELL)
    width, height = (f"{max(count * scale, _LEAST_SIDE):.0f}" for count in (columns, rows))
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" style="max-width:100%;display:block">'
        f'<rect width="{columns}" height="{rows}" fill="currentColor" fill-opacity=".08"/>'
        f"{''.join(_paths(cells))}{''.join(_lines(cells, scale, tile))}</svg>"
    )


def _paths(cells: Cells) -> Iterator[str]:
    """Yield a path for each kind and shade, of runs of cells along the rows."""
    looks = cells.kinds * (_SHADES + 1) + np.rint(opacity_of(cells) * _SHADES).astype(np.int64)
    for look in np.unique(looks[cells.kinds > 0]):
        kind, opacity = divmod(int(look), _SHADES + 1)
        padded = np.pad(looks == look, ((0, 0), (1, 1))).astype(np.int8)
        row, start = np.nonzero(np.diff(padded) == 1)
        _, stop = np.nonzero(np.diff(padded) == -1)
        runs = "".join(
            f"M{a} {y}h{b - a}v1h{a - b}z"
            for y, a, b in zip(row.tolist(), start.tolist(), stop.tolist(), strict=True)
        )
        yield (
            f'<path d="{runs}" fill="{COLOURS[KINDS[kind]]}" fill-opacity="{opacity / _SHADES}" '
            'shape-rendering="crispEdges"/>'
        )


def _lines(cells: Cells, scale: float, tile: int | None) -> Iterator[str]:
    """Yield the lines between cells, and those between tiles."""
    rows, columns = cells.kinds.shape
    steps = [(1, 0.15)] if max(rows, columns) <= _MOST_LINES else []
    if tile is not None and cells.size < tile and 2 * max(cells.lengths) <= _MOST_LINES * tile:
        steps.append((tile // cells.size, 0.4))
    for step, opacity in steps:
        across = "".join(f"M0 {y}H{columns}" for y in range(step, rows, step))
        down = "".join(f"M{x} 0V{rows}" for x in range(step, columns, step))
        yield (
            f'<path d="{across}{down}" stroke="currentColor" stroke-opacity="{opacity}" '
            f'stroke-width="{1 / scale:.3f}" fill="none"/>'
        )

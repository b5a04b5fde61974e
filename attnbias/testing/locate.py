"""Say where in a result the wrong numbers sit, in words that point at a kernel's tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ..layouts.layout import Layout

SIZES = (128, 64, 32, 16, 8)  # tiles that a kernel may have, largest first
BY_KEY = ("key", "value")  # results whose rows are keys


def locate(name: str, wrong: Tensor, got: Tensor, layout: Layout | None = None) -> str:
    """Describe the wrong elements of a result.

    Says the first one, how many there are, whether they fill tiles of rows or columns, whether their rows
    walk full or masked tiles of the layout, and whether they are NaN.

    Args:
        name: the result: out, lse, max, query, key or value.
        wrong: bool [B, H, L] or [B, H, L, D].
        got: the result, in the same shape.
        layout: of the call.

    Example:
        >>> import torch
        >>> wrong = torch.zeros(1, 2, 200, 8, dtype=torch.bool)
        >>> wrong[0, 1, 64:128] = True
        >>> locate("out", wrong, torch.zeros(1, 2, 200, 8))
        'first at b 0, h 1, row 64, column 0; 512 of 3200; rows fill 1 tile of 64; all columns; no NaN'
    """
    if wrong.dim() not in (3, 4):  # the gradient of a sink or a term
        return f"first at {wrong.nonzero()[0].tolist()}; {int(wrong.sum())} of {wrong.numel()}"
    wide = wrong if wrong.dim() == 4 else wrong[..., None]
    b, h, row, column = wide.nonzero()[0].tolist()
    rows, columns = wide.any(3).any(0).any(0), wide.any(2).any(0).any(0)  # [L], [D]
    first = f"first at b {b}, h {h}, row {row}" + (f", column {column}" if wrong.dim() == 4 else "")
    broken = got.isnan()[wrong]
    parts = [first, f"{int(wrong.sum())} of {wrong.numel()}", f"rows {_pattern(rows)}"]
    if wrong.dim() == 4:
        parts.append("all columns" if columns.all() else f"columns {_pattern(columns)}")
    if layout is not None and layout.tiles:
        parts.append(_kinds(rows, layout, by_key=name in BY_KEY))
    parts.append("all NaN" if broken.all() else f"{int(broken.sum())} NaN" if broken.any() else "no NaN")
    return "; ".join(parts)


def _pattern(marks: Tensor) -> str:
    """Describe which places along a side are marked: whole tiles, the same place of each tile, or neither."""
    at = marks.nonzero()[:, 0]
    length = len(marks)
    if len(at) == length:
        return f"all {length}"
    if len(at) == 1:
        return f"only {int(at)}"
    for size in SIZES:
        tiles = at.div(size, rounding_mode="floor").unique()
        ends = ((tiles + 1) * size).clamp(max=length)
        if int((ends - tiles * size).sum()) == len(at):
            return f"fill {len(tiles)} tile{'s' if len(tiles) > 1 else ''} of {size}"
    by_size = {size: (at % size).unique().tolist() for size in SIZES}
    size = min(SIZES, key=lambda size: len(by_size[size]))  # the largest of those that name the fewest
    places = by_size[size]
    if len(places) < len(at) and len(places) <= size // 8:
        return f"are places {places[:4]} of tiles of {size}"
    return f"{int(at[0])} to {int(at[-1])}, {len(at)} of them, in no tile's shape"


def _kinds(rows: Tensor, layout: Layout, *, by_key: bool) -> str:
    """Say whether the wrong rows walk full tiles, masked ones or both, and which the right ones walk."""
    fields = layout.fields
    ptr = fields.k_ptr if by_key else fields.q_ptr
    counts = ptr.cpu().diff(dim=-1).sum(0)  # [tile rows, full ones by depth, then the masked ones]
    full, masked = counts[:, :-1].sum(1) > 0, counts[:, -1] > 0
    at = rows.nonzero()[:, 0].div(layout.tile, rounding_mode="floor").unique()
    kinds = {
        "only full": int((full & ~masked)[at].sum()),
        "only masked": int((masked & ~full)[at].sum()),
        "full and masked": int((full & masked)[at].sum()),
    }
    found = ", ".join(f"{n} walk {name}" for name, n in kinds.items() if n)
    return f"of {len(at)} wrong tile rows {found or 'none walks a'} tiles"

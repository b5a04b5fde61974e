"""Rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotate pairs of features by an angle that grows with the position: scores then see only distances.

    Feature ``i`` is paired with ``i + head_size / 2`` (the halves of Llama and GPT-NeoX) and rotated by
    ``position * base ** (-2 i / head_size)``. ``q @ k`` then depends only on the distance, so a layer is
    equivariant to the same translations as its relation.

    Args:
        head_size: D, even.
        base: the larger, the slower the slowest pair rotates.

    Raises:
        ValueError: if ``head_size`` is odd or not positive.

    Example:
        >>> import torch
        >>> turn = Rotary(4)
        >>> q, k = torch.randn(2, 1, 4).double()
        >>> near = turn(q, start=3) @ turn(k, start=1).mT
        >>> far = turn(q, start=103) @ turn(k, start=101).mT
        >>> bool((near - far).abs() < 1e-9)
        True
    """

    def __init__(self, head_size: int, base: float = 10000.0) -> None:
        super().__init__()
        if head_size < 2 or head_size % 2:
            raise ValueError(f"head_size: wanted an even number of at least 2, got {head_size}")
        self.head_size = head_size
        self.base = base

    def forward(self, x: Tensor, start: int | Tensor = 0) -> Tensor:
        """Rotate x [..., n, D].

        Args:
            x: rows to rotate.
            start: position of the first row, the others following it; or the position of each row, [n].

        Raises:
            ValueError: if D is not the ``head_size``, or there is not a position for each row.
        """
        if x.shape[-1] != self.head_size:
            raise ValueError(f"x: wanted [..., n, {self.head_size}], got {list(x.shape)}")
        if isinstance(start, Tensor) and start.shape != x.shape[-2:-1]:
            raise ValueError(
                f"start: wanted a number or a position for each of {x.shape[-2]} rows, "
                f"got {list(start.shape)}"
            )
        half = self.head_size // 2
        # Half precision has too few digits for the angles of late positions.
        precision = torch.float64 if x.dtype == torch.float64 else torch.float32
        power = torch.arange(half, device=x.device, dtype=precision) / half
        if isinstance(start, Tensor):
            position = start.to(x.device, precision)
        else:
            position = torch.arange(start, start + x.shape[-2], device=x.device, dtype=precision)
        angle = position[:, None] * self.base**-power  # [n, D / 2]
        cos, sin = (_place_like(x, each) for each in (angle.cos(), angle.sin()))
        left, right = x.to(precision).split(half, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)

    def extra_repr(self) -> str:
        """See :class:`torch.nn.Module`."""
        return f"{self.head_size}, base={self.base}"


def _place_like(x: Tensor, table: Tensor) -> Tensor:
    """Return a table that every rank has as a DTensor where x is one, whose operations take no other."""
    if type(x).__name__ != "DTensor":
        return table
    from torch.distributed.tensor import DTensor, Replicate  # slow to import

    assert isinstance(x, DTensor)
    return DTensor.from_local(table, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)

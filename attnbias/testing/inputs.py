"""Inputs surrounded by NaN, and the sequence lengths at which kernels go wrong first."""

from __future__ import annotations

import torch
from torch import Tensor

GUARD = 64  # elements of NaN before and after a dense tensor


def lengths(tile: int = 64) -> list[int]:
    """Return sequence lengths around a tile, which test its ragged edge.

    Example:
        >>> lengths(64)
        [1, 63, 64, 65, 97]
    """
    return [1, tile - 1, tile, tile + 1, 97]


def make_inputs(
    rng: int | torch.Generator,
    B: int,
    H: int,
    Hk: int,
    Q: int,
    K: int,
    D: int,
    E: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    order: str = "BHLD",
    strided: bool = False,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw query [B, H, Q, D], key [B, Hk, K, D] and value [B, Hk, K, E], surrounded by NaN.

    Each is a view of a larger buffer of NaN, so that a read past an end shows in the result.

    Args:
        rng: a seed, or a generator on the CPU.
        B: batch size.
        H: query heads.
        Hk: key heads.
        Q: query length.
        K: key length.
        D: head size.
        E: value size.
        dtype: of all three.
        device: of all three.
        order: order of the dimensions in memory, outermost first; "BLHD" is a transposed
            [B, L, H, D].
        strided: also put NaN between the rows, so that no dimension is dense.
        requires_grad: make all three leaves that collect gradients.

    Raises:
        ValueError: if ``order`` is not a permutation of the letters BHLD.

    Example:
        >>> query, key, value = make_inputs(0, B=2, H=4, Hk=2, Q=5, K=7, D=8, E=3, order="BLHD")
        >>> query.shape, query.stride(), value.shape
        (torch.Size([2, 4, 5, 8]), (160, 8, 32, 1), torch.Size([2, 2, 7, 3]))
    """
    if sorted(order) != sorted("BHLD"):
        raise ValueError(f"order: wanted a permutation of the letters BHLD, got {order!r}")
    if isinstance(rng, int):
        rng = torch.Generator().manual_seed(rng)
    made = []
    for shape in ((B, H, Q, D), (B, Hk, K, D), (B, Hk, K, E)):
        drawn = torch.randn(shape, generator=rng, dtype=torch.float64)
        stored = drawn.permute(["BHLD".index(letter) for letter in order])
        if strided:
            buffer = torch.full([n + 2 for n in stored.shape], torch.nan, dtype=dtype, device=device)
            inside = buffer[1:-1, 1:-1, 1:-1, 1:-1]
        else:
            buffer = torch.full([stored.numel() + 2 * GUARD], torch.nan, dtype=dtype, device=device)
            inside = buffer[GUARD:-GUARD].view(stored.shape)
        inside.copy_(stored)
        made.append(inside.permute([order.index(letter) for letter in "BHLD"]))
        made[-1].requires_grad_(requires_grad)
    return made[0], made[1], made[2]

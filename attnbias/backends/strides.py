"""Memory of results and gradients: in the stride order of the inputs."""

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_like_query(query: Tensor, size: int) -> Tensor:
    """Allocate ``out`` [B, H, Q, size] with B, H and Q in the query's stride order.

    Transposing [B, L, H, D] in and out then copies nothing. The last dimension is always dense.

    Example:
        >>> x = torch.zeros(2, 5, 3, 8)  # [B, L, H, D]
        >>> out = empty_like_query(x.transpose(1, 2), 4)
        >>> out.shape, out.transpose(1, 2).is_contiguous()
        (torch.Size([2, 3, 5, 4]), True)
    """
    if type(query) is Tensor and query.is_contiguous():  # not while tracing; the rest takes 10 us longer
        *rows_shape, own = query.shape
        return torch.empty_like(query) if size == own else query.new_empty((*rows_shape, size))
    rows = torch.empty_like(query[..., 0], device="meta")  # torch's own rule orders the strides
    strides = [stride * size for stride in rows.stride()]
    return query.new_empty_strided((*rows.shape, size), (*strides, 1))


def empty_grads(inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """Allocate the gradients that are needed; each lies in memory like its input."""
    return [
        None if x is None or not need else torch.empty_like(x) for x, need in zip(inputs, needs, strict=True)
    ]


def dense_rows(x: Tensor) -> Tensor:
    """Return x, or a copy whose last dimension is dense."""
    return x if x.is_contiguous() or x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def empty_dense_rows(x: Tensor | None) -> Tensor | None:
    """Return x, or memory of its shape whose last dimension is dense: kernels write dense rows."""
    if x is None or x.is_contiguous() or x.stride(3) == 1 or x.shape[3] == 1:
        return x
    return x.new_empty(x.shape)


def copy_back(to: Sequence[Tensor | None], written: Sequence[Tensor | None]) -> None:
    """Copy what kernels wrote to where it belongs, unless they wrote it there."""
    for place, rows in zip(to, written, strict=True):
        if place is not None and rows is not None and rows is not place:
            place.copy_(rows)

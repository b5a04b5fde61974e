"""Where the result lies in memory."""

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
    rows = torch.empty_like(query[..., 0], device="meta")  # torch's own rule orders the strides
    strides = [stride * size for stride in rows.stride()]
    return query.new_empty_strided((*rows.shape, size), (*strides, 1))

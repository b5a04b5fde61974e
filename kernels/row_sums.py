"""What the backward kernels over tiles read of each row: delta and lse."""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import WIDE_ROW, columns
from .tile import LOG2E, addresses, head_of

PADDING = tl.constexpr(128)  # delta and lse are padded to a multiple of every tile


@triton.jit(do_not_specialize=["heads", "q_len"])
def delta_kernel(
    OUT,
    GRAD_OUT,
    LSE,
    GRAD_LSE,
    DELTA,
    LSE2,
    out_strides,
    grad_strides,
    heads,
    q_len,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):
    """delta = rowsum(out * dout) - dlse and lse * log2(e), padded, so that no loop checks their bounds.

    Rows that are empty or do not exist get 0 and +inf: exp2(score - inf) = 0.
    """
    stride = tl.cdiv(q_len, PADDING) * PADDING
    tiles = stride // ROWS
    head = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles) * ROWS
    rows = tl.arange(0, ROWS)
    exists = first + rows < q_len
    inside = exists[:, None] & (tl.arange(0, COLUMNS) < SIZE)[None, :]
    out = head_of(OUT, head // heads, head % heads, out_strides)
    out = tl.load(addresses(out, first, out_strides[2], rows, COLUMNS, WIDE), mask=inside, other=0.0)
    grad = head_of(GRAD_OUT, head // heads, head % heads, grad_strides)
    grad = tl.load(addresses(grad, first, grad_strides[2], rows, COLUMNS, WIDE), mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    at = head.to(tl.int64) * q_len + first + rows
    lse = tl.load(LSE + at, mask=exists, other=-float("inf"))
    if HAS_GRAD_LSE:
        delta -= tl.load(GRAD_LSE + at, mask=exists, other=0.0)
    is_empty = lse == -float("inf")
    at = head.to(tl.int64) * stride + first + rows
    # The lse of an empty row is a constant, whatever gradient comes in.
    tl.store(DELTA + at, tl.where(is_empty, 0.0, delta))
    tl.store(LSE2 + at, tl.where(is_empty, float("inf"), lse * LOG2E))


def row_sums(out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return delta and lse * log2(e), float32 [B, H, Q padded], as the backward kernels read them.

    Args:
        out: [B, H, Q, E], the last dimension dense.
        lse: float32 [B, H, Q], dense.
        grad_out: [B, H, Q, E], the last dimension dense.
        grad_lse: float32 [B, H, Q], dense.
    """
    B, H, Q, E = out.shape
    length = -(-Q // PADDING.value) * PADDING.value
    delta, lse2 = (out.new_empty((B, H, length), dtype=torch.float32) for _ in range(2))
    rows = 32 if E > 128 else 64
    delta_kernel[B * H * (length // rows),](
        *(out, grad_out, lse, grad_lse, delta, lse2),
        *(out.stride()[:3], grad_out.stride()[:3], H, Q),
        ROWS=rows,
        SIZE=E,
        COLUMNS=columns(E),
        WIDE=max(out.stride(2), grad_out.stride(2)) >= WIDE_ROW,
        HAS_GRAD_LSE=grad_lse is not None,
        enable_fp_fusion=True,
    )
    return delta, lse2

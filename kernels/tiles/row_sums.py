"""The sums over rows that the backward kernels over tiles read: delta, and lse with them."""
# Triton gives kernels their types, from the arguments of a launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from ..launch.launch import WIDE_ROW, columns
from ..launch.plans import launch_with, scratch
from ..records import Strided, round_up
from .tile import LOG2E, addresses, head_of
from .walk import Rows

PADDING = tl.constexpr(128)  # delta and lse are padded to a multiple of every tile


@triton.jit(do_not_specialize=["heads", "q_len"])
def delta_kernel(
    out,
    grad_out,
    lse,
    grad_lse,
    delta,
    lse2,
    heads,
    q_len,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write delta = rowsum(out * dout) - dlse and lse * log2(e), padded, so that no loop checks bounds.

    Rows that are empty or do not exist get 0 and +inf: exp2(score - inf) = 0.
    """
    stride = tl.cdiv(q_len, PADDING) * PADDING
    tiles = stride // ROWS
    head = tl.program_id(0) // tiles
    first = (tl.program_id(0) % tiles) * ROWS
    rows = tl.arange(0, ROWS)
    exists = first + rows < q_len
    inside = exists[:, None] & (tl.arange(0, COLUMNS) < SIZE)[None, :]
    x = Rows(head_of(out, head // heads, head % heads), first, out.at, rows, q_len, 0)
    y = Rows(head_of(grad_out, head // heads, head % heads), first, grad_out.at, rows, q_len, 0)
    x = tl.load(addresses(x, 0, COLUMNS, WIDE), mask=inside, other=0.0)
    y = tl.load(addresses(y, 0, COLUMNS, WIDE), mask=inside, other=0.0)
    sums = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    at = head.to(tl.int64) * q_len + first + rows
    log_sum = tl.load(lse + at, mask=exists, other=-float("inf"))
    if grad_lse is not None:
        sums -= tl.load(grad_lse + at, mask=exists, other=0.0)
    is_empty = log_sum == -float("inf")
    at = head.to(tl.int64) * stride + first + rows
    # The lse of an empty row is a constant, whatever gradient comes in.
    tl.store(delta + at, tl.where(is_empty, 0.0, sums))
    tl.store(lse2 + at, tl.where(is_empty, float("inf"), log_sum * LOG2E))


def row_sums(out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return delta and lse * log2(e), float32 [B, H, Q padded], as the backward kernels read them.

    Args:
        out: [B, H, Q, E], the last dimension dense.
        lse: float32 [B, H, Q], dense.
        grad_out: [B, H, Q, E], the last dimension dense.
        grad_lse: float32 [B, H, Q], dense.
    """
    B, H, Q, E = out.shape
    length = round_up(Q, PADDING.value)
    delta, lse2 = scratch(out, (B, H, length)), scratch(out, (B, H, length))
    rows = 32 if E > 128 else 64
    launch_with(
        delta_kernel,
        (B * H * (length // rows),),
        {
            "heads": H,
            "q_len": Q,
            "ROWS": rows,
            "SIZE": E,
            "COLUMNS": columns(E),
            "WIDE": max(out.stride(2), grad_out.stride(2)) >= WIDE_ROW,
        },
        {
            "out": Strided.of(out),
            "grad_out": Strided.of(grad_out),
            "lse": lse,
            "grad_lse": grad_lse,
            "delta": delta,
            "lse2": lse2,
        },
        enable_fp_fusion=True,
    )
    return delta, lse2

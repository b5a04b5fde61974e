"""A tensor of all ranks in the caller's order, and its derivative."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .exchange import send, wait

if TYPE_CHECKING:
    from .ranks import Ranks
    from .split import Split


def gather(part: Tensor, dim: int, split: Split, ranks: Ranks) -> Tensor:
    """Return the rows of all ranks in the order of their positions."""
    if ranks.size == 1:
        return part
    rows = part.movedim(dim, 0).contiguous()
    whole: Tensor = _Gather.apply(split, ranks, rows)  # type: ignore[no-untyped-call]
    return whole.movedim(0, dim)


class _Gather(torch.autograd.Function):
    """All ranks' rows; the derivative adds, by rank, what all ranks ask for."""

    @staticmethod
    def forward(ctx: Any, split: Split, ranks: Ranks, rows: Tensor) -> Tensor:
        """Send this rank's rows to all, itself included."""
        ctx.split, ctx.ranks = split, ranks
        mine = len(rows)
        give = [mine] * ranks.size
        repeated = rows.expand(ranks.size, *rows.shape).reshape(-1, *rows.shape[1:])
        came = wait(send(repeated, give, split.counts.tolist(), ranks.group.group_name))
        place = torch.from_numpy(split.order).to(rows.device)
        whole = torch.empty_like(came)
        whole[place] = came
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Send each rank the gradients of its rows, and add them up in float32."""
        split, ranks = ctx.split, ctx.ranks
        counts = split.counts.tolist()
        home = grad[torch.from_numpy(split.order).to(grad.device)]
        came = wait(send(home, counts, [counts[ranks.rank]] * ranks.size, ranks.group.group_name))
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        total = torch.zeros(counts[ranks.rank], *grad.shape[1:], dtype=wide, device=grad.device)
        for rows in came.split(counts[ranks.rank]) if counts[ranks.rank] else ():
            total += rows
        return None, None, total.to(grad.dtype)

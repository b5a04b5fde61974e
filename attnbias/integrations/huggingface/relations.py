"""Relations for models: the patches of a ViT, and the nearest keys of each query."""

from __future__ import annotations

import torch
from torch import Tensor

from ...relations import Global, Graph, Neighborhood, Neighbors, Relation


def patch_neighborhood(shape: tuple[int, int], radius: int, first: int = 1) -> Relation:
    """Make a neighbourhood on a ViT's grid of patches, after ``first`` tokens that see and are seen by all.

    Example:
        >>> patch_neighborhood((4, 4), 1).count(17, 17)
        133
    """
    near = Neighborhood(shape, radius)
    patches = shape[0] * shape[1]
    query, key = near.dense(patches, patches).nonzero().T + first
    grid = Graph(torch.stack((key, query)), num_nodes=patches + first)
    return grid | Global(list(range(first)))


class NearestKeys:
    """Each query and head attends to the ``count`` keys with the largest products, as in Unlimiformer.

    Pass it to :func:`set_relation` instead of a relation. Keys that the model's own mask excludes are not
    searched. The search is exact, goes over ``chunk`` keys at a time, and holds [B, H, Q, count + chunk]
    numbers.

    Args:
        count: keys per query.
        chunk: keys whose products are held at once.
    """

    def __init__(self, count: int, chunk: int = 4096) -> None:
        if count < 1 or chunk < 1:
            raise ValueError(f"count, chunk: wanted at least 1 each, got {count} and {chunk}")
        self.count, self.chunk = count, chunk

    @torch.no_grad()
    def find(self, query: Tensor, key: Tensor, allowed: Relation, q_start: int) -> Neighbors:
        """Find the nearest allowed keys [B, Hk, K, D] of each query [B, H, Q, D]."""
        (B, H, Q, _), (Hk, K) = query.shape, key.shape[1:3]
        allowed.check(Q, K, q_start, B, H)
        b, h, q = (torch.arange(n, device=query.device) for n in (B, H, Q))
        where = b[:, None, None, None], h[:, None, None], q[:, None] + q_start
        scores = query.new_full((B, H, Q, 0), -torch.inf)
        index = torch.zeros(B, H, Q, 0, dtype=torch.int64, device=query.device)
        for first in range(0, K, self.chunk):
            k = torch.arange(first, min(first + self.chunk, K), device=query.device)
            part = key[:, :, first : first + self.chunk].repeat_interleave(H // Hk, dim=1)
            product = query @ part.mT  # [B, H, Q, chunk]
            related = allowed.related(where[2], k, where[0], where[1])
            scores = torch.cat((scores, product.masked_fill(~related, -torch.inf)), dim=-1)
            index = torch.cat((index, k.expand(B, H, Q, -1)), dim=-1)
            scores, best = scores.topk(min(self.count, scores.shape[-1]), dim=-1)
            index = index.gather(-1, best)
        return Neighbors(index.masked_fill(scores == -torch.inf, -1))

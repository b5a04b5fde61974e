"""Buckets of distances, for tables that hold one number for each: ``RelativeBias``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..arguments import as_flag
from ..layouts.streams import Made, note_making, take

Buckets = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class linear_buckets:
    """A bucket for each distance up to ``most`` either way, further ones in the last: 2 most + 1.

    Example:
        >>> import torch
        >>> linear_buckets(2)(torch.arange(-3, 4), 5)
        tensor([0, 0, 1, 2, 3, 4, 4])
    """

    most: int

    def __call__(self, distance: Tensor, count: int) -> Tensor:
        """Return the bucket of each distance."""
        return distance.clamp(-self.most, self.most) + self.most


@dataclass(frozen=True)
class t5_buckets:
    """T5's buckets: small distances one by one, larger ones on a logarithmic scale.

    Args:
        bidirectional: half of the buckets for keys after the query, half for keys up to it; else all keys
            from the query on share the first.
        max_distance: from here on all distances are in the last bucket.

    Raises:
        ValueError: for fewer buckets than T5's formula is defined for, 4 or, in one direction, 2; or where
            ``max_distance`` is among the distances that have a bucket each.

    Example:
        >>> import torch
        >>> t5_buckets(bidirectional=False, max_distance=16)(-torch.tensor([0, 1, 3, 4, 8, 99]), 8)
        tensor([0, 1, 3, 4, 6, 7])
    """

    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "bidirectional", as_flag("bidirectional", self.bidirectional))

    def __call__(self, distance: Tensor, count: int) -> Tensor:
        """Return the bucket of each distance, of ``count``."""
        least = 4 if self.bidirectional else 2
        if count < least:
            raise ValueError(f"terms: t5_buckets: wanted a table of at least {least} entries, got {count}")
        first = torch.zeros_like(distance)
        if self.bidirectional:
            count //= 2
            first = (distance > 0).long() * count
            reach = distance.abs()
        else:
            reach = (-distance).clamp(min=0)
        exact = count // 2
        if self.max_distance <= exact:
            raise ValueError(
                f"terms: t5_buckets.max_distance: wanted more than {exact}, below which each distance has "
                f"a bucket of its own, got {self.max_distance}"
            )
        # In float32 and in this order, as the models were trained.
        share = torch.log(reach.float() / exact) / math.log(self.max_distance / exact)
        far = exact + (share * (count - exact)).nan_to_num(neginf=0).long()
        return first + torch.where(reach < exact, reach, far.clamp(max=count - 1))


def find_buckets(buckets: Buckets, distance: Tensor, count: int) -> Tensor:
    """Return the bucket of each distance, int64.

    Raises:
        TypeError: if the function gives no integers.
        ValueError: if they have another shape.
    """
    index = buckets(distance, count)
    where = "terms: RelativeBias.buckets: wanted a function that returns integers"
    if not isinstance(index, Tensor):
        raise TypeError(f"{where} in a tensor, got {type(index).__name__} {index!r}")
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(f"{where}, got {index.dtype}; add .long()")
    if index.shape != distance.shape:
        raise ValueError(f"{where} of its argument's shape {[*distance.shape]}, got {[*index.shape]}")
    return index.long()


def distances(q_len: int, k_len: int, q_start: int, device: torch.device) -> Tensor:
    """Return key position minus query position, for each distance that occurs, [Q + K - 1]."""
    return torch.arange(max(q_len + k_len - 1, 0), device=device) + (1 - q_start - q_len)


def buckets_of_distances(
    buckets: Buckets, count: int, q_len: int, k_len: int, q_start: int, device: torch.device
) -> Tensor:
    """Return the bucket of each distance, kept on the device: a later call of equal lengths copies nothing.

    They are found on the host, so that a wrong function is found without waiting for a GPU.

    Raises:
        ValueError: if a bucket is not in the table.
    """
    index, made = _buckets_on(device, buckets, count, q_len, k_len, q_start)
    take(index, made)
    return index


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept is used in training, too
def _buckets_on(
    device: torch.device, buckets: Buckets, count: int, q_len: int, k_len: int, q_start: int
) -> tuple[Tensor, Made | None]:
    if device.type != "cpu":
        index, _ = _buckets_on(torch.device("cpu"), buckets, count, q_len, k_len, q_start)
        return index.to(device), note_making(device)
    distance = distances(q_len, k_len, q_start, device)
    index = find_buckets(buckets, distance, count)
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < count):
        worst = int(index.min()) if int(index.min()) < 0 else int(index.max())
        at = int(distance[index == worst][0])
        raise ValueError(
            f"terms: RelativeBias.buckets: wanted buckets from 0 to {count - 1}, got {worst} at distance {at}"
        )
    return index, None

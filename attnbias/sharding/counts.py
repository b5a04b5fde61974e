"""Counted bytes and work of a plan, by rank, beside other ways to exchange; nothing is timed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..sets.intervals import Ints
from .heads import share_heads
from .plan import Plan


class Shape(NamedTuple):
    """The sizes of a call from which bytes follow."""

    batch: int
    heads: int
    key_heads: int
    size: int  # D
    value_size: int  # E
    width: int  # bytes of a number

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> Shape:
        """Return the shape of a call's tensors."""
        B, H, _, D = query.shape
        return cls(B, H, key.shape[1], D, value.shape[3], query.element_size())

    @property
    def token(self) -> int:
        """Bytes of the keys and values of a token."""
        return self.batch * self.key_heads * (self.size + self.value_size) * self.width


class Traffic(NamedTuple):
    """Bytes that each rank receives, [ranks]."""

    forward: Ints
    backward: Ints


def keys_bytes(plan: Plan, shape: Shape) -> Traffic:
    """Count needed keys and values; in backward their gradients, from every rank that had a row."""
    received = plan.received
    return Traffic(received.sum(1) * shape.token, received.sum(0) * shape.token)


def gather_bytes(plan: Plan, shape: Shape) -> Traffic:
    """Count an all-gather of all keys and values; in backward a reduce-scatter of their gradients."""
    counts = plan.keys.counts
    others = (counts.sum() - counts) * shape.token
    return Traffic(others, counts * (plan.ranks - 1) * shape.token)


def ring_bytes(plan: Plan, shape: Shape) -> Traffic:
    """Count a ring: all keys and values pass by; in backward once more, with their gradients."""
    counts = plan.keys.counts
    others = (counts.sum() - counts) * shape.token
    return Traffic(others, 2 * others)


def heads_bytes(plan: Plan, shape: Shape) -> Traffic:
    """Count what a rank's heads need and the results of its tokens; in backward the gradients of both."""
    shares = share_heads(shape.heads, shape.key_heads, plan.ranks)
    queries = np.array([share.queries for share in shares])
    keys = np.array([share.keys for share in shares])
    q_counts, k_counts = plan.queries.counts, plan.keys.counts
    D, E = shape.size, shape.value_size
    unit = shape.batch * shape.width
    other_queries, other_keys = q_counts.sum() - q_counts, k_counts.sum() - k_counts
    into = other_queries * queries * D + other_keys * keys * (D + E)
    back = q_counts * (queries.sum() - queries) * E
    grads = other_queries * queries * E  # of results
    home = q_counts * (queries.sum() - queries) * D + k_counts * (keys.sum() - keys) * (D + E)
    return Traffic((into + back) * unit, (grads + home) * unit)


def least_bytes(plan: Plan, shape: Shape) -> float:
    """Return what each rank must receive on average, however tokens are split evenly with balanced work.

    A rank whose queries have n keys on average needs at least n, of which it holds its share.
    """
    pairs, q_len = int(plan.work.pairs.sum()), plan.queries.length
    groups = plan.bound.group.size
    needed = pairs / groups / q_len if q_len else 0.0
    return max(0.0, needed - plan.keys.length / plan.ranks) * shape.token


def pairs_of(plan: Plan) -> Ints:
    """Return the related pairs of each rank, over what the relation tells apart of batch and heads."""
    sums = np.bincount(plan.queries.owner, weights=plan.work.pairs, minlength=plan.ranks)
    return sums.astype(np.int64)


def executed_of(plan: Plan) -> NDArray[np.float64]:
    """Return the pairs that kernels of each rank compute; of torn tiles, the related ones."""
    if plan.queries.tile_owner is None:
        return pairs_of(plan).astype(np.float64)
    sums = np.bincount(plan.queries.tile_owner, weights=plan.work.executed, minlength=plan.ranks)
    return sums.astype(np.float64)

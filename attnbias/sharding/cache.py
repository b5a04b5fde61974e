"""Shards made once: for callers that are given a relation and a mesh in every call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ..relations.relation import Relation
from ..sets.intervals import ceil_div
from .ranks import find_ranks
from .shard import Shard, shard
from .split import Name

SHARDS_KEPT = 16  # the latest

_shards: OrderedDict[tuple[Any, ...], Shard] = OrderedDict()


def cached_shard(
    relation: Relation | Sequence[Relation],
    length: tuple[int, int],
    mesh: Any,
    *,
    split: Name | Literal["chunks"],
    **options: Any,
) -> Shard:
    """Return the shard of equal arguments, made before or now; ``options`` are those of :func:`shard`.

    The split "chunks" cuts the sequence as DTensor does, between tiles or not.
    """
    ranks = find_ranks(mesh, None)
    relations = relation if isinstance(relation, Relation) else tuple(relation)
    key = relations, length, ranks.group, split, tuple(options.items())
    if key in _shards:
        _shards.move_to_end(key)
        return _shards[key]
    given: Any = split
    if split == "chunks":
        given = torch.arange(length[0]) // max(ceil_div(length[0], ranks.size), 1)
    made = shard(relation, length, ranks.group, split=given, **options)
    _shards[key] = made
    while len(_shards) > SHARDS_KEPT:
        _shards.popitem(last=False)
    return made

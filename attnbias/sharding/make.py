"""The function that makes a shard: its arguments, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..arguments import as_count, as_flag, as_indices
from ..relations.relation import Relation, Size, Start, resolve_start
from ..sets.bound import Place
from ..sets.intervals import Ints
from .plan import make_plans
from .ranks import find_ranks
from .shard import By, Shard, as_relations
from .split import NAMES, Name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def shard(
    relation: Relation | Sequence[Relation],
    length: int | tuple[int, int],
    mesh: DeviceMesh | ProcessGroup | int | None = None,
    *after_keys: DeviceMesh | ProcessGroup | int | None,
    split: Name | Tensor | Sequence[int] = "auto",
    by: By = "keys",
    stages: int = 1,
    weights: Sequence[float] | None = None,
    q_start: Start = 0,
    batch: Size = None,
    heads: Size = None,
    whole_tiles: bool = False,
    check: bool = False,
    rank: int | None = None,
) -> Shard:
    """Shard a relation over the ranks of a group: a value that ``attention`` takes in place of a relation.

    Every rank makes the same plan from the relation alone: no device is read and nothing is sent. Each rank
    holds some of the tokens, fetches the keys and values that its queries are related to, and computes its
    rows in one call, so that no partial results are merged. What one batch entry or head needs is fetched
    for all of them.

    Args:
        relation: which query attends to which key; or a list of relations, one for each kind of layer, that
            share a split of the tokens: ``shard[i]`` is that of the i-th.
        length: tokens of all ranks; or (q_len, k_len). Where these are equal, keys are split as queries are;
            where not, evenly.
        mesh: a DeviceMesh of one dimension, a ProcessGroup, or None for the default group. A number of ranks
            makes the plan of one ``rank`` without processes; :meth:`Shard.on` gives it a group.
        *after_keys: the mesh, where ``length`` and what follows it are q_len and k_len.
        split: which rank holds which tokens. "even" cuts the sequence, "zigzag" gives each rank a piece from
            the front and one from the back, "work" balances counted work at equal numbers of tokens. "auto"
            takes the first of these whose busiest rank has at most 1.05 of the mean work. Or a vector: the
            rank of each token, or an order of the tokens to cut evenly. A rank keeps its tokens in the order
            of their positions; names never cut a tile of 128 tokens.
        by: "keys" fetches related keys and values; "heads" exchanges heads for tokens around the attention
            (Ulysses); "auto" takes what sends fewer bytes.
        stages: exchanges that a call is cut into, by groups of key heads: each overlaps with the compute of
            the one before, and memory for fetched keys is that of two of them.
        weights: layers of each relation in a list; None: one each.
        q_start: position of the first query among the keys, or "end".
        batch: batch size, for relations that fit any.
        heads: head count, for relations that fit any.
        whole_tiles: fetch keys of graph edges as whole tiles, which a ``MultiLevel`` score needs, not singly.
        check: compare the relation, the lengths and, when it is used, the tensors' shapes and dtypes across
            ranks, once. All ranks must take part.
        rank: the rank to plan for, if ``mesh`` is a number.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one does not fit; with ``check``, if ranks differ.

    Example:
        >>> import attnbias as ab
        >>> plan = ab.shard(ab.Causal() & ab.Window(before=1023), 131_072, 8, rank=3)
        >>> plan.positions[[0, -1]].tolist()
        [49152, 65535]
        >>> len(plan.part.take)  # keys that it fetches: those of the tiles before its own
        1024
    """
    relations = [relation] if isinstance(relation, Relation) else as_relations(relation)
    if after_keys:
        length, mesh = (length, mesh), after_keys[0]  # type: ignore[assignment]  # checked next
    q_len, k_len = _as_lengths(length)
    ranks = find_ranks(mesh, rank)
    if by not in ("keys", "heads", "auto"):
        raise ValueError(f"by: wanted 'keys', 'heads' or 'auto', got {by!r}")
    place = Place(q_len, k_len, resolve_start(q_start, q_len, k_len), batch, heads)
    plans = make_plans(
        relations,
        place,
        ranks.size,
        split=_as_split(split),
        weights=_as_weights(weights, len(relations)),
        whole_tiles=as_flag("whole_tiles", whole_tiles),
    )
    made = Shard(tuple(plans), ranks, by, as_count("stages", stages, 1), as_flag("check", check))
    if check:
        made.compare()
    return made


def _as_lengths(length: object) -> tuple[int, int]:
    if isinstance(length, list | tuple):
        if len(length) != 2:
            raise ValueError(f"length: wanted a number of tokens or (q_len, k_len), got {length!r}")
        return as_count("q_len", length[0]), as_count("k_len", length[1])
    return (as_count("length", length),) * 2


def _as_split(split: object) -> Name | Ints:
    if isinstance(split, str):
        for name in NAMES:
            if name == split:
                return name
        raise ValueError(f"split: wanted one of {', '.join(map(repr, NAMES))} or a vector, got {split!r}")
    vector: Ints = as_indices("split", split, (1,)).cpu().numpy()
    return vector


def _as_weights(weights: object, count: int) -> NDArray[np.float64] | None:
    if weights is None:
        return None
    try:
        numbers = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"weights: wanted a number for each relation, got {weights!r}") from None
    if numbers.shape != (count,):
        raise ValueError(f"weights: wanted {count} numbers, one for each relation, got {weights!r}")
    if not (np.isfinite(numbers).all() and (numbers >= 0).all() and numbers.any()):
        raise ValueError(f"weights: wanted numbers of at least 0, not all 0, got {weights!r}")
    return numbers

"""Attention over triples: a query attends to pairs of keys (2-simplicial attention).

Clift et al., "Logic and the 2-simplicial transformer"; Roy et al., "Fast and simplex". It takes two calls of
``attention``. For one second key k, the scores of query i are those of the query ``q_i * k2_k`` among the
first keys. So the pairs (i, k) are the rows of a first attention. In a second one each query attends to its
own rows, whose scores are the log-sum-exps of the first.
"""

from __future__ import annotations

import itertools
from functools import lru_cache, reduce
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from .arguments import as_count, as_flag
from .attention import attention
from .layouts.layout import Layout
from .op.library import is_autocast
from .op.problem import Problem
from .op.words import describe
from .relations import PerBatch, PerHead, Ranges, Relation
from .relations.picked import Picked
from .relations.portion import portion_of
from .scores.terms import KeyBias
from .sets.intervals import Ints

# Bytes of one tensor of rows, where the caller leaves the number of pairs open. Rows that backward needs are
# rather kept than computed again; other rows are faster on a CPU while they fit into its cache.
KEPT_BYTES, PASSING_BYTES = 1 << 26, 1 << 21


class Part(NamedTuple):
    """Some queries, and their pairs with second keys as rows, each query's one after another.

    Tables are [b, h, rows]; b and h are 1 where the second relation tells no batches or heads apart.
    """

    query: Tensor  # the query of each row
    other: Tensor  # its second key
    related: Relation  # rows to first keys
    own: Ranges  # queries to their rows


@overload
def simplicial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key2: Tensor,
    value2: Tensor,
    first: Relation,
    second: Relation,
    between: Relation | None = ...,
    *,
    scale: float | None = ...,
    q_start: int | Literal["end"] = ...,
    pairs_at_once: int | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def simplicial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key2: Tensor,
    value2: Tensor,
    first: Relation,
    second: Relation,
    between: Relation | None = ...,
    *,
    scale: float | None = ...,
    q_start: int | Literal["end"] = ...,
    pairs_at_once: int | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def simplicial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key2: Tensor,
    value2: Tensor,
    first: Relation,
    second: Relation,
    between: Relation | None = None,
    *,
    scale: float | None = None,
    q_start: int | Literal["end"] = 0,
    pairs_at_once: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from each query to pairs of keys, and compute only the related triples.

    A triple (i, j, k) is related if ``first`` relates query i to key j, ``second`` query i to second key k,
    and ``between`` key j to second key k. It counts once, even where a graph lists an edge twice. Over the
    related triples of query i::

        score[j, k] = scale * (query[i] * key[j] * key2[k]).sum()
        lse[i] = logsumexp(score)                                    # one softmax over all (j, k)
        out[i] = sum of exp(score[j, k] - lse[i]) * value[j] * value2[k]

    A query without a triple gets out 0, lse -inf and gradients 0. It can be differentiated once. It runs in
    autocast and, with a break of the graph where the rows are listed, in ``torch.compile``.

    Each pair (i, k) of ``second`` becomes a row of D and E numbers per head, so the relation with fewer pairs
    should be the second. ``pairs_at_once`` bounds the rows in memory: if there are more, they are computed in
    parts, and backward computes each part again instead of keeping its rows.

    Args:
        query: [B, H, Q, D] or [H, Q, D].
        key: [B, Hk, K, D] or [Hk, K, D]; query head h reads key head ``h // (H // Hk)``.
        value: [B, Hk, K, E] or [Hk, K, E].
        key2: [B, Hk2, K2, D] or [Hk2, K2, D]; Hk2 and K2 may differ from Hk and K.
        value2: [B, Hk2, K2, E] or [Hk2, K2, E].
        first: which query attends to which key.
        second: which query attends to which second key.
        between: which key goes with which second key, as relation of keys to second keys; None is all.
        scale: factor of the scores; None is D**-0.5.
        q_start: position of the first query among the keys and among the second keys; "end" puts the last
            query at the last key.
        pairs_at_once: most pairs (i, k) of a part, though a query's own stay together; None allows 64 MiB for
            each of about ten tensors of rows.
        return_lse: return the logarithm of each softmax sum, too.

    Returns:
        out [B, H, Q, E] (or [H, Q, E]); with ``return_lse`` a tuple of it and lse [B, H, Q], float32 (float64
        for float64).

    Raises:
        TypeError: if an argument is of the wrong kind or dtype.
        ValueError: if shapes, devices, numbers or lengths do not fit.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> q, k, v, k2, v2 = torch.randn(5, 1, 2, 10, 8)
        >>> ab.simplicial_attention(q, k, v, k2, v2, ab.Window(before=3), ab.Window(before=1)).shape
        torch.Size([1, 2, 10, 8])
        >>> edges = ab.Graph([[0, 0, 1], [1, 2, 2]], num_nodes=3)  # 0 -> 1, 0 -> 2, 1 -> 2
        >>> ones = torch.ones(5, 1, 3, 8)
        >>> _, lse = ab.simplicial_attention(*ones, edges, edges, edges, scale=0, return_lse=True)
        >>> lse.exp()  # triangles: token 2 has the pair j = 1, k = 0
        tensor([[0., 0., 1.]])
    """
    for name, relation in (("first", first), ("second", second), ("between", between)):
        if not isinstance(relation, Relation) and (relation is not None or name != "between"):
            raise TypeError(f"{name}: wanted a Relation, got {describe(relation)}")
    if isinstance(query, Tensor) and is_autocast(query.device.type):
        query, key, value, key2, value2 = _widened(query, key, value, key2, value2)
    names = {"key": "key2", "value": "value2", "relation": "second"}
    one = _checked({"relation": "first"}, query, key, value, first, scale=scale, q_start=q_start)
    two = _checked(names, query, key2, value2, second, q_start=one.q_start)
    B, H, Q, D = one.query.shape
    K, K2, E = one.key.shape[2], two.key.shape[2], one.value.shape[3]
    if two.value.shape[3] != E:
        raise ValueError(f"value2: wanted the value's size E, {E}, got {two.value.shape[3]}")
    if between is not None:
        try:
            between.check(K, K2, batch=B, heads=H)
        except ValueError as error:
            raise ValueError(_renamed(error, {"relation": "between"})) from None
    tensors = one.query, one.key, one.value, two.key, two.value
    is_kept = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if pairs_at_once is None:
        room = PASSING_BYTES if query.device.type == "cpu" and not is_kept else KEPT_BYTES
        pairs_at_once = max(1, room // max(1, B * H * max(D, E) * query.element_size()))
    at_once = as_count("pairs_at_once", pairs_at_once, 1)
    # NumPy lists the rows: a break in a compiled graph, not code to trace.
    make = torch.compiler.disable(_make_parts) if torch.compiler.is_compiling() else _make_parts
    parts = make(first, second, between, Q, K2, one.q_start, (B, H), at_once)
    run = _attend_again if is_kept and len(parts) > 1 else _attend
    results = [run(part, one.scale, *tensors) for part in parts]
    out, lse = (torch.cat(each, 2) for each in zip(*results, strict=True))
    if one.squeeze:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if as_flag("return_lse", return_lse) else out


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the widest of their dtypes, as autocast does for products; ``attention`` then narrows them."""
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors):
        return tensors
    widest = reduce(torch.promote_types, (x.dtype for x in tensors))
    return tuple(x.to(widest) for x in tensors)


def _checked(names: dict[str, str], *args: Any, **options: Any) -> Problem:
    """Return the checked arguments of one attention; its errors have our names for them."""
    try:
        return Problem(*args, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(_renamed(error, names)) from None


def _renamed(error: Exception, names: dict[str, str]) -> str:
    name, colon, words = str(error).partition(":")
    return names.get(name, name) + colon + (words.replace("the key's", "key2's") if "key" in names else words)


# -- which rows ------------------------------------------------------------------------------------

Rows = tuple[Ints, Ints, Ints]  # of one batch and head: queries [n], second keys [n], pointers [Q + 1]


@lru_cache(maxsize=8)  # the relations of the layers and passes of a step
def _make_parts(
    first: Relation,
    second: Relation,
    between: Relation | None,
    q_len: int,
    k_len: int,
    q_start: int,
    sizes: tuple[int, int],
    at_once: int,
) -> list[Part]:
    """List the pairs of the second relation, and cut the queries into parts."""
    batch, heads = sizes
    layout = Layout.build(second, q_len, k_len, q_start=q_start, form="edges", batch=batch, heads=heads)
    listed = [_list_pairs(layout, g) for g in range(layout.groups)]
    most = np.max([np.diff(ptr) for *_, ptr in listed], 0)  # [Q]
    upto = np.append(0, most.cumsum())
    cuts = [0]
    while cuts[-1] < q_len:
        stop = int(np.searchsorted(upto, upto[cuts[-1]] + at_once, side="right")) - 1
        cuts.append(max(stop, cuts[-1] + 1))
    pairs = [[listed[g] for g in row] for row in layout.group.tolist()]
    with torch.inference_mode(False):  # what is kept is used in training, too
        return [
            _make_part(pairs, slice(*cut), first, between, q_start, sizes)
            for cut in itertools.pairwise(cuts if q_len else [0, 0])
        ]


def _list_pairs(layout: Layout, group: int) -> Rows:
    """Return the pairs of one group, each once."""
    q_len, k_len = layout.q_len, max(layout.k_len, 1)
    ptr = np.zeros(q_len + 1, np.int64)
    if layout.edges:
        ptr = layout.edge_ptr.numpy().astype(np.int64)[group * q_len : (group + 1) * q_len + 1]
    key = layout.edge_key.numpy().astype(np.int64)[ptr[0] : ptr[-1]]
    query, key = np.divmod(np.unique(np.repeat(np.arange(q_len), np.diff(ptr)) * k_len + key), k_len)
    return query, key, np.searchsorted(query, np.arange(q_len + 1))


def _make_part(
    pairs: list[list[Rows]],
    queries: slice,
    first: Relation,
    between: Relation | None,
    q_start: int,
    sizes: tuple[int, int],
) -> Part:
    """Make the rows of some queries from the pairs of all, by batch and head."""
    (batch, heads), shape = sizes, (len(pairs), len(pairs[0]))
    rows = [[slice(ptr[queries.start], ptr[queries.stop]) for *_, ptr in each] for each in pairs]
    longest = max(one.stop - one.start for each in rows for one in each)
    query, other = np.full((2, *shape, longest), -1)
    begins, ends = np.zeros((2, *shape, queries.stop - queries.start), np.int64)
    related: list[Relation] = []
    for b, h in np.ndindex(shape):
        mine, (of, key, ptr) = rows[b][h], pairs[b][h]
        query[b, h, : mine.stop - mine.start], other[b, h, : mine.stop - mine.start] = of[mine], key[mine]
        begins[b, h], ends[b, h] = (ptr[queries.start + i : queries.stop + i] - mine.start for i in (0, 1))
        some = (b, 1 if shape[0] > 1 else batch, h, 1 if shape[1] > 1 else heads)
        among: Relation = Picked(portion_of(first, *some), query[b, h], q_start)
        if between is not None:
            among &= Picked(portion_of(between, *some).T, other[b, h])
        related.append(among)
    by_head = [related[i : i + shape[1]] for i in range(0, len(related), shape[1])]
    by_batch = [PerHead(each) if shape[1] > 1 else each[0] for each in by_head]
    return Part(
        torch.from_numpy(query.clip(0)),
        torch.from_numpy(other.clip(0)),
        PerBatch(by_batch) if shape[0] > 1 else by_batch[0],
        Ranges(begins[..., None], ends[..., None]),
    )


# -- what is computed ------------------------------------------------------------------------------


def _attend_again(part: Part, *given: Any) -> tuple[Tensor, Tensor]:
    """Attend, and keep nothing for backward but the inputs."""
    from torch.utils.checkpoint import checkpoint

    result: tuple[Tensor, Tensor] = checkpoint(
        _attend, part, *given, use_reentrant=False, preserve_rng_state=False
    )
    return result


def _attend(
    part: Part, scale: float, query: Tensor, key: Tensor, value: Tensor, key2: Tensor, value2: Tensor
) -> tuple[Tensor, Tensor]:
    """Return out and lse of the queries of a part."""
    heads = query.shape[1]
    row_query = _pick(query, part.query, heads) * _pick(key2, part.other, heads)  # [B, H, rows, D]
    out, lse = attention(row_query, key, value, part.related, scale=scale, return_lse=True)
    row_value = out * _pick(value2, part.other, heads)  # [B, H, rows, E]
    # The scores of the second attention are its term alone.
    none, own = row_value.new_zeros(*row_value.shape[:3], 1), part.own
    ours = none.new_zeros(*none.shape[:2], own.start.shape[2], 1)  # [B, H, queries, 1]
    return attention(ours, none, row_value, own, terms=[KeyBias(lse)], return_lse=True)


def _pick(x: Tensor, rows: Tensor, heads: int) -> Tensor:
    """Return rows [b, h, n] of each batch and head of x [B, Hx, L, D]: [B, heads, n, D]."""
    batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
    head = torch.arange(heads, device=x.device)[:, None] // (heads // x.shape[1])
    return x[batch, head, rows.to(x.device)]

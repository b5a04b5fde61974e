"""Attention on DTensors: each rank computes its batches, its heads or its tokens.

Every dimension of the mesh has one role, which the placements of query, key and value tell. Where it shards
batches or heads, a rank needs nothing of others: it takes its part of the relation, terms and sink, which are
given for the whole. Where it shards the sequence, a :class:`Shard` is made, once for a relation and length.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor import Shard as Sharded

from ..backends.places import Places
from ..layouts.layout import Layout
from ..op import dispatch
from ..op.problem import Problem
from ..op.run import attend as run
from ..relations import Full
from ..relations.portion import portion_of
from ..relations.relation import Relation, resolve_start
from ..scores.heads import score_of_heads, terms_of_batches, terms_of_heads
from ..scores.multilevel import MultiLevel
from ..scores.terms import Term
from ..sets.intervals import ceil_div
from .attend import attend
from .cache import cached_shard
from .shard import Shard
from .split import TILE

Role = Literal["whole", "batch", "heads", "sequence"]
AXES = ("batch", "heads", "sequence", "features")


class Span(NamedTuple):
    """What a rank has of one dimension."""

    first: int
    size: int
    total: int

    @property
    def stop(self) -> int:
        """One more than the last."""
        return self.first + self.size

    @property
    def is_whole(self) -> bool:
        """Whether it has all."""
        return self.size == self.total


class Mine(NamedTuple):
    """What this rank has of a call."""

    mesh: DeviceMesh
    roles: list[Role]  # of each dimension of the mesh
    batch: Span
    heads: Span
    lengths: tuple[int, int]  # queries and keys of the whole

    @property
    def sums(self) -> list[Placement]:
        """Placements of the gradient of what every rank has whole: a sum where ranks compute parts."""
        return [Replicate() if role == "whole" else Partial() for role in self.roles]

    def have_whole(self, x: Any) -> Any:
        """Return a tensor of the whole as a plain one whose gradients are added up over the mesh."""
        if not isinstance(x, Tensor):
            return x
        everywhere = [Replicate()] * self.mesh.ndim
        if not isinstance(x, DTensor):
            if not x.requires_grad:
                return x
            x = DTensor.from_local(x, self.mesh, everywhere, run_check=False)
        elif x.device_mesh != self.mesh:
            raise ValueError(f"query: wanted DTensors on one mesh, got {self.mesh} and {x.device_mesh}")
        return x.redistribute(placements=everywhere).to_local(grad_placements=self.sums)

    def have_fields(self, given: Any) -> Any:
        """Return a term or score whose tensors are plain ones."""
        fields = getattr(given, "__dict__", {})
        tensors = {name: x for name, x in fields.items() if isinstance(x, Tensor)}
        if not any(isinstance(x, DTensor) or x.requires_grad for x in tensors.values()):
            return given
        made = copy.copy(given)
        for name, x in tensors.items():
            object.__setattr__(made, name, self.have_whole(x))  # terms are frozen
        return made


def attend_dtensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Any = None,
    *,
    return_lse: bool = False,
    return_max: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Any:
    """Run ``attention`` on DTensors; see there for the arguments.

    Raises:
        TypeError: if not all three are DTensors.
        ValueError: if their placements do not fit each other or the options.
    """
    query, key, value = (_settle(name, x, query, key) for name, x in _named(query, key, value))
    mine = _find_mine(query, key, value)
    local = _to_local(query, key, value, mine)
    options = _options_of(options, mine)
    wanted: dict[str, Any] = {"return_lse": return_lse, "return_max": return_max, **options}
    relation = _relation_of(relation, mine, options.get("q_start", 0))
    if "sequence" in mine.roles:
        relation = _find_shard(relation, mine, wanted)
    if isinstance(relation, Shard) and relation.ranks.size == 1:
        relation, wanted["q_start"] = relation.relation, relation.plan.place.q_start
    firsts = mine.batch.first, mine.heads.first
    if isinstance(relation, Shard):
        places: dict[str, Any] = {"first_batch": firsts[0], "first_head": firsts[1]}
        results = attend(relation, local[0], local[1], local[2], backend=backend, **places, **wanted)
    else:
        if options.get("dropout_p"):
            wanted["places"] = Places(first_batch=firsts[0], first_head=firsts[1])
        problem = Problem(local[0], local[1], local[2], relation, **wanted)
        problem.draw_seed()
        found = run(problem, dispatch.asked_for(backend))
        asked = (True, return_lse, return_max)
        kept = [x for x, want in zip(found, asked, strict=True) if want and x is not None]
        results = tuple(x.squeeze(0) if problem.squeeze else x for x in kept)
    made = tuple(_wrap(x, query) for x in (results if isinstance(results, tuple) else (results,)))
    return made if return_lse or return_max else made[0]


def _named(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[str, Tensor]]:
    return [("query", query), ("key", key), ("value", value)]


def _settle(name: str, x: Any, query: Any, key: Any) -> DTensor:
    """Return a DTensor whose partial sums are added up."""
    mesh = next(each.device_mesh for each in (query, key, x) if isinstance(each, DTensor))
    if not isinstance(x, DTensor):
        got = f"a plain tensor {list(x.shape)}" if isinstance(x, Tensor) else f"{type(x).__name__} {x!r}"
        raise TypeError(
            f"{name}: wanted a DTensor, as others are, got {got}; use DTensor.from_local or to_local"
        )
    if x.device_mesh != mesh:
        raise ValueError(f"{name}: wanted a DTensor on the query's mesh, {mesh}, got {x.device_mesh}")
    if not any(place.is_partial() for place in x.placements):
        return x
    settled: DTensor = x.redistribute(
        placements=[Replicate() if place.is_partial() else place for place in x.placements]
    )
    return settled


# -- what this rank has -----------------------------------------------------------------------------------


def _find_mine(query: DTensor, key: DTensor, value: DTensor) -> Mine:
    """Read the placements."""
    if query.dim() not in (3, 4) or not query.dim() == key.dim() == value.dim():
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ValueError(
            f"query: wanted [B, H, Q, D] or [H, Q, D], key and value alike, got {query.dim()} dimensions, "
            f"{shapes}"
        )
    mesh = query.device_mesh
    roles = [_find_role(number, query, key, value) for number in range(mesh.ndim)]
    if roles.count("sequence") > 1:
        raise ValueError(
            f"query: wanted the sequence sharded over one dimension of the mesh, got {query.placements}; "
            "flatten those dimensions into one"
        )
    whole = Span(0, 1, 1)
    return Mine(
        mesh,
        roles,
        whole if query.dim() == 3 else _find_span(query, 0),
        _find_span(query, query.dim() - 3),
        (query.shape[-2], key.shape[-2]),
    )


def _find_role(number: int, query: DTensor, key: DTensor, value: DTensor) -> Role:
    """Return what a dimension of the mesh shards."""
    if query.device_mesh.size(number) == 1:
        return "whole"
    names = [_axis_of(x, number) for x in (query, key, value)]
    match names:
        case ["whole", "whole", "whole"]:
            return "whole"
        case ["batch", "batch", "batch"]:
            return "batch"
        case ["heads", "heads", "heads"] | ["heads", "whole", "whole"]:
            return "heads"
        case ["sequence", "sequence", "sequence"]:
            return "sequence"
    got = ", ".join(str(x.placements[number]) for x in (query, key, value))
    raise ValueError(
        "query: wanted query, key and value all replicated or all sharded by batch, by heads or by sequence, "
        "or queries sharded by heads and keys and values replicated; "
        f"got {got} on dimension {number} of the mesh; use redistribute, or ab.shard with local tensors"
    )


def _axis_of(x: DTensor, number: int) -> str:
    place = x.placements[number]
    if place.is_replicate():
        return "whole"
    if type(place) is not Sharded:
        return str(place)
    return AXES[place.dim % x.dim() + 4 - x.dim()]


def _find_span(x: DTensor, dim: int) -> Span:
    """Return what this rank has of a dimension."""
    coordinate = x.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("query: wanted DTensors on a mesh that this rank is in, got another")
    numbers, spans = _find_spans(x, dim)
    mine = spans[tuple(coordinate[number] for number in numbers)]
    local = x.to_local().shape[dim]
    if local != mine.size:
        raise ValueError(
            f"query: wanted DTensors in equal chunks, {mine.size} of {mine.total} here, got {local}; "
            "for other parts of the sequence use ab.shard with local tensors"
        )
    return mine


def _find_spans(x: DTensor, dim: int) -> tuple[list[int], dict[tuple[int, ...], Span]]:
    """Return the mesh dimensions that shard a dimension, and what each rank has, by coordinate there."""
    numbers = [
        number
        for number, place in enumerate(x.placements)
        if type(place) is Sharded and place.dim % x.dim() == dim
    ]
    return numbers, _cut(x.shape[dim], tuple(x.device_mesh.size(number) for number in numbers))


@lru_cache(maxsize=256)
def _cut(total: int, sizes: tuple[int, ...]) -> dict[tuple[int, ...], Span]:
    """Cut a dimension by the rule of DTensor: chunks of chunks."""
    spans: dict[tuple[int, ...], Span] = {(): Span(0, total, total)}
    for size in sizes:
        cut: dict[tuple[int, ...], Span] = {}
        for at, (first, length, _) in spans.items():
            chunk = ceil_div(length, size)
            for place in range(size):
                skipped = min(chunk * place, length)
                cut[(*at, place)] = Span(first + skipped, min(chunk, length - skipped), total)
        spans = cut
    return spans


def _to_local(query: DTensor, key: DTensor, value: DTensor, mine: Mine) -> list[Tensor]:
    """Return this rank's tensors, of keys and values the heads that its queries read."""
    H, Hk = query.shape[-3], key.shape[-3]
    if not Hk or H % Hk:
        raise ValueError(f"key: wanted a head count that divides the query's {H}, got {Hk}")
    group, heads = H // Hk, mine.heads
    low, high = heads.first // group, ceil_div(heads.stop, group)
    local = [query.to_local()]
    for name, x in (("key", key), ("value", value)):
        _check_heads(name, x, query, group)
        has = _find_span(x, x.dim() - 3)
        grads = [
            Partial() if role == "heads" and place.is_replicate() else place
            for role, place in zip(mine.roles, x.placements, strict=True)
        ]
        part = x.to_local(grad_placements=grads).narrow(-3, low - has.first, high - low)
        if high - low > 1 and (heads.first % group or heads.stop % group):  # groups are cut: a key head each
            each = torch.arange(heads.first, heads.stop, device=part.device) // group - low
            part = part.index_select(part.dim() - 3, each)
        local.append(part)
    return local


def _check_heads(name: str, x: DTensor, query: DTensor, group: int) -> None:
    """Raise on every rank if one has no query head, or not the key heads that its query heads read."""
    numbers, of_queries = _find_spans(query, query.dim() - 3)
    key_numbers, of_keys = _find_spans(x, x.dim() - 3)
    for at, heads in of_queries.items():
        if not heads.size:
            size = [query.device_mesh.size(number) for number in numbers]
            raise ValueError(f"query: wanted a head on every rank, got {heads.total} heads over {size} ranks")
        has = of_keys[tuple(at[numbers.index(number)] for number in key_numbers if number in numbers)]
        low, high = heads.first // group, ceil_div(heads.stop, group)
        if not has.first <= low < high <= has.stop:
            raise ValueError(
                f"{name}: wanted key heads {low} to {high - 1}, which query heads {heads.first} to "
                f"{heads.stop - 1} read, on one rank, got {has.first} to {has.stop - 1}; "
                "replicate keys and values over that dimension of the mesh"
            )


def _options_of(options: dict[str, Any], mine: Mine) -> dict[str, Any]:
    """Return the options of this rank's batches and heads."""
    made, heads, batch = dict(options), mine.heads, mine.batch
    if isinstance(made.get("sink"), Tensor):
        sink = mine.have_whole(made["sink"])
        # One of another size is left as it is, and refused with the others.
        made["sink"] = sink[heads.first : heads.stop] if sink.shape == (heads.total,) else sink
    if made.get("terms"):
        terms: Sequence[Term] = [mine.have_fields(term) for term in made["terms"]]
        terms = terms if heads.is_whole else terms_of_heads(terms, heads.first, heads.total)
        made["terms"] = terms if batch.is_whole else terms_of_batches(terms, batch.first, batch.total)
    if made.get("score") is not None:
        score = mine.have_fields(made["score"])
        made["score"] = score if heads.is_whole else score_of_heads(score, slice(heads.first, heads.stop))
    return made


def _relation_of(relation: Any, mine: Mine, q_start: Any) -> Any:
    """Return the relation of this rank's batches and heads."""
    heads, batch = mine.heads, mine.batch
    if isinstance(relation, Relation):
        start = resolve_start(q_start, *mine.lengths)
        relation.check(*mine.lengths, start, batch=batch.total, heads=heads.total)
        if not (heads.is_whole and batch.is_whole):
            # A rank without batches computes nothing, on the layout of the first one.
            batches = (batch.first, batch.size) if batch.size else (0, 1)
            return portion_of(relation, *batches, heads.first, heads.size)
    elif isinstance(relation, Layout):
        groups = relation.header.batch, relation.header.heads
        for name, size, span in zip(("batch", "heads"), groups, (batch, heads), strict=True):
            if size > 1 and not span.is_whole:
                raise ValueError(
                    f"relation: wanted a Relation where DTensors are sharded by {name}, "
                    f"got a Layout that has {name} {size}"
                )
    elif isinstance(relation, Shard):
        _check_shard(relation, mine)
    return relation


def _check_shard(relation: Shard, mine: Mine) -> None:
    """Raise if a shard by other processes tells apart batches or heads of which this rank has some."""
    sizes = relation.plan.bound.group.shape
    for name, size, span in zip(("batch", "heads"), sizes, (mine.batch, mine.heads), strict=True):
        if size > 1 and not span.is_whole:
            raise ValueError(
                f"relation: wanted a Shard that is the same for all {name}, of which DTensors have parts, "
                f"got {relation!r}; shard the sequence of the DTensors, too, and give the relation itself"
            )


# -- the sequence --------------------------------------------------------------------------------------------


def _find_shard(relation: Any, mine: Mine, options: dict[str, Any]) -> Shard:
    """Return the shard of a relation over the dimension of the mesh that has the sequence, made once."""
    relation = Full() if relation is None else relation
    if not isinstance(relation, Relation):
        raise TypeError(
            "relation: wanted a Relation or None for DTensors sharded by sequence, "
            f"got {type(relation).__name__}"
        )
    number = mine.roles.index("sequence")
    group, ranks = mine.mesh.get_group(number), mine.mesh.size(number)
    q_len, k_len = mine.lengths
    chunk = ceil_div(q_len, ranks)
    is_leveled = isinstance(options.get("score"), MultiLevel)
    if (options.get("terms") or options.get("dropout_p") or is_leveled) and not relation.listed:
        _check_tiles(q_len, chunk)
    start = options.pop("q_start", 0)
    made = cached_shard(
        *(relation, (q_len, k_len), group),
        split="chunks",
        q_start=start,
        batch=mine.batch.size or 1,
        heads=mine.heads.size,
        whole_tiles=is_leveled,
    )
    has = torch.bincount(torch.arange(k_len) // max(ceil_div(k_len, ranks), 1), minlength=ranks)
    if made.plan.keys.counts.tolist() != has.tolist():  # raised on all ranks alike
        raise ValueError(
            f"key: wanted the query's length, {q_len}, or one that DTensor cuts between tiles of {TILE}, "
            f"got {k_len}; use ab.shard with local tensors"
        )
    return made


def _check_tiles(length: int, chunk: int) -> None:
    """Raise if chunks of the sequence cut tiles, which terms and dropout want whole."""
    if chunk % TILE and chunk < length:
        raise ValueError(
            f"query: terms, dropout and a MultiLevel score want chunks of whole tiles of {TILE} tokens, "
            f"got chunks of {chunk} of {length} tokens; use ab.shard, which cuts so, with local tensors"
        )


# -- results -------------------------------------------------------------------------------------------------


def _wrap(local: Tensor, query: DTensor) -> DTensor:
    """Return a result as a DTensor placed as the query is, in the stride order of the local one."""
    shape = torch.Size((*query.shape[:-1], *local.shape[query.dim() - 1 :]))
    stride, size = [0] * len(shape), 1
    order = sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim))
    for dim in order:
        stride[dim], size = size, size * max(shape[dim], 1)
    return DTensor.from_local(
        local, query.device_mesh, query.placements, run_check=False, shape=shape, stride=tuple(stride)
    )

"""One call of attention on a shard: check this rank's tensors, fetch keys, compute."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..arguments import check_dense
from ..attention import attention
from ..backends.places import Places
from ..op import dispatch
from ..op.library import is_traced
from ..op.problem import LARGEST_ON_EDGES, Problem
from ..op.run import attend as run
from ..relations.listing import count_edges
from ..scores.additive import AdditiveScore
from ..scores.heads import change_inner, score_of_heads, terms_of_heads
from ..scores.multilevel import MultiLevel
from ..scores.terms import EdgeBias, KernelTerm
from .counts import Shape, heads_bytes, keys_bytes
from .exchange import start
from .heads import attend_by_heads
from .ranks import compare
from .traced import exchange

if TYPE_CHECKING:
    from ..layouts.fill import Form
    from .shard import Shard


class Asked(NamedTuple):
    """The wishes of a call, besides its tensors."""

    return_lse: bool
    return_max: bool
    backend: str | None
    options: dict[str, Any]
    first_batch: int = 0  # of the call, in a larger one of which it has some batches and heads
    first_head: int = 0

    @property
    def needs_places(self) -> bool:
        """Whether anything but the relation depends on positions."""
        given = self.options
        is_leveled = isinstance(given.get("score"), MultiLevel)
        return bool(given.get("terms") or given.get("dropout_p") or is_leveled)

    def of_heads(self, first: int, count: int, total: int) -> Asked:
        """Return the same for some of the query heads."""
        if count == total:
            return self
        options, heads = dict(self.options), slice(first, first + count)
        if isinstance(options.get("sink"), Tensor):
            options["sink"] = options["sink"][heads]
        if options.get("terms"):
            options["terms"] = terms_of_heads(options["terms"], first, total)
        options["score"] = score_of_heads(options.get("score"), heads)
        return self._replace(options=options)

    def of_edges(self, shard: Shard) -> Asked:
        """Return the same with biases of this rank's edges, as its layout numbers them.

        A bias for all edges and one for the rank's cannot be mistaken: if they are equally long, they are
        equal.
        """
        terms = self.options.get("terms") or ()
        if not any(isinstance(term, KernelTerm) and term.part == "edge" for term in terms):
            return self
        total = count_edges(shard.relation, "terms: EdgeBias")
        take = partial(_of_edges, edges=shard.edges, total=total)
        made = [change_inner(term, take) if isinstance(term, KernelTerm) else term for term in terms]
        return self._replace(options={**self.options, "terms": made})


def _of_edges(term: KernelTerm, edges: Tensor, total: int) -> KernelTerm:
    """Return the bias of some of all edges; other terms as they are."""
    if not isinstance(term, EdgeBias) or term.edges == len(edges):
        return term
    if term.edges != total:
        raise ValueError(
            f"terms: EdgeBias.bias: wanted {len(edges)} numbers, those of shard.edges, "
            f"or {total}, one per edge of the whole, got {term.edges}"
        )
    return replace(term, bias=term.bias.index_select(0, edges.to(term.bias.device)))


Results = tuple[Tensor, Tensor | None, Tensor | None]  # out, lse, row_max


def attend(
    shard: Shard,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: bool,
    return_max: bool,
    backend: str | None,
    is_fetched: bool = False,
    first_batch: int = 0,
    first_head: int = 0,
    **options: Any,
) -> Any:
    """Run ``attention`` on this rank's queries; see there for the arguments.

    With ``is_fetched``, keys and values are those that its queries need, and nothing is sent.
    The batches and heads may be some of a larger call; ``first_batch`` and ``first_head`` are the first ones.
    """
    plan = shard.plan
    check_dense("query", query)
    if is_traced(query) and shard.ranks.size > 1:
        _check_traced(shard)
    if options.pop("q_start", 0) != 0:
        raise ValueError("q_start: wanted none with a shard; give it to ab.shard(..., q_start=)")
    _check_lengths(shard, query, key, value, is_fetched=is_fetched)
    asked = Asked(return_lse, return_max, backend, options, first_batch, first_head)
    if shard.ranks.size == 1:
        wanted: dict[str, Any] = {"return_lse": return_lse, "return_max": return_max, "backend": backend}
        return attention(query, key, value, plan.relation, q_start=plan.place.q_start, **wanted, **options)
    check_group(shard)
    squeeze = query.dim() == 3
    if squeeze:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    if shard.is_checked and "compared" not in shard.kept:
        shard.kept["compared"] = True
        shape = Shape.of(query, key, value)._asdict()
        compare(shard.ranks, [("dtype", query.dtype), *shape.items(), ("options", sorted(options))])
    way = attend_fetched if is_fetched else attend_by_keys
    if not is_fetched and choose_way(shard, query, key, value) == "heads":
        way = attend_by_heads
    out, lse, row_max = way(shard, query, key, value, asked)
    results = [x for x, want in ((out, True), (lse, return_lse), (row_max, return_max)) if want]
    if squeeze:
        results = [None if x is None else x.squeeze(0) for x in results]
    return tuple(results) if return_lse or return_max else results[0]


def check_group(shard: Shard) -> None:
    """Raise unless the shard's ranks are processes."""
    if shard.ranks.group is None:
        raise ValueError(
            f"relation: wanted a shard on a process group, got a plan for {shard.ranks.size} ranks on paper; "
            "use shard.on(mesh)"
        )


def attend_fetched(shard: Shard, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Results:
    """Compute this rank's rows from the keys and values that they need."""
    asked = asked.of_edges(shard)
    problem = _problem(shard, query, key, value, asked, find_form(shard, query, asked))
    problem.draw_seed()
    return run(problem, dispatch.asked_for(asked.backend))


def choose_way(shard: Shard, query: Tensor, key: Tensor, value: Tensor) -> Literal["keys", "heads"]:
    """Return what is exchanged: with ``by="auto"`` whichever sends fewer bytes, counted over all ranks."""
    if shard.by != "auto":
        return shard.by
    shape = Shape.of(query, key, value)
    by_keys, by_heads = (count(shard.plan, shape).forward.sum() for count in (keys_bytes, heads_bytes))
    return "keys" if by_keys <= by_heads else "heads"


def attend_by_keys(shard: Shard, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Results:
    """Fetch the keys that this rank's queries need, in stages of key heads, and compute its rows."""
    asked = asked.of_edges(shard)
    stages, Hk, H = shard.stages, key.shape[1], query.shape[1]
    if stages > Hk:
        raise ValueError(f"stages: wanted at most the {Hk} key heads, got {stages}")
    form = find_form(shard, query, asked)
    if is_traced(query):
        landed = exchange(key, value, shard.ready(form))
        return run(_problem(shard, query, *landed, asked, form), dispatch.asked_for(asked.backend))
    route, group = shard.route(query.device), shard.ranks.group.group_name
    name = dispatch.asked_for(asked.backend)
    if stages == 1:
        landed = start(key, value, route, group).land()
        problem = _problem(shard, query, *landed, asked, form)
        problem.draw_seed()
        return run(problem, name)
    cuts = [Hk * stage // stages for stage in range(stages + 1)]
    seed: Tensor | None = None
    flights = [start(key[:, : cuts[1]], value[:, : cuts[1]], route, group)]
    results = []
    for stage, (low, high) in enumerate(pairwise(cuts)):
        if stage + 1 < stages:  # the next exchange runs while this stage computes
            after = slice(high, cuts[stage + 2])
            flights.append(start(key[:, after], value[:, after], route, group))
        heads = slice(low * (H // Hk), high * (H // Hk))
        some = asked.of_heads(heads.start, heads.stop - heads.start, H)
        problem = _problem(shard, query[:, heads], *flights.pop(0).land(), some, form, heads)
        if seed is None:
            problem.draw_seed()
            seed = problem.seed
        problem.seed = seed
        results.append(run(problem, name))
    out, lse, row_max = ([x for x in each if x is not None] for each in zip(*results, strict=True))
    joined = (torch.cat(each, 1) if each else None for each in (lse, row_max))
    return torch.cat(out, 1), *joined  # type: ignore[return-value]


def _problem(
    shard: Shard,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: Asked,
    form: Form,
    heads: slice = slice(None),
) -> Problem:
    """Return this rank's rows of some heads, and the keys that they need, as a problem."""
    place, places = shard.plan.place, None
    score = asked.options.get("score")
    levels = score if isinstance(score, MultiLevel) else None
    if is_traced(query):
        ready = shard.ready(form)
        layout, positions = ready.layout, ready.positions
    else:
        layout, positions = shard.layout(query.device, form, heads, levels), shard.places(query.device)
    if asked.needs_places:
        first = asked.first_head + (0 if heads.start is None else heads.start)
        places = Places(*positions, place.q_len, place.k_len, place.q_start, asked.first_batch, first)
    return Problem(
        *(query, key, value, layout),
        return_lse=asked.return_lse,
        return_max=asked.return_max,
        places=places,
        q_start=place.q_start,
        **asked.options,
    )


def find_form(shard: Shard, query: Tensor, asked: Asked) -> Form:
    """Return the form of the layout, as :class:`Problem` finds it for a relation.

    Raises:
        ValueError: if options that depend on positions do not go with the split or the keys.
    """
    plan, options = shard.plan, asked.options
    score, terms = options.get("score"), options.get("terms") or ()
    by_edge = any(isinstance(term, KernelTerm) and term.part == "edge" for term in terms)
    if isinstance(score, AdditiveScore) or by_edge:
        return "edges"
    has_singles = len(plan.needs.key) > 0
    if asked.needs_places and (has_singles or not plan.is_tiled):
        if isinstance(score, MultiLevel):
            raise ValueError(
                "score: a MultiLevel wants whole tiles of tokens and keys; "
                "make the shard with a split by name and whole_tiles=True"
            )
        if not plan.is_tiled and not shard.relation.listed:
            raise ValueError(
                f"split: terms and dropout want whole tiles of tokens unless the relation is a graph, got "
                f"a vector that cuts them, for {shard.relation!r}; use split='auto'"
            )
        return "edges"
    return "tiles" if query.shape[-1] > LARGEST_ON_EDGES and not shard.relation.listed else "auto"


def _check_traced(shard: Shard) -> None:
    """Raise unless a traced program can run the shard: nothing is planned or laid out in it."""
    if shard.by != "keys":
        raise NotImplementedError(f"by: wanted 'keys' in a traced program, got {shard.by!r}")
    if "prepared" not in shard.kept:
        raise ValueError("relation: wanted shard.prepare(device) before tracing, got a new shard")


def _check_lengths(shard: Shard, query: Tensor, key: Tensor, value: Tensor, *, is_fetched: bool) -> None:
    """Raise unless the tensors hold this rank's tokens, or the keys that it fetched."""
    rank = shard.ranks.rank
    of_queries, of_keys = shard.held("queries"), shard.held("keys")
    if is_fetched and shard.ranks.size > 1:
        of_keys = len(shard.part.keys), of_keys[0]
    tensors = (("query", query, of_queries), ("key", key, of_keys), ("value", value, of_keys))
    for name, x, (wanted, before) in tensors:
        check_dense(name, x)
        if x.dim() in (3, 4) and x.shape[-2] != wanted:
            is_late = is_fetched and name != "query"
            what = f"fetched tokens of rank {rank}" if is_late else f"tokens of rank {rank}, of {before}"
            hint = f"; use shard.{'fetch' if is_late else 'scatter'}" if x.shape[-2] == before else ""
            raise ValueError(
                f"{name}: wanted the {wanted} {what}, got {x.shape[-2]} in {list(x.shape)}{hint}"
            )

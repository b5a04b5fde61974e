"""The value that stands where a relation stands: a relation over the ranks of a group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments import as_count
from ..layouts.build import find_tile, lay_out_bound
from ..layouts.layout import Layout
from ..layouts.levels import TileStarts, add_levels
from ..relations.listing import count_edges
from ..relations.relation import Relation
from ..scores.multilevel import MultiLevel
from ..sets.bound import Bound
from ..sets.predicate import Predicate
from ..sets.select import select
from .attend import Asked, attend, find_form
from .counts import Shape
from .exchange import Route
from .gather import gather
from .graphs import Fetched, fetch, local_graph
from .plan import Part, Plan, make_plans
from .ranks import Ranks, compare, digest, find_ranks
from .report import Report, make_report
from .split import Split
from .traced import Lists, Ready

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..layouts.fill import Form
    from ..relations.graph import Graph

By = Literal["keys", "heads", "auto"]
Side = Literal["queries", "keys"]


class Order(NamedTuple):
    """All tokens by rank."""

    gather: Tensor  # token of each place
    restore: Tensor  # place of each token


@dataclass(frozen=True, eq=False, repr=False)
class Shard:
    """A relation over the ranks of a group: which tokens this rank holds, and which keys it fetches.

    Made by :func:`attnbias.shard`. ``attention`` takes it in place of a relation, with this rank's queries,
    keys and values. A shard of several relations is a sequence of shards with one split of the tokens.
    """

    plans: tuple[Plan, ...]
    ranks: Ranks
    by: By
    stages: int
    is_checked: bool
    kept: dict[Any, Any] = field(default_factory=dict)  # made of the plan when it is first used

    # -- what it is -----------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the only relation."""
        if len(self.plans) != 1:
            raise ValueError(
                f"relation: wanted one of the shard's {len(self.plans)} relations, such as shard[0], got all"
            )
        return self.plans[0]

    @property
    def relation(self) -> Relation:
        """The relation of the whole."""
        return self.plan.relation

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, number: int) -> Shard:
        """Return the shard of one relation, by its place in the list."""
        kept = self.kept.setdefault(range(len(self.plans))[number], {})
        return replace(self, plans=(self.plans[number],), kept=kept)

    def __iter__(self) -> Iterator[Shard]:
        return (self[number] for number in range(len(self.plans)))

    def on(self, mesh: DeviceMesh | ProcessGroup | None = None) -> Shard:
        """Return the same shard on a group: a plan on paper, such as a data loader's, becomes one to run."""
        ranks = find_ranks(mesh, None)
        if ranks[:2] != self.ranks[:2]:
            mine = f"rank {self.ranks.rank} of {self.ranks.size}"
            raise ValueError(
                f"mesh: wanted {mine}, for which this shard is made, got rank {ranks.rank} of {ranks.size}"
            )
        return replace(self, ranks=ranks)

    def with_relation(self, relation: Relation) -> Shard:
        """Return the shard of another relation over the same tokens, such as the graph with self-loops."""
        as_relations([relation])
        owner, place = self.plans[0].queries.owner, self.plans[0].place
        made = make_plans([relation], place, self.ranks.size, split=owner)
        return replace(self, plans=tuple(made), kept={})

    def compare(self) -> None:
        """Raise on every rank unless all hold the same relation, lengths and split; all must take part."""
        place = self.plans[0].place
        compare(
            self.ranks,
            [
                ("length", (place.q_len, place.k_len)),
                ("q_start", place.q_start),
                ("by", self.by),
                ("stages", self.stages),
                *(("relation", f"{plan.relation!r} ({digest(plan.bound)[:12]})") for plan in self.plans),
                ("split", hashlib.sha256(self.plans[0].queries.owner.tobytes()).hexdigest()[:12]),
            ],
        )

    def __repr__(self) -> str:
        place, split = self.plans[0].place, self.plans[0].queries.name
        relations = ", ".join(repr(plan.relation) for plan in self.plans)
        return (
            f"Shard({relations}, q_len={place.q_len}, k_len={place.k_len}, q_start={place.q_start}, "
            f"split={split!r}, by={self.by!r}, rank={self.ranks.rank} of {self.ranks.size})"
        )

    @property
    def positions(self) -> Tensor:
        """Positions of this rank's queries, int64 [rows], increasing: for rotary embeddings and the like."""
        plan = self.plans[0]
        return torch.from_numpy(plan.queries.tokens(self.ranks.rank) + plan.place.q_start)

    @property
    def key_positions(self) -> Tensor:
        """Positions of the keys that this rank holds, int64; those of its queries unless lengths differ."""
        return torch.from_numpy(self.plans[0].keys.tokens(self.ranks.rank))

    def explain(
        self,
        heads: int = 32,
        key_heads: int = 8,
        dim: int | tuple[int, int] = 128,
        dtype: torch.dtype = torch.bfloat16,
        batch: int = 1,
    ) -> Report:
        """Count rows, pairs and bytes by rank, beside other ways to exchange; nothing is run.

        Args:
            heads: query heads.
            key_heads: key heads.
            dim: the head size, or (D, E).
            dtype: that of the tensors.
            batch: batch size.

        Example:
            >>> import attnbias as ab
            >>> report = ab.shard(ab.Window(before=1023), 131_072, 8).explain()
            >>> {way.name: round(way.share, 4) for way in report.ways}
            {'keys': 0.0078, 'heads': 0.625, 'all-gather': 1.0, 'ring': 1.0}
        """
        D, E = (dim, dim) if isinstance(dim, int) else dim
        width = torch.empty((), dtype=dtype).element_size()
        sizes = (as_count("heads", heads, 1), as_count("key_heads", key_heads, 1))
        if sizes[0] % sizes[1]:
            raise ValueError(f"key_heads: wanted a number that divides the {heads} heads, got {key_heads}")
        shape = Shape(
            as_count("batch", batch, 1), *sizes, as_count("dim", D, 1), as_count("dim", E, 1), width
        )
        return make_report(self.plan, shape)

    @property
    def halo(self) -> Tensor:
        """Positions of the keys that this rank fetches from others, int64, increasing."""
        return torch.from_numpy(np.sort(self.part.keys[self.part.take]))

    @property
    def edges(self) -> Tensor:
        """Numbers of the edges into this rank's queries, int64, increasing.

        They are the caller's, as in ``edge_index`` or the flattened ``index`` of neighbours. So
        ``edge_attr[shard.edges]`` belongs to this rank, and so does ``EdgeBias(bias[shard.edges])``.
        """
        if "edges" not in self.kept:
            count_edges(self.relation, "edges")  # raises if they have no numbers
            self.kept["edges"] = torch.from_numpy(self.plan.edges_of(self.ranks.rank))
        edges: Tensor = self.kept["edges"]
        return edges

    # -- moving whole tensors ------------------------------------------------------------------------

    def scatter(self, whole: Tensor, dim: int, *, of: Side = "queries") -> Tensor:
        """Return this rank's part of a tensor that every rank holds; nothing is sent.

        Args:
            whole: tokens, ids, labels, positions, keys of all ranks along a dimension.
            dim: the dimension.
            of: "queries" or "keys"; they differ only where their numbers do.
        """
        split = self._side(of)
        if whole.shape[dim] != split.length:
            raise ValueError(
                f"whole: wanted {split.length} {of} along dimension {dim}, got {list(whole.shape)}"
            )
        return whole.index_select(dim, self._tokens(of, whole.device))

    def gather(self, part: Tensor, dim: int, *, of: Side = "queries") -> Tensor:
        """Return the tensor of all ranks in the caller's order, on every rank; differentiable.

        The gradient of a part is the sum of what all ranks ask for, as if the loss were the sum of the
        losses of all ranks. If each rank computes the same loss of the whole, divide by their number.

        Args:
            part: this rank's, with its tokens along a dimension.
            dim: the dimension.
            of: "queries" or "keys".
        """
        split = self._side(of)
        mine, _ = self.held(of)
        if part.shape[dim] != mine:
            raise ValueError(
                f"part: wanted this rank's {mine} {of} along dimension {dim}, got {list(part.shape)}"
            )
        return gather(part, dim, split, self.ranks)

    def fetch(self, rows: Tensor, dim: int = 0) -> Tensor:
        """Return the rows of all keys that this rank's queries need, its own and its halo's; differentiable.

        They are in the order of their positions. ``attention`` takes such keys and values with
        :attr:`fetched` in place of the shard, and any other layer over a graph with :attr:`graph`. All ranks
        must take part.

        Args:
            rows: this rank's rows of a tensor, with its keys along a dimension.
            dim: the dimension.
        """
        return fetch(self, rows, dim)

    @property
    def fetched(self) -> Fetched:
        """The same relation between this rank's queries and the keys that :meth:`fetch` brought."""
        return Fetched(self)

    @property
    def graph(self) -> Graph:
        """This rank's edges of a ``Graph``: from the rows that :meth:`fetch` returns to its own nodes."""
        if "graph" not in self.kept:
            self.kept["graph"] = local_graph(self)
        graph: Graph = self.kept["graph"]
        return graph

    def _side(self, of: Side) -> Split:
        if of not in ("queries", "keys"):
            raise ValueError(f"of: wanted 'queries' or 'keys', got {of!r}")
        return self.plans[0].queries if of == "queries" else self.plans[0].keys

    def _tokens(self, of: Side, device: torch.device) -> Tensor:
        name = ("tokens", of, device)
        if name not in self.kept:
            self.kept[name] = torch.from_numpy(self._side(of).tokens(self.ranks.rank)).to(device)
        tokens: Tensor = self.kept[name]
        return tokens

    def reduce_max(self, largest: Tensor) -> Tensor:
        """Return the largest of all ranks; ``max_logit`` asks."""
        if self.ranks.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.ranks.group)
        return largest

    # -- what attention reads ------------------------------------------------------------------------

    def attend_sharded(self, query: Tensor, key: Tensor, value: Tensor, /, **given: Any) -> Any:
        """Run ``attention``, which passes a shard its arguments."""
        return attend(self, query, key, value, **given)

    @property
    def part(self) -> Part:
        """What this rank does."""
        if "part" not in self.kept:
            self.kept["part"] = self.plan.of(self.ranks.rank)
        part: Part = self.kept["part"]
        return part

    def route(self, device: torch.device) -> Route:
        """Return the lists of the exchange on a device, made once."""
        name = ("route", device)
        if name not in self.kept:
            is_alone = not self.plan.received.any()
            self.kept[name] = Route.of(self.part, self.held("keys")[0], is_alone=is_alone, device=device)
        route: Route = self.kept[name]
        return route

    def layout(
        self,
        device: torch.device,
        form: Form = "auto",
        heads: slice = slice(None),
        score: MultiLevel | None = None,
    ) -> Layout:
        """Return the layout of this rank's queries and needed keys, built once.

        Tiles, their size and their order are those of the whole's layout, so that results have the same bits.
        """
        name = ("layout", device, form, heads.start, heads.stop, score)
        if name not in self.kept:
            self.kept[name] = self._build(device, form, heads, score)
        layout: Layout = self.kept[name]
        return layout

    def _build(self, device: torch.device, form: Form, heads: slice, score: MultiLevel | None) -> Layout:
        plan, part, place = self.plan, self.part, self.plan.place
        form = form if score is None else "tiles"
        tile = find_tile(plan.bound, device=device, form=form)
        chosen = plan.selection(part, plan.edges_of(self.ranks.rank))
        local = on_device(select(take_heads(plan.bound, heads), chosen), device)
        made = lay_out_bound(local, device=device, form=form, tile=tile, q_start=place.q_start)
        if score is not None:
            starts = TileStarts(part.queries[:: made.tile] + place.q_start, part.keys[:: made.tile])
            levels = score.bind(place.q_len, place.k_len, place.q_start)
            made = add_levels(made.to("cpu"), levels, starts).trust().to(device)
        return Layout(made.buffer, made.where)

    def layout_of_heads(self, query: Tensor, heads: slice, asked: Asked) -> Layout:
        """Return the layout of some heads over the whole sequence, for a relation that differs by head."""
        score = asked.options.get("score")
        levels = score if isinstance(score, MultiLevel) else None
        form: Form = "tiles" if levels is not None else find_form(self, query, asked)
        name = ("heads", query.device, form, heads.start, heads.stop, levels)
        if name not in self.kept:
            bound, place = take_heads(self.plan.bound, heads), self.plan.place
            tile = find_tile(self.plan.bound, device=query.device, form=form)
            local = on_device(bound, query.device)
            made = lay_out_bound(local, device=query.device, form=form, tile=tile, q_start=place.q_start)
            if levels is not None:
                made = add_levels(made.to("cpu"), levels.bind(place.q_len, place.k_len, place.q_start))
                made = made.trust().to(query.device)
            self.kept[name] = Layout(made.buffer, made.where)
        layout: Layout = self.kept[name]
        return layout

    def orders(self, device: torch.device) -> tuple[Order, Order]:
        """Return the orders of queries and of keys by rank, on a device."""
        name = ("orders", device)
        if name not in self.kept:
            self.kept[name] = tuple(
                Order(*(torch.from_numpy(x).to(device) for x in (split.order, np.argsort(split.order))))
                for split in (self.plan.queries, self.plan.keys)
            )
        orders: tuple[Order, Order] = self.kept[name]
        return orders

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of this rank's queries and needed keys, int32, on a device."""
        name = ("places", device)
        if name not in self.kept:
            part = self.part
            both = part.queries + self.plan.place.q_start, part.keys
            self.kept[name] = tuple(torch.from_numpy(x.astype(np.int32)).to(device) for x in both)
        places: tuple[Tensor, Tensor] = self.kept[name]
        return places

    def prepare(
        self, device: torch.device | str = "cpu", form: Form = "auto", score: MultiLevel | None = None
    ) -> Shard:
        """Make all that a call reads, which a compiled one needs beforehand; return the shard itself.

        A compiled call runs in one stage.

        Args:
            device: that of the tensors.
            form: "edges" for an ``AdditiveScore`` or ``EdgeBias``, "tiles" for head sizes above 256.
            score: the call's, if it is a ``MultiLevel``.
        """
        device = torch.device(device)
        route = self.route(device)
        group = "" if self.ranks.group is None else self.ranks.group.group_name
        layout = self.layout(device, form, slice(None), score)
        self.kept["prepared"] = self.held("queries"), self.held("keys")
        self.kept[f"ready {form}"] = Ready(
            layout, self.places(device), Lists.of(route), group, route.keeps_all
        )
        return self

    def ready(self, form: Form) -> Ready:
        """Return what :meth:`prepare` made."""
        ready: Ready | None = self.kept.get(f"ready {form}")
        if ready is None:
            raise ValueError(f"relation: wanted shard.prepare(device, form={form!r}) for this call, got none")
        return ready

    def held(self, of: Side) -> tuple[int, int]:
        """Return the number of queries or keys that this rank holds, and of all ranks."""
        name = f"held {of}"  # counted once: traced calls ask, too
        if name not in self.kept:
            split = self._side(of)
            self.kept[name] = int(split.counts[self.ranks.rank]), split.length
        held: tuple[int, int] = self.kept[name]
        return held


def take_heads(bound: Bound, heads: slice) -> Bound:
    """Return the same set for some of the heads."""
    first, stop, _ = heads.indices(bound.group.shape[1])
    return bound.narrow(0, bound.group.shape[0], first, stop - first)


def on_device(bound: Bound, device: torch.device) -> Bound:
    """Return the same set, its rule tested on a device."""
    if isinstance(bound.solid, Predicate):
        return replace(bound, solid=_move(bound.solid, str(device)))
    return bound


def _move(form: Predicate, device: str) -> Predicate:
    parts = tuple(None if part is None else _move(part, device) for part in form.parts)
    return replace(form, device=device, parts=parts)


def as_relations(given: object) -> list[Relation]:
    """Return a list of relations, or raise."""
    if not isinstance(given, list | tuple) or not given:
        raise TypeError(
            f"relation: wanted a Relation or a list of them, got {type(given).__name__} {given!r}"
        )
    for number, each in enumerate(given):
        if not isinstance(each, Relation):
            raise TypeError(f"relation[{number}]: wanted a Relation, got {type(each).__name__} {each!r}")
    return list(given)

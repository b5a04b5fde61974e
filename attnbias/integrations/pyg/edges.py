"""Read ``edge_index`` as a graph, and sum over edges without storing a vector per edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from ...arguments import check_dense
from ...relations import Graph
from ...sharding import Shard
from ...sharding.graphs import Fetched

NUMBERS_AT_ONCE = 1 << 22  # gathered per chunk of edges, or as many as the nodes hold

Fill = float | Tensor | str
_REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean", "min": "amin", "max": "amax", "mul": "prod"}
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)

# The graph of each live edge_index tensor, so all layers of a model share one layout.
_graphs: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True, eq=False)
class Edges:  # not a NamedTuple: torch 2.10 cannot compile properties of one
    """The edges of one call, in the order of the returned weights."""

    graph: Graph
    attr: Tensor | None  # [E, d], in the order of the graph's edges
    given: Any  # the caller's ``edge_index``, in any form ``read_edges`` takes
    looped: bool  # whether self-loops were added
    shard: Shard | None = None  # the whole graph's, if ``graph`` has this rank's edges

    @property
    def relation(self) -> Graph | Fetched:
        """The relation that ``attention`` takes with queries of targets and fetched keys of sources."""
        return self.graph if self.shard is None else self.shard.fetched

    def fetch(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Return tensors [sources, H, n] of all sources, from those of this rank, in one exchange."""
        if self.shard is None:
            return rows
        if len({x.dtype for x in rows}) > 1:  # in autocast
            return tuple(self.shard.fetch(x) for x in rows)
        fetched = self.shard.fetch(torch.cat(rows, 2))
        parts: tuple[Tensor, ...] = fetched.split([x.shape[2] for x in rows], 2)
        return parts

    @property
    def source(self) -> Tensor:
        """The key of each edge, [E]."""
        return self.graph.edge_index[0]

    @property
    def target(self) -> Tensor:
        """The query of each edge, [E]."""
        return self.graph.edge_index[1]

    @property
    def edge_index(self) -> Tensor:
        """The edges as a tensor [2, E]: the caller's own unless it was a graph or gained self-loops.

        Those of a shard are this rank's, between nodes of the whole graph.
        """
        if self.shard is not None:
            return _whole_index(self.shard)
        return self.given if isinstance(self.given, Tensor) and not self.looped else self.graph.edge_index

    def as_adjacency(self, weights: Tensor) -> Tensor | None:
        """Return the weights [E, H] as a sparse matrix [targets, sources, H] if one was given, else None."""
        if not _is_sparse(self.given):
            return None
        rows, columns = self.graph.lengths
        place = self.graph.edge_index.flip(0)
        made = torch.sparse_coo_tensor(place, weights, (rows, columns, *weights.shape[1:]))
        if self.given.layout == torch.sparse_coo:
            return made.coalesce()
        ptr = torch.searchsorted(place[0].contiguous(), torch.arange(rows + 1, device=place.device))
        return torch.sparse_csr_tensor(ptr, place[1], weights, made.shape)


class _Looped(NamedTuple):
    """A graph whose self-loops were replaced by one per node that is both source and target."""

    graph: Graph
    kept: Tensor  # [n], indices of the edges that stayed
    order: Tensor | None  # sorts [kept, loops]; None = leave them as they are


def read_edges(
    edge_index: Any,
    edge_attr: Tensor | None,
    sizes: tuple[int, int | None],
    *,
    add_self_loops: bool = False,
    fill_value: Fill = "mean",
) -> Edges:
    """Make a graph from the caller's ``edge_index``.

    Args:
        edge_index: [2, E] (sources, targets), a Graph, a Shard of one, or a sparse matrix [targets, sources].
        edge_attr: [E, d] or [E], in the order of ``edge_index``; None takes a sparse matrix's own vectors.
        sizes: numbers of sources and targets; None = that of the graph, the matrix or the sources.
        add_self_loops: replace all self-loops with one per node.
        fill_value: the ``edge_attr`` of added self-loops.
    """
    if isinstance(edge_index, Shard):
        return _read_shard(edge_index, edge_attr, sizes, fill_value if add_self_loops else None)
    graph, values = _read(edge_index, sizes)
    targets, sources = graph.lengths
    if (sources, targets) != (sizes[0], targets if sizes[1] is None else sizes[1]):
        raise ValueError(
            f"edge_index: wanted {sizes[0]} sources and {sizes[1]} targets, as many as x has rows, "
            f"got a graph of {sources} and {targets}"
        )
    attr = _check_attr(values if edge_attr is None else edge_attr, graph.edge_index.shape[1])
    if not add_self_loops:
        return Edges(graph, attr, edge_index, looped=False)
    looped = _add_loops(graph, in_order=_is_sparse(edge_index))
    if attr is not None:
        kept = attr.index_select(0, looped.kept)
        target = graph.edge_index[1].index_select(0, looped.kept)
        attr = torch.cat([kept, _fill(kept, target, graph.lengths, fill_value)])
        attr = attr if looped.order is None else attr.index_select(0, looped.order)
    return Edges(looped.graph, attr, edge_index, looped=True)


def _read_shard(
    shard: Shard, edge_attr: Tensor | None, sizes: tuple[int, int | None], fill_value: Fill | None
) -> Edges:
    """Return this rank's edges; ``fill_value`` is that of self-loops to add, None for none."""
    (sources, _), (targets, _) = shard.held("keys"), shard.held("queries")
    if (sources, targets) != (sizes[0], targets if sizes[1] is None else sizes[1]):
        raise ValueError(
            f"x: wanted {sources} sources and {targets} targets, those of rank {shard.ranks.rank}, "
            f"got {sizes[0]} and {sizes[1]}; use shard.scatter(x, 0)"
        )
    graph = shard.graph
    attr = _check_attr(edge_attr, graph.edge_index.shape[1], "shard.edges")
    if fill_value is None:
        return Edges(graph, attr, shard, looped=False, shard=shard)
    if "looped" not in shard.kept:  # nodes keep their ranks, so that nothing moves
        assert isinstance(shard.relation, Graph)
        shard.kept["looped"] = shard.with_relation(_add_loops(shard.relation, in_order=False).graph)
    looped: Shard = shard.kept["looped"]
    if attr is not None:
        source, target = _whole_index(shard)
        kept = torch.nonzero(source != target).view(-1)
        attr = attr.index_select(0, kept)
        loops = len(looped.edges) - len(kept)  # of the rank's first targets
        filled = _fill(attr, graph.edge_index[1].index_select(0, kept), (targets, loops), fill_value)
        attr = torch.cat([attr, filled])
    return Edges(looped.graph, attr, shard, looped=True, shard=looped)


def _whole_index(shard: Shard) -> Tensor:
    """Return this rank's edges between nodes of the whole graph, [2, E]."""
    relation = shard.relation
    assert isinstance(relation, Graph)
    return relation.edge_index[:, shard.edges.to(relation.edge_index.device)]


def _read(edge_index: Any, sizes: tuple[int, int | None]) -> tuple[Graph, Tensor | None]:
    """Return the graph, and the edge vectors that a sparse matrix holds."""
    if isinstance(edge_index, Graph):
        return edge_index, None
    if not isinstance(edge_index, Tensor):
        if hasattr(edge_index, "sparse_sizes"):  # torch_sparse's SparseTensor
            value = edge_index.coo()[2]
            return Graph.from_adjacency(edge_index), value if value is not None and value.dim() > 1 else None
        raise TypeError(
            "edge_index: wanted a tensor [2, E], a Graph, a Shard or a sparse matrix [targets, sources], "
            f"got {type(edge_index).__name__}"
        )
    if not _is_sparse(edge_index):
        return _cached(edge_index, (sizes[0], sizes[0] if sizes[1] is None else sizes[1])), None
    graph = _cached(edge_index, (edge_index.shape[1], edge_index.shape[0]))
    return graph, edge_index.to_sparse_coo()._values() if edge_index.dim() > 2 else None


def _is_sparse(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout in _SPARSE


def _cached(edge_index: Tensor, sizes: tuple[int, int]) -> Graph:
    """Return the graph of a tensor, cached until the tensor is written to."""
    if torch.compiler.is_compiling() or edge_index.is_inference():  # an inference tensor counts no writes
        return _make(edge_index, sizes)
    version, found = _graphs.get(edge_index, (None, {}))
    if version != edge_index._version:
        found = {}
        _graphs[edge_index] = (edge_index._version, found)
    if sizes not in found:
        found[sizes] = _make(edge_index, sizes)
    graph: Graph = found[sizes]
    return graph


def _make(edge_index: Tensor, sizes: tuple[int, int]) -> Graph:
    if not _is_sparse(edge_index):
        return Graph(edge_index, size=sizes)
    if edge_index.dim() > 2:  # it holds vectors for its edges: keep only their places
        place = edge_index.to_sparse_coo()._indices()
        edge_index = torch.sparse_coo_tensor(place, place[0], edge_index.shape[:2])
    return Graph.from_adjacency(edge_index)


def _add_loops(graph: Graph, in_order: bool) -> _Looped:
    """Replace the self-loops; the result is cached on the graph."""
    # getattr is all that torch 2.10 can compile here.
    kept_ones: dict[bool, _Looped] | None = getattr(graph, "_looped_", None)
    if kept_ones is None:
        kept_ones = {}
        object.__setattr__(graph, "_looped_", kept_ones)
    if in_order not in kept_ones:
        with torch.inference_mode(False):  # the cached graph is used in training too
            kept_ones[in_order] = _make_loops(graph, in_order)
    return kept_ones[in_order]


def _make_loops(graph: Graph, in_order: bool) -> _Looped:
    targets, sources = graph.lengths
    source, target = graph.edge_index
    kept = torch.nonzero(source != target).view(-1)
    loop = torch.arange(min(sources, targets), device=kept.device)
    pairs = torch.cat([graph.edge_index.index_select(1, kept), loop.expand(2, -1)], 1)
    order = None
    if in_order:  # the order of a sparse matrix
        order = torch.argsort(pairs[1] * sources + pairs[0], stable=True)
        pairs = pairs.index_select(1, order)
    return _Looped(Graph(pairs, size=(sources, targets)), kept, order)


def _check_attr(attr: Tensor | None, count: int, what: str = "E") -> Tensor | None:
    if attr is None:
        return None
    if not isinstance(attr, Tensor) or not attr.is_floating_point():
        got = attr.dtype if isinstance(attr, Tensor) else type(attr).__name__
        raise TypeError(f"edge_attr: wanted a floating-point tensor [E, edge_dim], got {got}")
    check_dense("edge_attr", attr)
    if attr.dim() not in (1, 2) or len(attr) != count:
        raise ValueError(
            f"edge_attr: wanted [{what}, edge_dim] = [{count}, edge_dim], got {list(attr.shape)}"
        )
    return attr[:, None] if attr.dim() == 1 else attr


def check_fill(fill_value: Fill) -> Fill:
    """Return a valid ``fill_value``, or raise."""
    is_number = isinstance(fill_value, (int, float)) and not isinstance(fill_value, bool)
    if not is_number and not isinstance(fill_value, Tensor) and fill_value not in _REDUCTIONS:
        wanted = ", ".join(repr(name) for name in _REDUCTIONS)
        raise ValueError(f"fill_value: wanted a number, a tensor or one of {wanted}, got {fill_value!r}")
    return fill_value


def _fill(attr: Tensor, target: Tensor, lengths: tuple[int, int], fill_value: Fill) -> Tensor:
    """Compute the ``edge_attr`` of each node's self-loop from its incoming edges [E, d]."""
    shape = (min(lengths), attr.shape[1])
    if isinstance(fill_value, Tensor):
        return fill_value.to(attr).expand(shape)
    if not isinstance(fill_value, str):
        return attr.new_full(shape, fill_value)
    start = attr.new_full((lengths[0], attr.shape[1]), 1.0 if fill_value == "mul" else 0.0)
    index = target[:, None].expand_as(attr)
    how = _REDUCTIONS[fill_value]
    reduced = start.scatter_reduce(0, index, attr, how, include_self=how in ("sum", "prod"))
    return reduced[: shape[0]]


def by_chunks(function: Callable[..., Tensor], width: int, nodes: int, *by_edge: Tensor) -> list[Tensor]:
    """Call a function of edges chunk by chunk; backward computes its intermediates again.

    Args:
        function: takes chunks of ``by_edge``.
        width: numbers it holds per edge.
        nodes: nodes of the graph; a chunk has at least as many edges, since its gradients are as large.
        *by_edge: tensors [E, ...].
    """
    step = max(NUMBERS_AT_ONCE // max(width, 1), nodes, 1)
    if len(by_edge[0]) <= step:
        return [function(*by_edge)]
    return [
        checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(*(x.split(step) for x in by_edge), strict=True)
    ]


def dot_nodes(query: Tensor, key: Tensor, edges: Edges, dtype: torch.dtype) -> Tensor:
    """Compute ``query[target, h] . key[source, h]`` per edge, [E, H], in the dtype."""

    def dot(source: Tensor, target: Tensor) -> Tensor:
        return (query.index_select(0, target).to(dtype) * key.index_select(0, source).to(dtype)).sum(-1)

    (targets, heads, size), sources = query.shape, len(key)
    return torch.cat(by_chunks(dot, heads * size, max(targets, sources), edges.source, edges.target))


def dot_features(query: Tensor, edges: Edges) -> Tensor:
    """Compute ``query[target, h] . attr`` per edge, [E, H]; query is [targets, H, d]."""

    def dot(attr: Tensor, target: Tensor) -> Tensor:
        return torch.einsum("ehd,ed->eh", query.index_select(0, target), attr)

    assert edges.attr is not None
    targets, heads, size = query.shape
    return torch.cat(by_chunks(dot, heads * size, targets, edges.attr, edges.target))


def sum_features(weights: Tensor, edges: Edges) -> Tensor:
    """Sum ``weights[e, h] * attr[e]`` over the edges of each target, [targets, H, d]."""
    assert edges.attr is not None
    targets, heads, size = edges.graph.lengths[0], weights.shape[1], edges.attr.shape[1]

    def add_up(weights: Tensor, attr: Tensor, target: Tensor) -> Tensor:
        start = weights.new_zeros(targets, heads, size)
        return start.index_add(0, target, weights[..., None] * attr[:, None].to(weights.dtype))

    return reduce(torch.add, by_chunks(add_up, heads * size, targets, weights, edges.attr, edges.target))


def sum_values(weights: Tensor, value: Tensor, edges: Edges) -> Tensor:
    """Sum ``weights[e, h] * value[source, h]`` over the edges of each target, [targets, H, C]."""
    targets, (sources, heads, size) = edges.graph.lengths[0], value.shape

    def add_up(weights: Tensor, source: Tensor, target: Tensor) -> Tensor:
        start = weights.new_zeros(targets, heads, size)
        return start.index_add(0, target, weights[..., None] * value.index_select(0, source))

    nodes = max(targets, sources)
    return reduce(torch.add, by_chunks(add_up, heads * size, nodes, weights, edges.source, edges.target))

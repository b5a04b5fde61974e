"""What the layers of ``pyg`` read as edges, and sums over edges that hold no vector for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from ..arguments import check_dense
from ..relations import Graph

NUMBERS_AT_ONCE = 1 << 22  # held for edges that are gathered, unless there are more for nodes

Fill = float | Tensor | str
_REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean", "min": "amin", "max": "amax", "mul": "prod"}
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)

# Graphs of the edge_index tensors that are alive: all layers of a model share one layout.
_graphs: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True, eq=False)
class Edges:  # no tuple: torch 2.10 does not compile their properties
    """The edges of one call, in the order in which weights are returned."""

    graph: Graph
    attr: Tensor | None  # [E, d], in the order of the graph's edges
    given: Any  # by the caller: what ``read_edges`` takes
    looped: bool  # whether self-loops were added to what was given

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
        """As ``edge_index``: what was given unless it was a graph or has got self-loops."""
        return self.given if isinstance(self.given, Tensor) and not self.looped else self.graph.edge_index

    def as_adjacency(self, weights: Tensor) -> Tensor | None:
        """The weights [E, H] in a sparse matrix [targets, sources, H], if one was given; else None."""
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
    """A graph whose self-loops were taken out and then put at every node that is source and target."""

    graph: Graph
    kept: Tensor  # [n], numbers of the edges that stayed
    order: Tensor | None  # of [kept, loops] in the graph; None = as they are


def read_edges(
    edge_index: Any,
    edge_attr: Tensor | None,
    sizes: tuple[int, int | None],
    *,
    add_self_loops: bool = False,
    fill_value: Fill = "mean",
) -> Edges:
    """Make a graph of what the caller calls ``edge_index``.

    Args:
        edge_index: [2, E] (sources, targets), a Graph, or a sparse matrix [targets, sources].
        edge_attr: [E, d] or [E], in its order; None takes vectors out of a sparse matrix.
        sizes: numbers of sources and targets; None = as many as the graph, the matrix or the sources have.
        add_self_loops: replace all self-loops by one at each node.
        fill_value: what ``edge_attr`` is there.
    """
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


def _read(edge_index: Any, sizes: tuple[int, int | None]) -> tuple[Graph, Tensor | None]:
    """The graph, and vectors that a sparse matrix holds for its edges."""
    if isinstance(edge_index, Graph):
        return edge_index, None
    if not isinstance(edge_index, Tensor):
        if hasattr(edge_index, "sparse_sizes"):  # torch_sparse's SparseTensor
            value = edge_index.coo()[2]
            return Graph.from_adjacency(edge_index), value if value is not None and value.dim() > 1 else None
        raise TypeError(
            "edge_index: wanted a tensor [2, E], a Graph or a sparse matrix [targets, sources], "
            f"got {type(edge_index).__name__}"
        )
    if not _is_sparse(edge_index):
        return _cached(edge_index, (sizes[0], sizes[0] if sizes[1] is None else sizes[1])), None
    graph = _cached(edge_index, (edge_index.shape[1], edge_index.shape[0]))
    return graph, edge_index.to_sparse_coo()._values() if edge_index.dim() > 2 else None


def _is_sparse(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout in _SPARSE


def _cached(edge_index: Tensor, sizes: tuple[int, int]) -> Graph:
    """The graph of a tensor, made once unless the tensor was written to since."""
    if torch.compiler.is_compiling() or edge_index.is_inference():  # the latter counts no writes
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
    if edge_index.dim() > 2:  # vectors for its edges: here their places alone
        place = edge_index.to_sparse_coo()._indices()
        edge_index = torch.sparse_coo_tensor(place, place[0], edge_index.shape[:2])
    return Graph.from_adjacency(edge_index)


def _add_loops(graph: Graph, in_order: bool) -> _Looped:
    """Replace the self-loops; kept with the graph, so that a graph of many calls does it once."""
    kept_ones: dict[bool, _Looped] | None = getattr(graph, "_looped_", None)  # torch 2.10 compiles no more
    if kept_ones is None:
        kept_ones = {}
        object.__setattr__(graph, "_looped_", kept_ones)
    if in_order not in kept_ones:
        with torch.inference_mode(False):  # what is kept is used in training, too
            kept_ones[in_order] = _make_loops(graph, in_order)
    return kept_ones[in_order]


def _make_loops(graph: Graph, in_order: bool) -> _Looped:
    targets, sources = graph.lengths
    source, target = graph.edge_index
    kept = torch.nonzero(source != target).view(-1)
    loop = torch.arange(min(sources, targets), device=kept.device)
    pairs = torch.cat([graph.edge_index.index_select(1, kept), loop.expand(2, -1)], 1)
    order = None
    if in_order:  # as a sparse matrix has them
        order = torch.argsort(pairs[1] * sources + pairs[0], stable=True)
        pairs = pairs.index_select(1, order)
    return _Looped(Graph(pairs, size=(sources, targets)), kept, order)


def _check_attr(attr: Tensor | None, count: int) -> Tensor | None:
    if attr is None:
        return None
    if not isinstance(attr, Tensor) or not attr.is_floating_point():
        got = attr.dtype if isinstance(attr, Tensor) else type(attr).__name__
        raise TypeError(f"edge_attr: wanted a floating-point tensor [E, edge_dim], got {got}")
    check_dense("edge_attr", attr)
    if attr.dim() not in (1, 2) or len(attr) != count:
        raise ValueError(f"edge_attr: wanted [E, edge_dim] = [{count}, edge_dim], got {list(attr.shape)}")
    return attr[:, None] if attr.dim() == 1 else attr


def check_fill(fill_value: Fill) -> Fill:
    """Raise unless it says what ``edge_attr`` is at added self-loops."""
    is_number = isinstance(fill_value, (int, float)) and not isinstance(fill_value, bool)
    if not is_number and not isinstance(fill_value, Tensor) and fill_value not in _REDUCTIONS:
        wanted = ", ".join(repr(name) for name in _REDUCTIONS)
        raise ValueError(f"fill_value: wanted a number, a tensor or one of {wanted}, got {fill_value!r}")
    return fill_value


def _fill(attr: Tensor, target: Tensor, lengths: tuple[int, int], fill_value: Fill) -> Tensor:
    """What ``edge_attr`` is at the self-loop of each node, from the edges [E, d] that point to it."""
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
    """Call a function of edges part by part; its intermediates are computed again in backward.

    Args:
        function: of parts of ``by_edge``.
        width: numbers that it holds for an edge.
        nodes: of the graph; a part has no fewer edges, for its gradients are as large as theirs.
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
    """The products ``query[target, h] . key[source, h]`` of each edge, [E, H], computed in the dtype."""

    def dot(source: Tensor, target: Tensor) -> Tensor:
        return (query.index_select(0, target).to(dtype) * key.index_select(0, source).to(dtype)).sum(-1)

    (targets, heads, size), sources = query.shape, len(key)
    return torch.cat(by_chunks(dot, heads * size, max(targets, sources), edges.source, edges.target))


def dot_features(query: Tensor, edges: Edges) -> Tensor:
    """The products ``query[target, h] . attr`` of each edge, [E, H]; query is [targets, H, d]."""

    def dot(attr: Tensor, target: Tensor) -> Tensor:
        return torch.einsum("ehd,ed->eh", query.index_select(0, target), attr)

    assert edges.attr is not None
    targets, heads, size = query.shape
    return torch.cat(by_chunks(dot, heads * size, targets, edges.attr, edges.target))


def sum_features(weights: Tensor, edges: Edges) -> Tensor:
    """The sum of ``weights[e, h] * attr[e]`` over the edges of each target, [targets, H, d]."""
    assert edges.attr is not None
    targets, heads, size = edges.graph.lengths[0], weights.shape[1], edges.attr.shape[1]

    def add_up(weights: Tensor, attr: Tensor, target: Tensor) -> Tensor:
        start = weights.new_zeros(targets, heads, size)
        return start.index_add(0, target, weights[..., None] * attr[:, None].to(weights.dtype))

    return _total(by_chunks(add_up, heads * size, targets, weights, edges.attr, edges.target))


def sum_values(weights: Tensor, value: Tensor, edges: Edges) -> Tensor:
    """The sum of ``weights[e, h] * value[source, h]`` over the edges of each target, [targets, H, C]."""
    targets, (sources, heads, size) = edges.graph.lengths[0], value.shape

    def add_up(weights: Tensor, source: Tensor, target: Tensor) -> Tensor:
        start = weights.new_zeros(targets, heads, size)
        return start.index_add(0, target, weights[..., None] * value.index_select(0, source))

    nodes = max(targets, sources)
    return _total(by_chunks(add_up, heads * size, nodes, weights, edges.source, edges.target))


def _total(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total

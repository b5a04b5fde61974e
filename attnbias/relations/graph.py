"""The edges of a graph as a relation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_count, as_indices
from ..sets.bound import Place
from ..sets.intervals import make_groups
from ..sets.pairs import Pairs
from .algebra import Permuted
from .graph_inputs import read_adjacency, read_edges
from .listing import Listed, new_numbers, outside
from .relation import Relation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..sharding.shard import Shard


class Graph(Listed):
    """The edges of a graph, as PyG has them: a target attends to its sources.

    Duplicate edges count twice in attention, in ``graph & other`` too; ``|`` and ``~`` make a set of pairs,
    unless they change nothing. Only :meth:`add_self_loops` adds self-loops.

    Args:
        edge_index: [2, E], sources (keys) in row 0, targets (queries) in row 1; or PyG's ``EdgeIndex``,
            ``Data`` or ``Batch``, or one edge type of a ``HeteroData``, which know their own sizes.
        num_nodes: nodes of the graph.
        size: (number of sources, number of targets) of a bipartite graph, in place of ``num_nodes``.

    Example:
        >>> import attnbias as ab
        >>> print(ab.Graph([[0, 1, 2], [1, 2, 0]], num_nodes=3).picture(3, 3))
        ..#
        #..
        .#.
    """

    edge_index: Tensor
    num_nodes: int | None = None
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        given, known = read_edges(self.edge_index)
        edge_index = as_indices("edge_index", given, (2,))
        if edge_index.shape[0] != 2:
            raise ValueError(f"edge_index: wanted shape [2, E], got {list(edge_index.shape)}")
        object.__setattr__(self, "edge_index", edge_index)
        if known is not None and self.num_nodes is None and self.size is None:
            is_square = known[0] == known[1]
            object.__setattr__(self, "num_nodes" if is_square else "size", known[0] if is_square else known)
        if (self.num_nodes is None) == (self.size is None):
            got = "neither" if self.size is None else "both"
            raise ValueError(f"num_nodes: wanted either num_nodes or size=(num_src, num_dst), got {got}")
        if self.num_nodes is not None:
            object.__setattr__(self, "num_nodes", as_count("num_nodes", self.num_nodes))
        if self.size is not None:
            if not isinstance(self.size, Sequence) or len(self.size) != 2:
                raise ValueError(f"size: wanted (num_src, num_dst), got {self.size!r}")
            object.__setattr__(self, "size", tuple(as_count("size", n) for n in self.size))
        if edge_index.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_numbers()  # else in a layout: here it would wait for a GPU, or break a trace
        super().__post_init__()

    # -- other ways in ----------------------------------------------------------------------------

    @classmethod
    def from_adjacency(cls, adjacency: Any) -> Graph:
        """Make a graph from its adjacency matrix: row = query, column = key.

        Args:
            adjacency: [queries, keys]. In a dense tensor, array or list, what is not zero is an edge; in a
                sparse one (torch's COO, CSR, CSC; scipy's; torch_sparse's), what is stored, zeros and
                repeated entries too.

        Edges are numbered as the matrix stores them, a dense one by rows.

        Example:
            >>> import attnbias as ab
            >>> ab.Graph.from_adjacency([[0, 1, 1], [1, 0, 0]])
            Graph(edge_index=[[1, 2, 0], [0, 0, 1]], size=[3, 2])
        """
        query, key, (queries, keys) = read_adjacency(adjacency)
        return cls(torch.stack((key, query)), **_sizes(keys, queries))

    @classmethod
    def from_csr(cls, ptr: Any, key: Any, num_keys: int | None = None) -> Graph:
        """Make a graph from the keys of each query, one query after another.

        Args:
            ptr: [queries + 1]; the keys of query ``i`` are ``key[ptr[i]:ptr[i + 1]]``.
            key: [E].
            num_keys: as many as queries when None.

        Example:
            >>> import attnbias as ab
            >>> print(ab.Graph.from_csr([0, 2, 2, 3], [0, 2, 1]).picture(3, 3))
            #.#
            ...
            .#.
        """
        ptr, key = as_indices("ptr", ptr, (1,)), as_indices("key", key, (1,))
        if not len(ptr):
            raise ValueError("ptr: wanted [queries + 1] offsets, got none")
        sizes = ptr.diff()
        first, last, least = torch.stack((ptr[0], ptr[-1], sizes.min() if len(sizes) else ptr[0])).tolist()
        if (first, last) != (0, len(key)) or least < 0:
            got = f"{first} to {last}" if least >= 0 else f"a step of {least}"
            raise ValueError(f"ptr: wanted offsets that rise from 0 to len(key) = {len(key)}, got {got}")
        queries = len(sizes)
        query = torch.repeat_interleave(  # given the output size, it does not wait for the device
            torch.arange(queries, device=ptr.device), sizes, output_size=len(key)
        )
        keys = queries if num_keys is None else as_count("num_keys", num_keys)
        return cls(torch.stack((key, query.to(key.device))), **_sizes(keys, queries))

    @classmethod
    def from_batch(cls, edge_index: Any, batch: Any) -> Graph:
        """Make a graph of several, as PyG's loaders give them.

        Args:
            edge_index: [2, E], nodes numbered through all graphs.
            batch: [N], the graph of each node; an edge from one graph to another is an error.
        """
        batch = as_indices("batch", batch, (1,))
        graph = cls(edge_index, num_nodes=len(batch))
        if graph.edge_index.device.type != "cpu":  # numbers out of range would lead out of ``batch``
            graph._check_numbers()
        source, target = batch.to(graph.edge_index.device)[graph.edge_index]
        across = (source != target).nonzero()
        if len(across):
            edge = int(across[0])
            raise ValueError(
                f"edge_index: wanted edges within a graph, got edge {edge} "
                f"from graph {int(source[edge])} to {int(target[edge])}"
            )
        return graph

    @classmethod
    def batch(cls, graphs: Sequence[Graph]) -> Graph:
        """Join graphs into one block-diagonal graph, edges in the order given."""
        graphs = list(graphs)
        for i, graph in enumerate(graphs):
            if not isinstance(graph, Graph):
                raise TypeError(f"graphs[{i}]: wanted a Graph, got {type(graph).__name__}")
        sizes = np.array([graph._sizes for graph in graphs], np.int64).reshape(-1, 2)
        edges = [graph.edge_index for graph in graphs]
        counts = torch.tensor([x.shape[1] for x in edges], dtype=torch.int64, device="cpu")
        shifts = torch.repeat_interleave(torch.from_numpy((np.cumsum(sizes, 0) - sizes).T), counts, dim=1)
        device = edges[0].device if edges else torch.device("cpu")
        joined = torch.cat([torch.zeros(2, 0, dtype=torch.int64, device=device), *edges], 1)
        sources, targets = sizes.sum(0).tolist()
        if all(graph.num_nodes is not None for graph in graphs):
            return cls(joined + shifts.to(device), num_nodes=sources)
        return cls(joined + shifts.to(device), size=(sources, targets))

    # -- self-loops -------------------------------------------------------------------------------

    def add_self_loops(self) -> Graph:
        """Return the graph with an edge from every node to itself, numbered after all others.

        A node that has one already gets a second, which counts: :meth:`remove_self_loops` first, as PyG's
        GATConv does, if that is not meant. Of a bipartite graph, nodes with the same number are the same.
        """
        loops = torch.arange(min(self._sizes), device=self.edge_index.device).expand(2, -1)
        return Graph(torch.cat((self.edge_index, loops), 1), self.num_nodes, self.size)

    def remove_self_loops(self) -> Graph:
        """Return the graph without edges from a node to itself; the others keep their order."""
        source, target = self.edge_index
        return Graph(self.edge_index[:, source != target], self.num_nodes, self.size)

    # -- over processes -----------------------------------------------------------------------------

    def shard(
        self,
        mesh: DeviceMesh | ProcessGroup | int | None = None,
        parts: Any = None,
        *,
        points: Any = None,
        rank: int | None = None,
        check: bool = False,
    ) -> Shard:
        """Shard the graph over the ranks of a group by node: a value that ``attention`` takes in its place.

        Each rank holds some nodes and the edges into them (``shard.edges``), with what belongs to these. It
        fetches the rows of the nodes from which the edges come (``shard.halo``).

        Args:
            mesh: a DeviceMesh of one dimension, a ProcessGroup, None for the default group, or a number of
                ranks for a plan without processes.
            parts: [N], the rank of each node, such as METIS finds it. None cuts an order in which neighbours
                lie near each other: that of "rcm" or, given points, "morton" (:meth:`reorder`). Each rank
                then gets about equal shares of nodes and edges.
            points: [N, d] coordinates of the nodes.
            rank: the rank to plan for, if ``mesh`` is a number.
            check: compare the graph and the parts across ranks, once. All ranks must take part.

        Example:
            >>> import attnbias as ab
            >>> path = ab.Graph([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]], num_nodes=6)
            >>> shard = path.shard(2, parts=[0, 0, 0, 1, 1, 1], rank=1)
            >>> shard.positions.tolist(), shard.edges.tolist(), shard.halo.tolist()
            ([3, 4, 5], [2, 3, 4], [2])
        """
        from ..sharding import shard
        from ..sharding.graphs import give_nodes

        owner = torch.from_numpy(give_nodes(self, mesh, parts, points, rank))
        return shard(self, len(owner), mesh, split=owner, rank=rank, check=check)

    # -- the relation -----------------------------------------------------------------------------

    @property
    def _sizes(self) -> tuple[int, int]:
        if self.size is not None:
            return self.size
        assert self.num_nodes is not None
        return self.num_nodes, self.num_nodes

    @property
    def lengths(self) -> tuple[int, int]:
        sources, targets = self._sizes
        return targets, sources

    def _extremes(self) -> Tensor | None:
        if not self.edge_index.numel():
            return None
        return torch.stack(self.edge_index.aminmax(dim=1), 1).flatten()

    def _check_extremes(self, extremes: Sequence[int], keys: int) -> None:  # the graph knows the keys itself
        for i, (name, count) in enumerate(zip(("source", "target"), self._sizes, strict=True)):
            wrong = outside(extremes[2 * i : 2 * i + 2], 0, count)
            if wrong is not None:
                what = f"size = {self.size}" if self.size is not None else f"num_nodes = {self.num_nodes}"
                raise ValueError(f"edge_index: {what} but a {name} is {wrong}")

    @property
    def _edge_count(self) -> int:
        return self.edge_index.shape[1]

    def _targets(self) -> Tensor:
        return self.edge_index[1]

    def _offer(self, at: Place) -> Pairs:
        (source, target), inside = self.edge_index, None
        if (at.q_start, at.q_len) != (0, self._sizes[1]):
            inside = (target >= at.q_start) & (target < at.q_start + at.q_len)
            target = target - at.q_start
        return Pairs(make_groups(), target, source, None, inside)

    @property
    def T(self) -> Relation:
        size = None if self.size is None else (self.size[1], self.size[0])
        return Graph(self.edge_index.flip(0), self.num_nodes, size)

    def permute(self, order: Tensor | Sequence[int]) -> Relation:
        """Return the graph among relabelled nodes: new ``i`` is old ``order[i]``; edges keep their order."""
        checked = Permuted(self, order)  # type: ignore[arg-type]  # made a tensor there
        nodes = len(checked.order)
        if self._sizes != (nodes, nodes):
            return checked  # which says, where it is bound, what does not fit
        return self._relabel(checked.order.to(self.edge_index.device))

    def _nodes(self) -> int:
        sources, targets = self._sizes
        if sources != targets:
            raise ValueError(f"size: wanted as many sources as targets, got {sources} and {targets}")
        return sources

    def _relabel(self, order: Tensor) -> Graph:
        return Graph(new_numbers(order)[self.edge_index], self.num_nodes, self.size)


def _sizes(sources: int, targets: int) -> dict[str, Any]:
    """Return the arguments that give a graph these sizes."""
    return {"num_nodes": sources} if sources == targets else {"size": (sources, targets)}

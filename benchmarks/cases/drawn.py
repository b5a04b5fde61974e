"""Graphs drawn from a fixed seed, with numpy and scipy only.

All but nearest neighbours are undirected: each pair is listed in both directions. Edges of nearest neighbours
lead from the neighbour to the point. No graph has duplicates or self-loops.
"""

from __future__ import annotations

from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import attnbias as ab

from .stored import GraphData, Ints

Order = Literal["random", "morton"]


def both_ways(source: Ints, target: Ints, nodes: int) -> Ints:
    """List each pair once in both directions, sorted by target, without self-loops."""
    apart = source != target
    source, target = source[apart], target[apart]
    codes = np.concatenate((target * nodes + source, source * nodes + target))
    target, source = np.divmod(np.unique(codes), max(nodes, 1))
    return np.stack((source, target))


def sbm(
    nodes: int,
    edges: int,
    *,
    communities: int = 400,
    mixing: float = 0.3,
    exponent: float = 3.2,
    by_community: bool = False,
    seed: int = 0,
) -> GraphData:
    """Draw a stochastic block model whose degrees follow a power law, as in citation and product graphs.

    Args:
        nodes: number of nodes.
        edges: number of directed edges to draw; duplicates are dropped.
        communities: number of communities, of about equal size.
        mixing: share of the edges that ignore communities.
        exponent: exponent of the power law.
        by_community: number the nodes of a community consecutively, not at random.
        seed: seed of all draws.
    """
    rng = np.random.default_rng(seed)
    weight = rng.pareto(exponent - 1, nodes) + 1
    community = np.sort(rng.integers(0, communities, nodes))
    total = np.concatenate(([0.0], np.cumsum(weight)))
    bound = np.searchsorted(community, np.arange(communities + 1))

    def pick(low: NDArray[np.float64] | float, high: NDArray[np.float64] | float, count: int) -> Ints:
        """Draw nodes by weight, from those whose running sums lie between the bounds."""
        at = rng.random(count) * (high - low) + low
        return np.minimum(np.searchsorted(total, at, side="right") - 1, nodes - 1)

    half = edges // 2
    source = pick(0.0, total[-1], half)
    home = community[source]
    near = pick(total[bound[home]], total[bound[home + 1]], half)
    target = np.where(rng.random(half) < mixing, pick(0.0, total[-1], half), near)
    if not by_community:
        name = rng.permutation(nodes)
        source, target = name[source], name[target]
    return GraphData("SBM", both_ways(source, target, nodes), nodes)


def sbm_batch(graphs: int, *, communities: int = 5, seed: int = 0) -> GraphData:
    """Draw a batch of small dense graphs, as in the PATTERN benchmark: about 130 nodes of degree 49."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(90, 171, graphs)
    ptr = np.concatenate(([0], np.cumsum(sizes)))
    parts = []
    for size, first in zip(sizes.tolist(), ptr[:-1].tolist(), strict=True):
        community = rng.integers(0, communities, size)
        likely = np.where(community[:, None] == community, 0.5, 0.35)
        source, target = np.nonzero(np.triu(rng.random((size, size)) < likely, 1))
        parts.append(both_ways(source, target, size) + first)
    joined = np.concatenate([np.zeros((2, 0), np.int64), *parts], 1)
    return GraphData("SBM batch", joined, int(ptr[-1]), ptr)


def rmat(
    nodes: int, edges: int, *, shares: tuple[float, ...] = (0.57, 0.19, 0.19, 0.05), seed: int = 0
) -> GraphData:
    """Draw a graph with hubs: each bit of a pair comes from one of four quadrants with the given shares.

    The number of edges is approximate: duplicates are dropped.
    """
    rng = np.random.default_rng(seed)
    bits = max(nodes - 1, 1).bit_length()
    source = target = np.zeros(0, np.int64)
    while len(source) < edges // 2:
        drawn = np.zeros((2, edges), np.int64)
        for _ in range(bits):
            quadrant = np.searchsorted(np.cumsum(shares), rng.random(edges), side="right").clip(max=3)
            drawn = drawn << 1 | np.stack((quadrant >> 1, quadrant & 1))
        inside = (drawn < nodes).all(0)
        source = np.concatenate((source, drawn[0][inside]))
        target = np.concatenate((target, drawn[1][inside]))
    return GraphData("R-MAT", both_ways(source[: edges // 2], target[: edges // 2], nodes), nodes)


def knn_cloud(nodes: int, k: int, *, order: Order = "random", seed: int = 0) -> GraphData:
    """Join points on a sphere with their nearest neighbours."""
    points = np.random.default_rng(seed).normal(size=(nodes, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    graph = ab.knn_graph(points, k)
    return _ordered(f"kNN-{k}", graph, points, order)


def delaunay(nodes: int, *, order: Order = "random", seed: int = 0) -> GraphData:
    """Triangulate random points of a square."""
    from scipy.spatial import Delaunay

    points = np.random.default_rng(seed).random((nodes, 2))
    corners = Delaunay(points).simplices.astype(np.int64)  # [triangles, 3]
    graph = ab.Graph(_sides(corners, nodes), num_nodes=nodes)  # type: ignore[arg-type]
    return _ordered("Delaunay", graph, points, order)


def _ordered(name: str, graph: ab.Graph, points: NDArray[np.float64], order: Order) -> GraphData:
    if order == "morton":
        place, graph = graph.reorder("morton", points)
        points = points[place.numpy()]
    assert graph.num_nodes is not None
    return GraphData(name, graph.edge_index.numpy(), graph.num_nodes, points=points)


def icosphere(refinement: int) -> GraphData:
    """Refine an icosahedron, each triangle into four per step: 10 * 4**refinement + 2 nodes."""
    golden = (1 + 5**0.5) / 2
    corner = np.array([[-1, golden, 0], [1, golden, 0], [-1, -golden, 0], [1, -golden, 0]])
    points = np.concatenate([np.roll(corner, shift, 1) for shift in range(3)])
    # A side joins two nearest corners; a face is three corners that are joined.
    near = np.isclose(((points[:, None] - points) ** 2).sum(-1), 4)
    faces = np.array(
        [(i, j, k) for i, j, k in combinations(range(12), 3) if near[[i, j, k], [j, k, i]].all()]
    )
    for _ in range(refinement):
        ends = np.sort(faces[:, [[0, 1], [1, 2], [2, 0]]], -1)  # [faces, 3, 2]
        code = ends[..., 0] * len(points) + ends[..., 1]
        distinct, middle = np.unique(code, return_inverse=True)
        middle = middle.reshape(-1, 3) + len(points)
        a, b = np.divmod(distinct, len(points))
        points = np.concatenate((points, points[a] + points[b]))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        x, y, z = faces.T
        xy, yz, zx = middle.T
        faces = np.concatenate(
            [np.stack(face, 1) for face in ((x, xy, zx), (y, yz, xy), (z, zx, yz), (xy, yz, zx))]
        )
    return GraphData("icosphere", _sides(faces, len(points)), len(points), points=points)


def _sides(corners: Ints, nodes: int) -> Ints:
    """Return the sides of triangles [n, 3] in both directions."""
    ends = corners[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2)
    return both_ways(ends[:, 0], ends[:, 1], nodes)


def hops(graph: GraphData, count: int) -> GraphData:
    """Join each node with all other nodes at most ``count`` steps away."""
    from scipy.sparse import csr_matrix, identity

    source, target = graph.edge_index
    ones = np.ones(graph.edges, bool)
    step = csr_matrix((ones, (target, source)), shape=(graph.num_nodes,) * 2) + identity(
        graph.num_nodes, bool, "csr"
    )
    reached = step
    for _ in range(count - 1):
        reached = (reached @ step).astype(bool)
    found = reached.tocoo()
    apart = found.row != found.col
    edge_index = np.stack((found.col[apart], found.row[apart])).astype(np.int64)
    name = f"{graph.name}, {count} hops"
    return GraphData(name, edge_index, graph.num_nodes, points=graph.points)


def star(leaves: int) -> GraphData:
    """Join node 0 with all others: one long row and one long column."""
    leaf = np.arange(1, leaves + 1)
    return GraphData("star", both_ways(np.zeros_like(leaf), leaf, leaves + 1), leaves + 1)


def expander(nodes: int, degree: int, *, seed: int = 0) -> GraphData:
    """Overlay random cycles through all nodes: degree at most ``degree``, an even number."""
    if degree % 2:
        raise ValueError(f"degree: wanted an even number, got {degree}")
    rng = np.random.default_rng(seed)
    cycles = [rng.permutation(nodes) for _ in range(degree // 2)]
    source = np.concatenate([np.zeros(0, np.int64), *cycles])
    target = np.concatenate([np.zeros(0, np.int64), *(np.roll(cycle, 1) for cycle in cycles)])
    return GraphData("expander", both_ways(source, target, nodes), nodes)

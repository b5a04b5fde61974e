"""PyG's attention layers on attnbias kernels: the same arguments, parameters and results.

``TransformerConv``, ``GATConv`` and ``GATv2Conv`` take the arguments of the layers of PyG 2.8 that they are
named after and load their state dicts (PyG itself is not needed). No message is stored: memory grows with
nodes times features and edges times heads, never with edges times features.

``edge_index`` is a tensor [2, E] of sources and targets, an ``attnbias.Graph``, or a matrix with targets as
rows (PyG's ``adj_t``): ``torch.sparse`` or torch_sparse's ``SparseTensor``. A graph holds its layout; that of
a tensor is kept while the tensor is alive and torch counts no write to it, so that all layers and steps that
get the same tensor share it. Writes through ``.data`` or a NumPy array that shares its memory are not
counted: pass a new tensor then. For a static graph pass a ``Graph``; ``torch.compile(fullgraph=True)`` wants
one that the layer was called with before.

Dropout in training keeps or drops each pair of nodes, duplicate edges together. Where weights for each edge
are computed anyway (edge features of ``TransformerConv``, ``return_attention_weights`` of the two others) it
does so edge by edge, with the draws that PyG makes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from ..relations import Graph
from ..scores import AdditiveScore
from ..terms import EdgeBias
from ..weights import softmax_by_row
from .pyg_edges import (
    Edges,
    Fill,
    by_chunks,
    dot_features,
    dot_nodes,
    read_edges,
    sum_features,
    sum_values,
)
from .pyg_layer import (
    GAT,
    Answer,
    Channels,
    Conv,
    Nodes,
    Scores,
    draw_glorot,
    glorot_linear,
    torch_linear,
)

__all__ = ["GATConv", "GATv2Conv", "TransformerConv"]


class TransformerConv(Conv):
    """Graph transformer layer (Shi et al., 2021): dot-product attention over edges, with PyG's arguments.

    Edge features enter keys and values as ``W_e a_ij``. The product with the query is taken as
    ``(W_e^T q_i).a_ij`` and the weighted sum as ``W_e (sum of alpha a_ij)``: no vector is stored for an edge.

    Args:
        in_channels: features of a node, or of (sources, targets); -1 = found in the first call.
        out_channels: features of each head.
        heads: number of heads.
        concat: put the heads side by side; else their mean.
        beta: mix with the skip connection by a learned gate.
        dropout: share of the weights dropped in training.
        edge_dim: features of an edge.
        bias: whether the linear maps have one.
        root_weight: add the transformed node itself; without, there is no beta.
        **others: of PyG's MessagePassing; its defaults are accepted.

    Example:
        >>> import torch
        >>> from attnbias.integrations.pyg import TransformerConv
        >>> layer = TransformerConv(16, 8, heads=4)
        >>> layer(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 32])
    """

    def __init__(
        self,
        in_channels: Channels,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        **others: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, concat, dropout, edge_dim, others)
        self.beta = beta and root_weight
        self.root_weight = root_weight
        source, target = self._in_sizes
        size = heads * out_channels
        self.lin_key = torch_linear(source, size, bias=bias)
        self.lin_query = torch_linear(target, size, bias=bias)
        self.lin_value = torch_linear(source, size, bias=bias)
        self.lin_edge = None if edge_dim is None else torch_linear(edge_dim, size, bias=False)
        self.lin_skip = torch_linear(target, self._out_size, bias=bias)
        self.lin_beta = torch_linear(3 * self._out_size, 1, bias=False) if self.beta else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for part in (
            self.lin_key,
            self.lin_query,
            self.lin_value,
            self.lin_edge,
            self.lin_skip,
            self.lin_beta,
        ):
            if part is not None:
                part.reset_parameters()

    def forward(
        self,
        x: Nodes,
        edge_index: Tensor | Graph,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Answer:
        """Attend along the edges.

        Args:
            x: [N, in_channels], or a pair of sources and targets.
            edge_index: [2, E], a Graph, or a sparse matrix [targets, sources].
            edge_attr: [E, edge_dim].
            return_attention_weights: if not None, return ``(out, (edge_index, weights [E, H]))``.
        """
        x_src, x_dst = self._read_whole_pair(x)
        edges = read_edges(edge_index, edge_attr, (len(x_src), len(x_dst)))
        self._check_edge_dim(edges)
        query, key = self._heads(self.lin_query(x_dst)), self._heads(self.lin_key(x_src))
        value = self._heads(self.lin_value(x_src))
        with_weights = return_attention_weights is not None
        if self.edge_dim is None:
            scores = Scores(query, key)
            weights = scores.weigh(edges.graph) if with_weights or self._is_watched else None
            if weights is not None and self._is_watched:
                out = self._sum(F.dropout(weights, self._dropout), value, edges)
            else:
                out = scores.attend(value, edges.graph, self._dropout)
        else:
            out, weights = self._attend_features(query, key, value, edges)
        out = self._merge(out)
        if self.root_weight:
            skip = self.lin_skip(x_dst)
            if self.lin_beta is None:
                out = out + skip
            else:
                gate = self.lin_beta(torch.cat([out, skip, out - skip], -1)).sigmoid()
                out = gate * skip + (1 - gate) * out
        if not with_weights:
            return out
        assert weights is not None
        return out, (edges.edge_index, weights)

    def _attend_features(
        self, query: Tensor, key: Tensor, value: Tensor, edges: Edges
    ) -> tuple[Tensor, Tensor]:
        """Attention [targets, H, C] whose keys and values have edge features, and its weights [E, H]."""
        if edges.attr is None:
            raise ValueError(f"edge_attr: wanted [E, edge_dim] = [E, {self.edge_dim}], got None")
        by_head = self._edge_weight(edges.attr)
        asked = torch.einsum("nhc,hcd->nhd", query, by_head)  # what a query looks for in edge features
        scale = self.out_channels**-0.5
        bias = dot_features(asked, edges) * scale
        precision = torch.float64 if query.dtype == torch.float64 else torch.float32
        scores = dot_nodes(query, key, edges, precision) * scale + bias
        weights = softmax_by_row(scores.T, edges.target, len(query)).T.to(query.dtype)
        if self._is_watched:
            assert self.lin_edge is not None
            by_edge = value.index_select(0, edges.source) + self._heads(self.lin_edge(edges.attr))
            return self._sum_messages(F.dropout(weights, self._dropout), by_edge, edges), weights
        if self._dropout:
            dropped = F.dropout(weights, self._dropout)
            out = sum_values(dropped, value, edges)
        else:
            dropped = weights
            out = Scores(query, key, terms=(EdgeBias(bias),)).attend(value, edges.graph, 0.0)
        features = sum_features(dropped, edges)  # [targets, H, d]
        return out + torch.einsum("nhd,hcd->nhc", features, by_head), weights


class GATConv(GAT):
    """Graph attention layer (Velickovic et al., 2018), with PyG's arguments.

    The score of an edge is ``LeakyReLU(a_src.x_j + a_dst.x_i)``, plus ``a_edge.(W_e a_ij)`` inside with edge
    features. As in PyG, ``edge_attr`` is not read without ``edge_dim``, and self-loops are replaced.

    Args:
        in_channels: features of a node, or of (sources, targets), which then have weights of their own; -1 =
            found in the first call.
        out_channels: features of each head.
        heads: number of heads.
        concat: put the heads side by side; else their mean.
        negative_slope: of the LeakyReLU.
        dropout: share of the weights dropped in training.
        add_self_loops: replace all self-loops by one at each node.
        edge_dim: features of an edge.
        fill_value: edge features of added self-loops: a number, a tensor, or how those of the edges that
            point to the node are reduced: "add", "mean", "min", "max", "mul".
        bias: add a learned vector to the result.
        residual: add a linear map of the targets.
        **others: of PyG's MessagePassing; its defaults are accepted.

    Example:
        >>> import torch
        >>> from attnbias.integrations.pyg import GATConv
        >>> layer = GATConv(16, 8, heads=4)
        >>> layer(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 32])
    """

    def __init__(
        self,
        in_channels: Channels,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: Fill = "mean",
        bias: bool = True,
        residual: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            heads,
            concat,
            negative_slope,
            dropout,
            add_self_loops,
            edge_dim,
            fill_value,
            residual,
            others,
        )
        size = heads * out_channels
        source, target = self._in_sizes
        is_shared = isinstance(in_channels, int)
        self.lin = glorot_linear(source, size) if is_shared else None
        self.lin_src = None if is_shared else glorot_linear(source, size)
        self.lin_dst = None if is_shared else glorot_linear(target, size)
        self.att_src = Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else glorot_linear(edge_dim, size)
        self.att_edge: Parameter | None
        if edge_dim is None:
            self.register_parameter("att_edge", None)
        else:
            self.att_edge = Parameter(torch.empty(1, heads, out_channels))
        self._make_ends(bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for part in (self.lin, self.lin_src, self.lin_dst, self.lin_edge, self.res):
            if part is not None:
                part.reset_parameters()
        for vector in (self.att_src, self.att_dst, self.att_edge):
            draw_glorot(vector)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Nodes,
        edge_index: Tensor | Graph,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Answer:
        """Attend along the edges.

        Args:
            x: [N, in_channels], or a pair of sources and targets; targets may be None.
            edge_index: [2, E], a Graph, or a sparse matrix [targets, sources].
            edge_attr: [E, edge_dim].
            size: numbers of sources and targets, where x does not say them.
            return_attention_weights: if True, return ``(out, (edge_index, weights [E, H]))`` with the edges
                as they were used, self-loops included; a sparse matrix comes back with the weights in it.
        """
        x_src, x_dst = self._read_pair(x)
        targets = None if size is None else size[1]
        edges = read_edges(
            edge_index,
            None if self.edge_dim is None else edge_attr,
            (len(x_src), targets if x_dst is None else len(x_dst)),
            add_self_loops=self.add_self_loops,
            fill_value=self.fill_value,
        )
        residual = None if self.res is None or x_dst is None else self.res(x_dst)
        value, other = self._project(x_src, x_dst, isinstance(x, Tensor))
        by_source = (value * self.att_src).sum(-1)
        if other is None:
            by_target = value.new_zeros(edges.graph.lengths[0], self.heads)
        else:
            by_target = (other * self.att_dst).sum(-1)
        if edges.attr is None or self.edge_dim is None:
            score = AdditiveScore(negative_slope=self.negative_slope)
            scores = Scores(by_target[..., None], by_source[..., None], score)
        else:
            self._check_edge_dim(edges)
            assert self.att_edge is not None
            by_feature = torch.einsum("hcd,hc->dh", self._edge_weight(edges.attr), self.att_edge[0])
            summed = by_target.index_select(0, edges.target) + by_source.index_select(0, edges.source)
            lifted = F.leaky_relu(summed + edges.attr @ by_feature, self.negative_slope)
            scores = Scores.of_edges(lifted, edges)
        out, weights = self._attend(scores, value, edges, bool(return_attention_weights))
        return self._finish(out, residual, edges, weights)

    def _project(self, x_src: Tensor, x_dst: Tensor | None, is_same: bool) -> tuple[Tensor, Tensor | None]:
        """Sources and targets as heads, [N, H, C]."""
        if self.lin is not None:
            value = self._heads(self.lin(x_src))
            if is_same:
                return value, value
            return value, None if x_dst is None else self._heads(self.lin(x_dst))
        assert self.lin_src is not None and self.lin_dst is not None
        value = self._heads(self.lin_src(x_src))
        return value, None if x_dst is None else self._heads(self.lin_dst(x_dst))


class GATv2Conv(GAT):
    """Graph attention layer with dynamic scores (Brody et al., 2022), with PyG's arguments.

    The score of an edge is ``att.LeakyReLU(W_l x_j + W_r x_i)``, plus ``W_e a_ij`` inside with edge features;
    these are computed for some edges at a time, and again in backward.

    Args:
        in_channels: features of a node, or of (sources, targets); -1 = found in the first call.
        out_channels: features of each head.
        heads: number of heads.
        concat: put the heads side by side; else their mean.
        negative_slope: of the LeakyReLU.
        dropout: share of the weights dropped in training.
        add_self_loops: replace all self-loops by one at each node.
        edge_dim: features of an edge.
        fill_value: edge features of added self-loops: a number, a tensor, or how those of the edges that
            point to the node are reduced: "add", "mean", "min", "max", "mul".
        bias: whether linear maps and result have one.
        share_weights: one linear map for sources and targets.
        residual: add a linear map of the targets.
        **others: of PyG's MessagePassing; its defaults are accepted.

    Example:
        >>> import torch
        >>> from attnbias.integrations.pyg import GATv2Conv
        >>> layer = GATv2Conv(16, 8, heads=4)
        >>> layer(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 32])
    """

    def __init__(
        self,
        in_channels: Channels,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: Fill = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            heads,
            concat,
            negative_slope,
            dropout,
            add_self_loops,
            edge_dim,
            fill_value,
            residual,
            others,
        )
        self.share_weights = share_weights
        size = heads * out_channels
        source, target = self._in_sizes
        self.lin_l = glorot_linear(source, size, bias=bias)
        self.lin_r = self.lin_l if share_weights else glorot_linear(target, size, bias=bias)
        self.att = Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else glorot_linear(edge_dim, size)
        self._make_ends(bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for part in (self.lin_l, self.lin_r, self.lin_edge, self.res):
            if part is not None:
                part.reset_parameters()
        draw_glorot(self.att)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Nodes,
        edge_index: Tensor | Graph,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Answer:
        """Attend along the edges.

        Args:
            x: [N, in_channels], or a pair of sources and targets.
            edge_index: [2, E], a Graph, or a sparse matrix [targets, sources].
            edge_attr: [E, edge_dim].
            return_attention_weights: if True, return ``(out, (edge_index, weights [E, H]))`` with the edges
                as they were used, self-loops included; a sparse matrix comes back with the weights in it.
        """
        x_src, x_dst = self._read_whole_pair(x)
        edges = read_edges(
            edge_index,
            edge_attr,
            (len(x_src), len(x_dst)),
            add_self_loops=self.add_self_loops,
            fill_value=self.fill_value,
        )
        self._check_edge_dim(edges)
        residual = None if self.res is None else self.res(x_dst)
        value = self._heads(self.lin_l(x_src))
        is_same = isinstance(x, Tensor) and self.share_weights
        query = value if is_same else self._heads(self.lin_r(x_dst))
        if edges.attr is None:
            scores = Scores(query, value, AdditiveScore(self.att[0], self.negative_slope))
        else:
            scores = Scores.of_edges(self._score_features(query, value, edges), edges)
        out, weights = self._attend(scores, value, edges, bool(return_attention_weights))
        return self._finish(out, residual, edges, weights)

    def _score_features(self, query: Tensor, key: Tensor, edges: Edges) -> Tensor:
        """The score of each edge with its features, [E, H]."""
        assert self.lin_edge is not None and edges.attr is not None
        lin_edge = self.lin_edge

        def score(attr: Tensor, source: Tensor, target: Tensor) -> Tensor:
            summed = query.index_select(0, target) + key.index_select(0, source) + self._heads(lin_edge(attr))
            return (F.leaky_relu(summed, self.negative_slope) * self.att).sum(-1)

        nodes, width = max(len(query), len(key)), query.shape[1] * query.shape[2]
        return torch.cat(by_chunks(score, width, nodes, edges.attr, edges.source, edges.target))

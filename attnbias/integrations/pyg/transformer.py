"""Shi et al.'s graph transformer layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...op.weights import softmax_by_row
from ...relations import Graph
from ...scores.terms import EdgeBias
from ...sharding import Shard
from .edges import Edges, dot_features, dot_nodes, read_edges, sum_features, sum_values
from .layer import Answer, Channels, Conv, Nodes, Scores, torch_linear


class TransformerConv(Conv):
    """Graph transformer layer (Shi et al., 2021): dot-product attention over edges, with PyG's arguments.

    Edge features enter keys and values as ``W_e a_ij``. No vector is stored per edge: their product with the
    query is computed as ``(W_e^T q_i).a_ij`` and their weighted sum as ``W_e (sum of alpha a_ij)``.

    Args:
        in_channels: features per node, or a pair for (sources, targets); -1 is inferred in the first call.
        out_channels: features per head.
        heads: number of heads.
        concat: concatenate the heads; otherwise average them.
        beta: mix in the skip connection with a learned gate.
        dropout: fraction of the weights to drop in training.
        edge_dim: features per edge.
        bias: give the linear maps a bias.
        root_weight: add the transformed node itself; ``beta`` needs it.
        **others: options of PyG's MessagePassing; only their defaults are accepted.

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

    def forward(
        self,
        x: Nodes,
        edge_index: Tensor | Graph | Shard,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Answer:
        """Attend along the edges.

        Args:
            x: [N, in_channels], or a pair (sources, targets).
            edge_index: [2, E], a Graph, a Shard of one, or a sparse matrix [targets, sources].
            edge_attr: [E, edge_dim].
            return_attention_weights: if not None, return ``(out, (edge_index, weights [E, H]))``.
        """
        x_src, x_dst = self._read_whole_pair(x)
        edges = read_edges(edge_index, edge_attr, (len(x_src), len(x_dst)))
        self._check_edge_dim(edges)
        query, key = self._heads(self.lin_query(x_dst)), self._heads(self.lin_key(x_src))
        key, value = edges.fetch(key, self._heads(self.lin_value(x_src)))
        with_weights = return_attention_weights is not None
        if self.edge_dim is None:
            scores = Scores(query, key)
            weights = scores.weigh(edges.graph) if with_weights or self._is_watched else None
            if weights is not None and self._is_watched:
                out = self._sum(F.dropout(weights, self._dropout), value, edges)
            else:
                out = scores.attend(value, edges, self._dropout)
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
        """Attend with edge features in keys and values; return [targets, H, C] and the weights [E, H]."""
        if edges.attr is None:
            raise ValueError(f"edge_attr: wanted [E, edge_dim] = [E, {self.edge_dim}], got None")
        by_head = self._edge_weight(edges.attr)
        asked = torch.einsum("nhc,hcd->nhd", query, by_head)  # [targets, H, d]
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
            out = Scores(query, key, terms=(EdgeBias(bias),)).attend(value, edges, 0.0)
        features = sum_features(dropped, edges)  # [targets, H, d]
        return out + torch.einsum("nhd,hcd->nhc", features, by_head), weights

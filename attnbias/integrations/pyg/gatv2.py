"""Brody et al.'s graph attention layer with dynamic scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from ...relations import Graph
from ...scores.additive import AdditiveScore
from ...sharding import Shard
from .edges import Edges, Fill, by_chunks
from .layer import GAT, Answer, Channels, Nodes, Scores, glorot_linear


class GATv2Conv(GAT):
    """Graph attention layer with dynamic scores (Brody et al., 2022), with PyG's arguments.

    The score of an edge is ``att.LeakyReLU(W_l x_j + W_r x_i)``; edge features add ``W_e a_ij`` inside the
    LeakyReLU. Scores with edge features are computed in chunks of edges, and again in backward.

    Args:
        share_weights: use one linear map for sources and targets.
        bias: give the linear maps and the output a bias.

    All other arguments are those of :class:`~attnbias.integrations.pyg.GATConv`.

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
        self.share_weights = share_weights  # first: the base constructor calls _make_weights, which reads it
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
            bias,
            residual,
            **others,
        )

    def _make_weights(self, bias: bool) -> None:
        size = self.heads * self.out_channels
        source, target = self._in_sizes
        self.lin_l = glorot_linear(source, size, bias=bias)
        self.lin_r = self.lin_l if self.share_weights else glorot_linear(target, size, bias=bias)
        self.att = Parameter(torch.empty(1, self.heads, self.out_channels))
        self.lin_edge = None if self.edge_dim is None else glorot_linear(self.edge_dim, size)

    def forward(
        self,
        x: Nodes,
        edge_index: Tensor | Graph | Shard,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Answer:
        """Attend along the edges; see :meth:`GATConv.forward`, but targets may not be None."""
        x_src, x_dst = self._read_whole_pair(x)
        edges = self._read_edges(edge_index, edge_attr, (len(x_src), len(x_dst)))
        self._check_edge_dim(edges)
        residual = None if self.res is None else self.res(x_dst)
        value = self._heads(self.lin_l(x_src))
        is_same = isinstance(x, Tensor) and self.share_weights
        query = value if is_same else self._heads(self.lin_r(x_dst))
        (value,) = edges.fetch(value)
        if edges.attr is None:
            scores = Scores(query, value, AdditiveScore(self.att[0], self.negative_slope))
        else:
            scores = Scores.of_edges(self._score_features(query, value, edges), edges)
        out, weights = self._attend(scores, value, edges, bool(return_attention_weights))
        return self._finish(out, residual, edges, weights)

    def _score_features(self, query: Tensor, key: Tensor, edges: Edges) -> Tensor:
        """Score each edge with its features, [E, H]."""
        assert self.lin_edge is not None and edges.attr is not None
        lin_edge = self.lin_edge

        def score(attr: Tensor, source: Tensor, target: Tensor) -> Tensor:
            summed = query.index_select(0, target) + key.index_select(0, source) + self._heads(lin_edge(attr))
            return (F.leaky_relu(summed, self.negative_slope) * self.att).sum(-1)

        nodes, width = max(len(query), len(key)), query.shape[1] * query.shape[2]
        return torch.cat(by_chunks(score, width, nodes, edges.attr, edges.source, edges.target))

"""Velickovic et al.'s graph attention layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from ...relations import Graph
from ...scores.additive import AdditiveScore
from ...sharding import Shard
from .layer import GAT, Answer, Nodes, Scores, glorot_linear


class GATConv(GAT):
    """Graph attention layer (Velickovic et al., 2018), with PyG's arguments.

    The score of an edge is ``LeakyReLU(a_src.x_j + a_dst.x_i)``; edge features add ``a_edge.(W_e a_ij)``
    inside the LeakyReLU. As in PyG, ``edge_attr`` is ignored without ``edge_dim``, and self-loops are
    replaced.

    Args:
        in_channels: features per node, or a pair for (sources, targets), which then have separate weights;
            -1 is inferred in the first call.
        out_channels: features per head.
        heads: number of heads.
        concat: concatenate the heads; otherwise average them.
        negative_slope: slope of the LeakyReLU.
        dropout: fraction of the weights to drop in training.
        add_self_loops: replace all self-loops with one per node.
        edge_dim: features per edge.
        fill_value: edge features of added self-loops: a number, a tensor, or a reduction of the node's
            incoming edge features: "add", "mean", "min", "max" or "mul".
        bias: add a learned vector to the output.
        residual: add a linear projection of the targets.
        **others: options of PyG's MessagePassing; only their defaults are accepted.

    Example:
        >>> import torch
        >>> from attnbias.integrations.pyg import GATConv
        >>> layer = GATConv(16, 8, heads=4)
        >>> layer(torch.randn(3, 16), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([3, 32])
    """

    def _make_weights(self, bias: bool) -> None:
        size = self.heads * self.out_channels
        source, target = self._in_sizes
        is_shared = isinstance(self.in_channels, int)
        self.lin = glorot_linear(source, size) if is_shared else None
        self.lin_src = None if is_shared else glorot_linear(source, size)
        self.lin_dst = None if is_shared else glorot_linear(target, size)
        self.att_src = Parameter(torch.empty(1, self.heads, self.out_channels))
        self.att_dst = Parameter(torch.empty(1, self.heads, self.out_channels))
        self.lin_edge = None if self.edge_dim is None else glorot_linear(self.edge_dim, size)
        self.att_edge: Parameter | None
        if self.edge_dim is None:
            self.register_parameter("att_edge", None)
        else:
            self.att_edge = Parameter(torch.empty(1, self.heads, self.out_channels))

    def forward(
        self,
        x: Nodes,
        edge_index: Tensor | Graph | Shard,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Answer:
        """Attend along the edges.

        Args:
            x: [N, in_channels], or a pair (sources, targets); targets may be None.
            edge_index: [2, E], a Graph, a Shard of one, or a sparse matrix [targets, sources].
            edge_attr: [E, edge_dim].
            size: numbers of sources and targets; needed only where x has no targets.
            return_attention_weights: if True, return ``(out, (edge_index, weights [E, H]))`` for the edges
                used, self-loops included; a sparse matrix comes back with the weights as its values.
        """
        x_src, x_dst = self._read_pair(x)
        targets = None if size is None else size[1]
        attr = None if self.edge_dim is None else edge_attr
        edges = self._read_edges(edge_index, attr, (len(x_src), targets if x_dst is None else len(x_dst)))
        residual = None if self.res is None or x_dst is None else self.res(x_dst)
        lin_src, lin_dst = (self.lin_src, self.lin_dst) if self.lin is None else (self.lin, self.lin)
        assert lin_src is not None and lin_dst is not None
        value = self._heads(lin_src(x_src))
        is_same = isinstance(x, Tensor) and self.lin is not None
        by_source = (value * self.att_src).sum(-1, keepdim=True)  # [sources, H, 1]
        if x_dst is None:
            by_target = value.new_zeros(edges.graph.lengths[0], self.heads)
        else:
            by_target = ((value if is_same else self._heads(lin_dst(x_dst))) * self.att_dst).sum(-1)
        by_source, value = edges.fetch(by_source, value)
        if edges.attr is None or self.edge_dim is None:
            score = AdditiveScore(negative_slope=self.negative_slope)
            scores = Scores(by_target[..., None], by_source, score)
        else:
            self._check_edge_dim(edges)
            assert self.att_edge is not None
            by_feature = torch.einsum("hcd,hc->dh", self._edge_weight(edges.attr), self.att_edge[0])
            from_source = by_source[..., 0].index_select(0, edges.source)
            summed = by_target.index_select(0, edges.target) + from_source
            lifted = F.leaky_relu(summed + edges.attr @ by_feature, self.negative_slope)
            scores = Scores.of_edges(lifted, edges)
        out, weights = self._attend(scores, value, edges, bool(return_attention_weights))
        return self._finish(out, residual, edges, weights)

"""What the three layers of ``pyg`` have in common: linear maps, scores, heads and ends."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from ..arguments import check_dense
from ..ops import attention
from ..relations import Graph
from ..relations.relation import as_count
from ..scores import AdditiveScore
from ..terms import EdgeBias, Term
from ..weights import edge_weights
from .pyg_edges import Edges, Fill, check_fill, sum_values

if TYPE_CHECKING:
    from torch.nn import Module as MessagePassing
else:
    try:  # to_hetero and the explainers of PyG know a layer by this class
        from torch_geometric.nn import MessagePassing
    except ImportError:
        from torch.nn import Module as MessagePassing

Channels = int | tuple[int, int]
Nodes = Tensor | tuple[Tensor, Tensor | None]  # [N, F], or sources and targets
Answer = Tensor | tuple[Tensor, tuple[Tensor, Tensor]]

_IN_PYG = MessagePassing is not torch.nn.Module
_MESSAGE_PASSING = {
    "aggr": ("add", "sum"),
    "aggr_kwargs": (None,),
    "flow": ("source_to_target",),
    "node_dim": (0, -2),
    "decomposed_layers": (1,),
}


class _Linear(torch.nn.Linear):
    """A linear map that starts as PyG's ``glorot``."""

    def reset_parameters(self) -> None:
        """Draw the weights."""
        bound = math.sqrt(6 / (self.in_features + self.out_features))
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            torch.nn.init.uniform_(self.bias, -bound, bound)


class _LazyLinear(torch.nn.LazyLinear):
    cls_to_become = _Linear

    def reset_parameters(self) -> None:
        if not self.has_uninitialized_params() and self.in_features:
            _Linear.reset_parameters(self)  # type: ignore[arg-type]


def glorot_linear(size: int, out: int, *, bias: bool = False) -> torch.nn.Linear:
    """A linear map that starts as those of the GATs; its size -1 is found in the first call."""
    return _LazyLinear(out, bias=bias) if size == -1 else _Linear(size, out, bias=bias)


def torch_linear(size: int, out: int, *, bias: bool) -> torch.nn.Linear:
    """A linear map that starts as torch's own."""
    return torch.nn.LazyLinear(out, bias=bias) if size == -1 else torch.nn.Linear(size, out, bias=bias)


def draw_glorot(x: Tensor | None) -> None:
    """Fill a tensor, if there is one, as PyG's ``glorot`` does."""
    if x is not None:
        bound = math.sqrt(6 / (x.shape[-2] + x.shape[-1]))
        torch.nn.init.uniform_(x, -bound, bound)


class Scores(NamedTuple):
    """What gives each edge its score: the arguments of ``attention`` but values and relation."""

    query: Tensor  # [targets, H, D]
    key: Tensor  # [sources, H, D]
    score: AdditiveScore | None = None
    terms: tuple[Term, ...] = ()

    @classmethod
    def of_edges(cls, scores: Tensor, edges: Edges) -> Scores:
        """Scores that are known, [E, H]: a bias on products of zeros."""
        (targets, sources), heads = edges.graph.lengths, scores.shape[1]
        nothing = [scores.new_zeros(n, heads, 1) for n in (targets, sources)]
        return cls(nothing[0], nothing[1], terms=(EdgeBias(scores),))

    def attend(self, value: Tensor, graph: Graph, dropout: float) -> Tensor:
        """Attention over the graph, [targets, H, C]; value is [sources, H, C]."""
        query, key, value = (x.transpose(0, 1)[None] for x in (self.query, self.key, value))
        out = attention(query, key, value, graph, terms=self.terms, score=self.score, dropout_p=dropout)
        return out[0].transpose(0, 1)

    def weigh(self, graph: Graph) -> Tensor:
        """The attention of each edge, [E, H]."""
        query, key = (x.transpose(0, 1)[None] for x in (self.query, self.key))
        return edge_weights(query, key, graph, terms=self.terms, score=self.score).to(self.query.dtype)


class Conv(MessagePassing):
    """What the three layers have in common."""

    def __init__(
        self,
        in_channels: Channels,
        out_channels: int,
        heads: int,
        concat: bool,
        dropout: float,
        edge_dim: int | None,
        others: dict[str, Any],
    ) -> None:
        super().__init__(**({"node_dim": 0} if _IN_PYG else {}))
        for name, got in others.items():
            wanted = _MESSAGE_PASSING.get(name)
            if wanted is None:
                raise TypeError(f"{name}: {type(self).__name__} has no such argument")
            if got not in wanted:
                hint = "; pass edge_index.flip(0)" if name == "flow" else ""
                raise ValueError(f"{name}: wanted {wanted[0]!r}, the only one there is, got {got!r}{hint}")
        if not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout: wanted a share from 0 to 1, got {dropout!r}")
        self.in_channels = _check_channels(in_channels)
        self.out_channels = as_count("out_channels", out_channels, least=1)
        self.heads = as_count("heads", heads, least=1)
        self.concat = concat
        self.dropout = dropout
        self.edge_dim = None if edge_dim is None else as_count("edge_dim", edge_dim, least=-1)

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    @property
    def _out_size(self) -> int:
        return self.out_channels * (self.heads if self.concat else 1)

    @property
    def _in_sizes(self) -> tuple[int, int]:
        sizes = self.in_channels
        return (sizes, sizes) if isinstance(sizes, int) else (sizes[0], sizes[1])

    def _read_pair(self, x: Any) -> tuple[Tensor, Tensor | None]:
        """Sources and targets."""
        pair = (x, x) if isinstance(x, Tensor) else x
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], Tensor):
            raise TypeError(f"x: wanted a tensor [N, F] or a pair (x_src, x_dst), got {type(x).__name__}")
        for part, size in zip(pair, self._in_sizes, strict=True):
            if part is None:
                continue
            if not isinstance(part, Tensor) or not part.is_floating_point():
                got = part.dtype if isinstance(part, Tensor) else type(part).__name__
                raise TypeError(f"x: wanted floating-point features, got {got}")
            if part.is_nested:  # a sparse one is multiplied as it is
                check_dense("x", part)
            if part.dim() != 2 or size not in (-1, part.shape[1]):
                wanted = "F" if size == -1 else size
                raise ValueError(f"x: wanted [N, {wanted}], got {list(part.shape)}")
        return pair[0], pair[1]

    def _read_whole_pair(self, x: Any) -> tuple[Tensor, Tensor]:
        """Sources and targets, neither of which may lack."""
        source, target = self._read_pair(x)
        if target is None:
            raise ValueError("x: wanted (x_src, x_dst), got (x_src, None)")
        return source, target

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(-1, self.heads, self.out_channels)  # [N, H, C]

    def _merge(self, out: Tensor) -> Tensor:
        return out.flatten(1) if self.concat else out.mean(1)  # [N, H * C] or [N, C]

    def _edge_weight(self, attr: Tensor) -> Tensor:
        """The weight of ``lin_edge`` by head, [H, C, d]."""
        lin_edge: Any = self.lin_edge
        if isinstance(lin_edge, torch.nn.LazyLinear):  # until its first call
            lin_edge(attr[:0])
        weight: Tensor = lin_edge.weight
        return weight.view(self.heads, self.out_channels, weight.shape[1])

    def _check_edge_dim(self, edges: Edges) -> None:
        if edges.attr is None:
            return
        if self.edge_dim is None:
            raise ValueError(f"edge_attr: wanted None, {type(self).__name__} was made without edge_dim")
        if self.edge_dim not in (-1, edges.attr.shape[1]):
            wanted = f"[E, edge_dim] = [{len(edges.attr)}, {self.edge_dim}]"
            raise ValueError(f"edge_attr: wanted {wanted}, got {list(edges.attr.shape)}")

    @property
    def _is_watched(self) -> bool:
        """Whether each message is wanted: by an explainer of PyG, a hook, or a subclass."""
        if not _IN_PYG:
            return False
        steps = ("propagate", "message", "aggregate")
        hooks = (getattr(self, f"_{step}_forward{when}hooks") for step in steps for when in ("_", "_pre_"))
        own = (getattr(type(self), step) is not getattr(Conv, step) for step in (*steps[1:], "update"))
        return bool(self.explain) or any(hooks) or any(own)

    def _attend(
        self, scores: Scores, value: Tensor, edges: Edges, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attention [targets, H, C] and, if asked for, the weights of its edges after dropout, [E, H]."""
        if not with_weights and not self._is_watched:
            return scores.attend(value, edges.graph, self._dropout), None
        weights = scores.weigh(edges.graph)
        if not self._dropout and not self._is_watched:
            return scores.attend(value, edges.graph, 0.0), weights
        weights = F.dropout(weights, self._dropout)
        return self._sum(weights, value, edges), weights if with_weights else None

    def _sum(self, weights: Tensor, value: Tensor, edges: Edges) -> Tensor:
        """The sum of ``weights[e, h] * value[source, h]`` over the edges of each target, [targets, H, C]."""
        if not self._is_watched:
            return sum_values(weights, value, edges)
        return self._sum_messages(weights, value.index_select(0, edges.source), edges)

    def _sum_messages(self, weights: Tensor, value: Tensor, edges: Edges) -> Tensor:
        """The same of values [E, H, C], by the steps of PyG, which run its hooks and masks."""
        targets, sources = edges.graph.lengths
        propagate: Any = self.propagate
        index = edges.graph.edge_index
        out: Tensor = propagate(index, size=(sources, targets), value=value, alpha=weights)
        return out

    def message(self, value: Tensor, alpha: Tensor) -> Tensor:
        """The message of each edge, [E, H, C]; called by PyG."""
        return value * alpha[..., None]

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Leave ``propagate`` as it is: PyG would write it to a file, and it seldom runs."""

    def __prepare_scriptable__(self) -> NoReturn:  # asked by torch.jit.script
        name = type(self).__name__
        raise NotImplementedError(
            f"{name}: TorchScript is not offered; use torch.compile, or torch.export with a Graph"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"


def _check_channels(in_channels: Any) -> Channels:
    if not isinstance(in_channels, (tuple, list)):
        return as_count("in_channels", in_channels, least=-1)
    if len(in_channels) != 2:
        raise ValueError(f"in_channels: wanted a number, or those of (sources, targets), got {in_channels}")
    source, target = (as_count("in_channels", size, least=-1) for size in in_channels)
    return source, target


class GAT(Conv):
    """What the two GATs have in common."""

    bias: Parameter | None
    res: torch.nn.Linear | None

    def __init__(
        self,
        in_channels: Channels,
        out_channels: int,
        heads: int,
        concat: bool,
        negative_slope: float,
        dropout: float,
        add_self_loops: bool,
        edge_dim: int | None,
        fill_value: Fill,
        residual: bool,
        others: dict[str, Any],
    ) -> None:
        super().__init__(in_channels, out_channels, heads, concat, dropout, edge_dim, others)
        self.negative_slope = negative_slope
        self.add_self_loops = add_self_loops
        self.fill_value = check_fill(fill_value)
        self.residual = residual

    def _make_ends(self, bias: bool) -> None:
        """The parameters that PyG makes last."""
        self.res = glorot_linear(self._in_sizes[1], self._out_size) if self.residual else None
        if bias:
            self.bias = Parameter(torch.empty(self._out_size))
        else:
            self.register_parameter("bias", None)

    def register_edge_update_forward_pre_hook(self, hook: Any) -> NoReturn:
        """Raise: the step of PyG is not run."""
        raise NotImplementedError(
            f"hook: {type(self).__name__} has no step edge_update; "
            "hook the message, whose alpha holds the weights"
        )

    register_edge_update_forward_hook = register_edge_update_forward_pre_hook

    def _finish(self, out: Tensor, residual: Tensor | None, edges: Edges, weights: Tensor | None) -> Answer:
        out = self._merge(out)
        if residual is not None:
            out = out + residual
        if self.bias is not None:
            out = out + self.bias
        if weights is None:
            return out
        adjacency = edges.as_adjacency(weights)
        return out, (edges.edge_index if adjacency is None else adjacency, weights)

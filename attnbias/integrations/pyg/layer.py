"""The base classes of the PyG layers: linear maps, scores, heads and outputs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from ...arguments import as_count, check_dense
from ...attention import attention
from ...op.problem import Options
from ...op.weights import edge_weights
from ...relations import Graph
from ...scores.additive import AdditiveScore
from ...scores.terms import EdgeBias, Term
from .edges import Edges, Fill, check_fill, read_edges, sum_values

if TYPE_CHECKING:
    from torch.nn import Module as MessagePassing
else:
    try:  # PyG's to_hetero and explainers recognise a layer by this class
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
    """A linear map with PyG's ``glorot`` initialisation."""

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
    """Make a linear map initialised like those of the GATs; size -1 is inferred in the first call."""
    return _LazyLinear(out, bias=bias) if size == -1 else _Linear(size, out, bias=bias)


def torch_linear(size: int, out: int, *, bias: bool) -> torch.nn.Linear:
    """Make a linear map with torch's own initialisation; size -1 is inferred in the first call."""
    return torch.nn.LazyLinear(out, bias=bias) if size == -1 else torch.nn.Linear(size, out, bias=bias)


class Scores(NamedTuple):
    """The arguments of ``attention`` that score an edge: all but the values and the relation."""

    query: Tensor  # [targets, H, D]
    key: Tensor  # [sources, H, D]
    score: AdditiveScore | None = None
    terms: tuple[Term, ...] = ()

    @classmethod
    def of_edges(cls, scores: Tensor, edges: Edges) -> Scores:
        """Wrap known scores [E, H] as a bias on zero products."""
        (targets, sources), heads = edges.graph.lengths, scores.shape[1]
        nothing = [scores.new_zeros(n, heads, 1) for n in (targets, sources)]
        return cls(nothing[0], nothing[1], terms=(EdgeBias(scores),))

    def attend(self, value: Tensor, edges: Edges, dropout: float) -> Tensor:
        """Attend over the edges, [targets, H, C]; value is [sources, H, C]."""
        query, key, value = (x.transpose(0, 1)[None] for x in (self.query, self.key, value))
        options: Options = {"terms": self.terms, "score": self.score, "dropout_p": dropout}
        out = attention(query, key, value, edges.relation, **options)
        return out[0].transpose(0, 1)

    def weigh(self, graph: Graph) -> Tensor:
        """Return the attention weight of each edge, [E, H]."""
        query, key = (x.transpose(0, 1)[None] for x in (self.query, self.key))
        return edge_weights(query, key, graph, terms=self.terms, score=self.score).to(self.query.dtype)


class Conv(MessagePassing):
    """A PyG attention layer: checked arguments, heads, and sums over edges."""

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
                raise ValueError(f"{name}: wanted {wanted[0]!r}, the only choice here, got {got!r}{hint}")
        if not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout: wanted a fraction from 0 to 1, got {dropout!r}")
        self.in_channels = _check_channels(in_channels)
        self.out_channels = as_count("out_channels", out_channels, least=1)
        self.heads = as_count("heads", heads, least=1)
        self.concat = concat
        self.dropout = dropout
        self.edge_dim = None if edge_dim is None else as_count("edge_dim", edge_dim, least=-1)

    def reset_parameters(self) -> None:
        """Draw all parameters again: linear maps by their own rule, vectors as PyG's ``glorot`` does."""
        for name, part in self._modules.items():  # not children(): PyG draws a shared map twice
            if name.startswith(("lin", "res")) and isinstance(part, torch.nn.Linear):
                part.reset_parameters()
        for name, vector in self._parameters.items():
            if name.startswith("att") and vector is not None:
                bound = math.sqrt(6 / (vector.shape[-2] + vector.shape[-1]))
                torch.nn.init.uniform_(vector, -bound, bound)
            elif name == "bias" and vector is not None:
                torch.nn.init.zeros_(vector)

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
        """Check ``x`` and return sources and targets."""
        pair = (x, x) if isinstance(x, Tensor) else x
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], Tensor):
            raise TypeError(f"x: wanted a tensor [N, F] or a pair (x_src, x_dst), got {type(x).__name__}")
        for part, size in zip(pair, self._in_sizes, strict=True):
            if part is None:
                continue
            if not isinstance(part, Tensor) or not part.is_floating_point():
                got = part.dtype if isinstance(part, Tensor) else type(part).__name__
                raise TypeError(f"x: wanted floating-point features, got {got}")
            if part.is_nested:  # sparse features are fine: the linear maps multiply them as they are
                check_dense("x", part)
            if part.dim() != 2 or size not in (-1, part.shape[1]):
                wanted = "F" if size == -1 else size
                raise ValueError(f"x: wanted [N, {wanted}], got {list(part.shape)}")
        return pair[0], pair[1]

    def _read_whole_pair(self, x: Any) -> tuple[Tensor, Tensor]:
        """Check ``x`` and return sources and targets, both of which are required."""
        source, target = self._read_pair(x)
        if target is None:
            raise ValueError("x: wanted (x_src, x_dst), got (x_src, None)")
        return source, target

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(-1, self.heads, self.out_channels)  # [N, H, C]

    def _merge(self, out: Tensor) -> Tensor:
        return out.flatten(1) if self.concat else out.mean(1)  # [N, H * C] or [N, C]

    def _edge_weight(self, attr: Tensor) -> Tensor:
        """Return the weight of ``lin_edge`` by head, [H, C, d]."""
        lin_edge: Any = self.lin_edge
        if isinstance(lin_edge, torch.nn.LazyLinear):  # it has no weight before its first call
            lin_edge(attr[:0])
        weight: Tensor = lin_edge.weight
        return weight.view(self.heads, self.out_channels, weight.shape[1])

    def _check_edge_dim(self, edges: Edges) -> None:
        if edges.attr is None:
            return
        if self.edge_dim is None:
            name, got = type(self).__name__, list(edges.attr.shape)
            raise ValueError(f"edge_attr: wanted None because {name} was made without edge_dim, got {got}")
        if self.edge_dim not in (-1, edges.attr.shape[1]):
            wanted = f"[E, edge_dim] = [{len(edges.attr)}, {self.edge_dim}]"
            raise ValueError(f"edge_attr: wanted {wanted}, got {list(edges.attr.shape)}")

    @property
    def _is_watched(self) -> bool:
        """Return whether something needs each message: an explainer of PyG, a hook or a subclass."""
        if not _IN_PYG:
            return False
        steps = ("propagate", "message", "aggregate")
        hooks = (getattr(self, f"_{step}_forward{when}hooks") for step in steps for when in ("_", "_pre_"))
        own = (getattr(type(self), step) is not getattr(Conv, step) for step in (*steps[1:], "update"))
        return bool(self.explain) or any(hooks) or any(own)

    def _attend(
        self, scores: Scores, value: Tensor, edges: Edges, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, [targets, H, C]; also return the edge weights after dropout, [E, H], or None."""
        if not with_weights and not self._is_watched:
            return scores.attend(value, edges, self._dropout), None
        weights = scores.weigh(edges.graph)
        if not self._dropout and not self._is_watched:
            return scores.attend(value, edges, 0.0), weights
        weights = F.dropout(weights, self._dropout)
        return self._sum(weights, value, edges), weights if with_weights else None

    def _sum(self, weights: Tensor, value: Tensor, edges: Edges) -> Tensor:
        """Sum ``weights[e, h] * value[source, h]`` over the edges of each target, [targets, H, C]."""
        if not self._is_watched:
            return sum_values(weights, value, edges)
        return self._sum_messages(weights, value.index_select(0, edges.source), edges)

    def _sum_messages(self, weights: Tensor, value: Tensor, edges: Edges) -> Tensor:
        """Sum per-edge values [E, H, C] through PyG's ``propagate``, which runs its hooks and masks."""
        targets, sources = edges.graph.lengths
        propagate: Any = self.propagate
        index = edges.graph.edge_index
        out: Tensor = propagate(index, size=(sources, targets), value=value, alpha=weights)
        return out

    def message(self, value: Tensor, alpha: Tensor) -> Tensor:
        """Return the message of each edge, [E, H, C]; PyG calls this."""
        return value * alpha[..., None]

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Do nothing: PyG would generate a source file for ``propagate``, which seldom runs here."""

    def __prepare_scriptable__(self) -> NoReturn:  # called by torch.jit.script
        name = type(self).__name__
        raise NotImplementedError(
            f"{name}: TorchScript is not supported; use torch.compile, or torch.export with a Graph"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"


def _check_channels(in_channels: Any) -> Channels:
    if not isinstance(in_channels, (tuple, list)):
        return as_count("in_channels", in_channels, least=-1)
    if len(in_channels) != 2:
        raise ValueError(f"in_channels: wanted a number or a pair for (sources, targets), got {in_channels}")
    source, target = (as_count("in_channels", size, least=-1) for size in in_channels)
    return source, target


class GAT(Conv):
    """A graph attention layer: self-loops, a residual and a bias; its signature is ``GATConv``'s."""

    bias: Parameter | None
    res: torch.nn.Linear | None

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
        super().__init__(in_channels, out_channels, heads, concat, dropout, edge_dim, others)
        self.negative_slope = negative_slope
        self.add_self_loops = add_self_loops
        self.fill_value = check_fill(fill_value)
        self.residual = residual
        self._make_weights(bias)  # in the order in which PyG makes and draws them
        self.res = glorot_linear(self._in_sizes[1], self._out_size) if residual else None
        if bias:
            self.bias = Parameter(torch.empty(self._out_size))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def _make_weights(self, bias: bool) -> None:
        """Make the linear maps and attention vectors of the operator."""
        raise NotImplementedError

    def _read_edges(self, edge_index: Any, edge_attr: Tensor | None, sizes: tuple[int, int | None]) -> Edges:
        return read_edges(
            *(edge_index, edge_attr, sizes), add_self_loops=self.add_self_loops, fill_value=self.fill_value
        )

    def register_edge_update_forward_pre_hook(self, hook: Any) -> NoReturn:
        """Raise: PyG's step ``edge_update`` does not run here."""
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

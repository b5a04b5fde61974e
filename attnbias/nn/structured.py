"""Attention with structured scores: more score dimensions for near tokens, or scores of full rank.

Initialisation, scales and learning rates follow "Customizing the inductive biases of softmax attention using
structured matrices" (Kuang et al., 2025). The output projection starts at zero, so a new layer adds nothing
to its residual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attention import attention
from ..relations import Causal, Relation
from ..scores.multilevel import MultiLevel, Normalize
from ..structured import BTT
from .relational import join_heads, split_heads

BASE_WIDTH = 768  # the fan-in whose learning rate is the base rate
WRITTEN_OUT = 256  # up to this width a CPU multiplies by a train's dense matrix faster than by its factors


class _Structured(nn.Module):
    """The part that the layers share: values, the output projection and learning rates."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        relation: Relation | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if heads < 1 or d_model % heads:
            raise ValueError(f"heads: wanted a number that divides d_model = {d_model}, got {heads}")
        self.d_model, self.heads, self.head_size = d_model, heads, d_model // heads
        self.relation = relation
        self.made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.value = self._linear()
        self.output = self._linear()
        nn.init.zeros_(self.output.weight)

    def _linear(self) -> nn.Linear:
        layer = nn.Linear(self.d_model, self.d_model, bias=False, **self.made)
        nn.init.normal_(layer.weight, std=self.d_model**-0.5)
        return layer

    def _norm(self, size: int) -> nn.LayerNorm:
        return nn.LayerNorm(size, bias=False, **self.made)

    def _core(self, fan_in: int, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, **self.made) * fan_in**-0.5)

    def _finish(self, x: Tensor, query: Tensor, key: Tensor, **options: Any) -> Tensor:
        """Attend with queries and keys [B, H, T, .] to the values of x [B, T, d_model], and project."""
        value = split_heads(self.value(x), self.heads)
        projected: Tensor = self.output(join_heads(attention(query, key, value, self.relation, **options)))
        return projected

    def fan_ins(self) -> dict[Tensor, int]:
        """Return the fan-in of each matrix, which sets its learning rate."""
        linear = [layer for layer in self.children() if isinstance(layer, nn.Linear)]
        return {layer.weight: layer.in_features for layer in linear}

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """Group the layer's parameters by learning rate, for an optimiser; see :func:`parameter_groups`."""
        return parameter_groups(self, lr)


class MLRAttention(_Structured):
    """Attention that scores near pairs in more dimensions than far ones (see ``MultiLevel``).

    Queries and keys are normalised over the whole head before its dimensions are split into levels.

    Args:
        d_model: features per token.
        heads: number of heads.
        ranks: dimensions per level; they sum to ``d_model / heads``.
        relation: which token attends to which.
        widths: positions per block, for each level; None halves from the sequence's length.
        normalize: as in ``MultiLevel``.
        scale: factor of the score. One level with scale 8 is the plain attention of Kuang et al.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: if the sizes do not fit.

    Example:
        >>> import torch
        >>> from attnbias.nn import MLRAttention
        >>> layer = MLRAttention(32, 2, ranks=[8, 4, 4])
        >>> layer(torch.randn(3, 100, 32)).shape
        torch.Size([3, 100, 32])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        ranks: Sequence[int],
        relation: Relation | None = Causal(),  # noqa: B008 - a frozen value
        *,
        widths: Sequence[int | None] | None = None,
        normalize: Normalize = "pair",
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, heads, relation, device, dtype)
        self.score = MultiLevel(ranks, widths, normalize)
        _check_ranks(self.score.ranks, self.head_size)
        self.scale = scale
        self.query, self.key = self._linear(), self._linear()
        self.query_norm, self.key_norm = self._norm(self.head_size), self._norm(self.head_size)

    def forward(self, x: Tensor) -> Tensor:
        """Attend among tokens x [B, T, d_model]."""
        query, key = (
            norm(project(x).unflatten(-1, (self.heads, -1))).transpose(1, 2)
            for project, norm in ((self.query, self.query_norm), (self.key, self.key_norm))
        )
        return self._finish(x, query, key, score=self.score, scale=self.scale)


class BilinearMLRAttention(_Structured):
    """Attention by a form ``x^T M x'`` whose M is multi-level low-rank in the features.

    Level l cuts the features into ``2**l`` slices, has ``ranks[l]`` score dimensions per slice, and is
    normalised on its own. The form has rank ``sum of ranks[l] * 2**l`` for as many parameters as the usual
    one of rank ``d_model / heads``.

    Args:
        d_model: features per token; ``2**(levels - 1)`` divides it.
        heads: number of heads.
        ranks: dimensions per slice, for each level; they sum to ``d_model / heads``.
        relation: which token attends to which.
        scaling: "sp" divides a level's score by the root of its dimensions, "mup" by its dimensions over 8.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: if the sizes do not fit.

    Example:
        >>> import torch
        >>> from attnbias.nn import BilinearMLRAttention
        >>> layer = BilinearMLRAttention(64, 8, ranks=[2, 2, 2, 2])
        >>> layer(torch.randn(3, 10, 64)).shape, layer.score_size
        (torch.Size([3, 10, 64]), 30)
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        ranks: Sequence[int],
        relation: Relation | None = Causal(),  # noqa: B008 - a frozen value
        *,
        scaling: Literal["sp", "mup"] = "sp",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, heads, relation, device, dtype)
        self.ranks = tuple(ranks)
        _check_ranks(self.ranks, self.head_size)
        _check_scaling(scaling)
        slices = [2**level for level in range(len(self.ranks))]
        if d_model % slices[-1]:
            raise ValueError(
                f"ranks: wanted 2**(levels - 1) to divide d_model = {d_model}, got {len(ranks)} levels"
            )
        sizes = [rank * count for rank, count in zip(self.ranks, slices, strict=True)]
        self.score_size = sum(sizes)
        self.factors = [size**-0.5 if scaling == "sp" else 8 / size for size in sizes]
        self.query, self.key = (
            nn.ParameterList(
                self._core(d_model // count, count, d_model // count, heads * rank)
                for rank, count in zip(self.ranks, slices, strict=True)
            )
            for _ in range(2)
        )
        self.query_norms, self.key_norms = (nn.ModuleList(map(self._norm, sizes)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Attend among tokens x [B, T, d_model]."""
        query = [
            part * factor
            for part, factor in zip(self._project(x, self.query, self.query_norms), self.factors, strict=True)
        ]
        key = self._project(x, self.key, self.key_norms)
        both = (torch.cat(parts, -1).transpose(1, 2) for parts in (query, key))
        return self._finish(x, *both, scale=1.0)

    def _project(self, x: Tensor, cores: nn.ParameterList, norms: nn.ModuleList) -> list[Tensor]:
        """Project to each level's score dimensions, [B, T, H, rank * slices], the rank before the slice."""
        parts = []
        for core, norm in zip(cores, norms, strict=True):
            sliced = x.unflatten(-1, core.shape[:2])  # [B, T, slices, features]
            made = torch.einsum("btkm,kmo->btok", sliced, cap_rms(core, core.shape[1], core.shape[2]))
            parts.append(norm(made.unflatten(2, (self.heads, -1)).flatten(3)))
        return parts

    def fan_ins(self) -> dict[Tensor, int]:
        """Return the fan-in of each matrix, which sets its learning rate."""
        cores = [*self.query, *self.key]
        return super().fan_ins() | {core: core.shape[1] for core in cores}


class BilinearBTTAttention(_Structured):
    """Attention by a form ``x^T M x'`` whose M is a block tensor train (see ``attnbias.structured.BTT``).

    M has full rank for ~ 2 d_model**1.5 numbers. The query is the token itself, shared by all heads; the key
    is ``M x'``, normalised.

    Args:
        d_model: features per token, and dimensions of the score.
        heads: number of heads.
        relation: which token attends to which.
        rank: s of the block tensor train.
        scaling: "sp" divides the score by the root of ``d_model``, "mup" by ``d_model``.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: if the sizes do not fit.

    Example:
        >>> import torch
        >>> from attnbias.nn import BilinearBTTAttention
        >>> layer = BilinearBTTAttention(64, 8)
        >>> layer(torch.randn(3, 10, 64)).shape
        torch.Size([3, 10, 64])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        relation: Relation | None = Causal(),  # noqa: B008 - a frozen value
        *,
        rank: int = 1,
        scaling: Literal["sp", "mup"] = "sp",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, heads, relation, device, dtype)
        if rank < 1:
            raise ValueError(f"rank: wanted at least 1, got {rank}")
        _check_scaling(scaling)
        few, many = factor_width(d_model)
        self.shape = (few, many, rank)
        self.scale = d_model**-0.5 if scaling == "sp" else 1 / d_model
        self.right = self._core(many, few, many, heads * many * rank)
        self.left = self._core(few * rank, heads * many, few, few * rank)
        self.key_norm = self._norm(d_model)

    def keys(self, x: Tensor) -> Tensor:
        """Return ``M x`` per head before its norm, [B, T, H, d_model]."""
        few, many, rank = self.shape
        right = cap_rms(self.right, many, self.heads * many * rank)
        left = cap_rms(self.left, few * rank, few)
        # The trains of all heads are one train with rows (i, head, j); a head's rows are (i, j).
        train = BTT(left.unflatten(2, (few, rank)), right.unflatten(2, (-1, rank)))
        if x.is_cpu and self.d_model <= min(WRITTEN_OUT, x.shape[:-1].numel()):
            # More multiply-adds, but in one large product: 6 times as fast at a width of 32, 2 at 128.
            matrix = train.entries().unflatten(1, (self.heads, many)).permute(3, 4, 1, 0, 2)
            made: Tensor = (x @ matrix.reshape(self.d_model, -1)).unflatten(-1, (self.heads, -1))
            return made
        rows = train.apply(x.flatten(0, -2).T)  # not @, which torch.compile cannot trace
        rows = rows.view(few, self.heads, many, *x.shape[:-1])  # [i, H, j, B, T]
        return rows.permute(3, 4, 1, 0, 2).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        """Attend among tokens x [B, T, d_model]."""
        key = self.key_norm(self.keys(x)).transpose(1, 2)  # [B, H, T, d_model]
        query = x[:, None].expand(-1, self.heads, -1, -1)  # shared by all heads: a stride of 0, no copy
        return self._finish(x, query, key, scale=self.scale)

    def fan_ins(self) -> dict[Tensor, int]:
        """Return the fan-in of each matrix, which sets its learning rate."""
        few, many, rank = self.shape
        return super().fan_ins() | {self.right: many, self.left: few * rank}


def cap_rms(weight: Tensor, fan_in: int, fan_out: int) -> Tensor:
    """Scale a weight down so that its RMS is at most ``sqrt(min(fan_in, fan_out)) / fan_in``."""
    most = math.sqrt(min(fan_in, fan_out)) / fan_in
    rms = (weight.square().mean() + 1e-8).sqrt()
    return weight / (rms / most).clamp(min=1)


def factor_width(width: int) -> tuple[int, int]:
    """Split ``width`` into few * many, where many is its smallest divisor above its root.

    Example:
        >>> [factor_width(width) for width in (16, 64, 512, 768)]
        [(2, 8), (4, 16), (16, 32), (24, 32)]
    """
    many = next(n for n in range(math.isqrt(width) + 1, width + 1) if width % n == 0)
    return width // many, many


def parameter_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Group a model's parameters by learning rate, for an optimiser: matrices learn at ``lr * 768 / fan_in``.

    Matrices are the weights of linear layers and of the layers in this file. All other parameters, such as
    embeddings and gains, learn at ``lr``.

    Example:
        >>> from torch import nn
        >>> groups = parameter_groups(nn.Sequential(nn.Embedding(9, 96), nn.Linear(96, 9)), lr=0.1)
        >>> [(group["lr"], len(group["params"])) for group in groups]
        [(0.1, 2), (0.8, 1)]
    """
    fan_ins: dict[Tensor, int] = {}
    for module in model.modules():
        if isinstance(module, _Structured):
            fan_ins |= module.fan_ins()
        elif isinstance(module, nn.Linear):
            fan_ins[module.weight] = module.in_features
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        multiplier = BASE_WIDTH / fan_ins[parameter] if parameter in fan_ins else 1.0
        groups.setdefault(lr * multiplier, []).append(parameter)
    return [{"params": params, "lr": rate} for rate, params in sorted(groups.items(), key=lambda x: x[0])]


def _check_ranks(ranks: Sequence[int], head_size: int) -> None:
    if sum(ranks) != head_size or min(ranks) < 1:
        raise ValueError(f"ranks: wanted numbers of at least 1 that sum to {head_size}, got {list(ranks)}")


def _check_scaling(scaling: str) -> None:
    if scaling not in ("sp", "mup"):
        raise ValueError(f"scaling: wanted 'sp' or 'mup', got {scaling!r}")

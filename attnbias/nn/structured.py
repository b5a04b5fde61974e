"""Attention with structured scores: more score dimensions for near tokens, or scores of full rank.

Initialisation, scales and learning rates follow "Customizing the inductive biases of softmax attention using
structured matrices" (Kuang et al., 2025). The output projection starts at zero, so a new layer adds nothing
to its residual. Calls take the arguments of ``RelationalAttention``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..relations import Causal, Full, Relation
from ..scores.multilevel import MultiLevel, Normalize
from ..structured import BTT, MLR, StructuredMatrix
from .cache import MultiLevelCache
from .relational import AttentionLayer, join_heads, split_heads

BASE_WIDTH = 768  # the fan-in whose learning rate is the base rate
LEAST_FAN_IN = 16  # of a matrix that learns faster than the base rate
WRITTEN_OUT = 256  # up to this width a CPU multiplies by a train's dense matrix faster than by its factors


class _Structured(AttentionLayer):
    """The part that the layers share: values, the output projection and learning rates."""

    def __init__(
        self,
        d_model: int,
        heads: int,
        relation: Relation | None,
        dropout: float,
        softcap: float | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        if heads < 1 or d_model % heads:
            raise ValueError(f"heads: wanted a number that divides d_model = {d_model}, got {heads}")
        super().__init__(d_model, heads, relation, dropout, softcap)
        self.head_size = d_model // heads
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

    def join(self, h: Tensor) -> Tensor:
        """See :class:`AttentionLayer`."""
        out: Tensor = self.output(join_heads(h))
        return out

    def fan_ins(self) -> dict[Tensor, int]:
        """Return the fan-in of each matrix that is not a linear layer's, which sets its learning rate."""
        return {}

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
        dropout: fraction of the weights to drop in training.
        softcap: bound on the scores, as in ``attention``.
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
        dropout: float = 0.0,
        softcap: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, heads, relation, dropout, softcap, device, dtype)
        self.score = MultiLevel(ranks, widths, normalize)
        _check_ranks(self.score.ranks, self.head_size)
        self.scale: float = scale
        self.query, self.key = self._linear(), self._linear()
        self.query_norm, self.key_norm = self._norm(self.head_size), self._norm(self.head_size)

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`AttentionLayer`."""
        query, key = (
            norm(project(tokens).unflatten(-1, (self.heads, -1))).transpose(-3, -2)
            for tokens, project, norm in (
                (x, self.query, self.query_norm),
                (memory, self.key, self.key_norm),
            )
        )
        return query, key, split_heads(self.value(memory), self.heads)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, *, cache: MultiLevelCache | None = None, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each token of ``x``; see :class:`RelationalAttention`.

        Args:
            x: tokens that attend, [n, d_model] or [B, n, d_model].
            memory: tokens that are attended to; ``x`` itself if None.
            cache: keys and values of the tokens before ``x``, to which those of ``x`` are added. For
                inference: no weight is dropped.
            **options: ``relation``, ``terms``, ``q_start``, ``return_weights``, ``mesh`` and ``length``, as
                there.

        Raises:
            ValueError: if a shape does not fit, or options do not go together.
            TypeError: if ``x``, ``memory`` or ``cache`` is of another kind.
        """
        if cache is None:
            return super().forward(x, memory, **options)
        if not isinstance(cache, MultiLevelCache):
            raise TypeError(f"cache: wanted a MultiLevelCache or None, got {type(cache).__name__}")
        self._check_tokens(x, x)
        if memory is not None or options or self.softcap or cache.score != self.score:
            raise ValueError(
                "cache: wanted one with the layer's score, and neither memory, options nor softcap with it"
            )
        relation = Full() if self.relation is None else self.relation
        return self.join(cache.attend(*self.project(x, x), relation, scale=self.scale))


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
        dropout: fraction of the weights to drop in training.
        softcap: bound on the scores, as in ``attention``.
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
        dropout: float = 0.0,
        softcap: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, heads, relation, dropout, softcap, device, dtype)
        self.ranks = tuple(ranks)
        _check_ranks(self.ranks, self.head_size)
        _check_scaling(scaling)
        slices = [2**level for level in range(len(self.ranks))]
        if d_model % slices[-1]:
            raise ValueError(
                f"ranks: wanted 2**(levels - 1) to divide d_model = {d_model}, got {len(ranks)} levels"
            )
        self.scale = 1.0
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

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`AttentionLayer`."""
        # The matrices of all heads are one, whose r holds the heads, too.
        cores = ([cap_rms(core, *core.shape[1:]) for core in side] for side in (self.query, self.key))
        query, key = [], []
        for level, query_norm, key_norm, factor in zip(
            MLR(*cores).levels(x, memory), self.query_norms, self.key_norms, self.factors, strict=True
        ):
            of_query, of_key = (
                part.unflatten(-2, (self.heads, -1)).flatten(-2)  # [..., n, H, r * slices]
                for part in level
            )
            query.append(query_norm(of_query) * factor)
            key.append(key_norm(of_key))
        joined, keys = (torch.cat(parts, -1).transpose(-3, -2) for parts in (query, key))
        return joined, keys, split_heads(self.value(memory), self.heads)

    def fan_ins(self) -> dict[Tensor, int]:
        """Return the fan-in of each core, which sets its learning rate."""
        return {core: core.shape[1] for core in (*self.query, *self.key)}


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
        dropout: fraction of the weights to drop in training.
        softcap: bound on the scores, as in ``attention``.
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
        dropout: float = 0.0,
        softcap: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, heads, relation, dropout, softcap, device, dtype)
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
        """Return ``M x`` per head before its norm, [..., n, H, d_model]."""
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
        rows: Tensor = train.split(x, x)[1].unflatten(-1, (few, self.heads, many))
        joined: Tensor = rows.transpose(-3, -2).flatten(-2)
        return joined

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`AttentionLayer`."""
        key = self.key_norm(self.keys(memory)).transpose(-3, -2)  # [..., H, n, d_model]
        return _share(x, self.heads), key, split_heads(self.value(memory), self.heads)

    def fan_ins(self) -> dict[Tensor, int]:
        """Return the fan-in of each core, which sets its learning rate."""
        few, many, rank = self.shape
        return {self.right: many, self.left: few * rank}


class BilinearAttention(_Structured):
    """Attention by a form ``x^T M x'`` for each head, with any structured matrix for M.

    The matrices are where training starts: their factors become the layer's parameters. Nothing is normalised
    or capped. Low-rank matrices, of one level or several, score in as many dimensions as their factors have,
    others in ``d_model``.

    Args:
        matrices: one for each head, from ``attnbias.structured``, [d_model, d_model]. They may be of several
            kinds, on one device and of one dtype.
        relation: which token attends to which.
        scale: factor of the score; ``d_model**-0.5`` if None.
        dropout: fraction of the weights to drop in training.
        softcap: bound on the scores, as in ``attention``.

    Raises:
        TypeError: if ``matrices`` is not a list of structured matrices.
        ValueError: if the sizes do not fit.

    Example:
        >>> import torch
        >>> from attnbias.nn import BilinearAttention
        >>> from attnbias.structured import LowRank, Monarch
        >>> blocks = Monarch(torch.randn(8, 8, 8) / 8, torch.randn(8, 8, 8) / 8)
        >>> few = LowRank(torch.randn(64, 3) / 8, torch.randn(64, 3) / 8)
        >>> layer = BilinearAttention([blocks, few])
        >>> layer(torch.randn(3, 10, 64)).shape
        torch.Size([3, 10, 64])
    """

    def __init__(
        self,
        matrices: Sequence[StructuredMatrix],
        relation: Relation | None = Causal(),  # noqa: B008 - a frozen value
        *,
        scale: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        wanted = "matrices: wanted a list of structured matrices, one for each head"
        if not isinstance(matrices, (list, tuple)):
            raise TypeError(f"{wanted}, got {type(matrices).__name__}")
        if not matrices:
            raise ValueError(f"{wanted}, got none")
        for matrix in matrices:
            if not isinstance(matrix, StructuredMatrix):
                raise TypeError(f"{wanted}, got {type(matrix).__name__} in it")
            if matrix.shape != (matrices[0].shape[0],) * 2:
                shapes = [list(matrix.shape) for matrix in matrices]
                raise ValueError(f"matrices: wanted square ones of one size, got {shapes}")
        some, d_model = matrices[0].parameters[0], matrices[0].shape[0]
        super().__init__(d_model, len(matrices), relation, dropout, softcap, some.device, some.dtype)
        self.scale: float = d_model**-0.5 if scale is None else scale
        self.matrices = nn.ModuleList(map(_Factors, matrices))

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`AttentionLayer`."""
        queries, keys = zip(*(factors().split(x, memory) for factors in self.matrices), strict=True)
        # A matrix without low rank leaves its queries as they are; if all do, the heads share them.
        query = _share(x, self.heads) if all(part is x for part in queries) else _stack(queries)
        return query, _stack(keys), split_heads(self.value(memory), self.heads)

    def fan_ins(self) -> dict[Tensor, int]:
        """Return the fan-in of each factor, but small ones: nothing caps these weights."""
        made = [factors() for factors in self.matrices]
        pairs = [pair for each in made for pair in zip(each.parameters, each.fan_ins, strict=True)]
        return {factor: fan_in for factor, fan_in in pairs if fan_in >= LEAST_FAN_IN}


class _Factors(nn.Module):
    """A structured matrix whose tensors are this module's parameters, or buffers if they are permutations."""

    def __init__(self, matrix: StructuredMatrix) -> None:
        super().__init__()
        self.form = matrix.with_tensors(x.to("meta") for x in matrix.tensors)  # its shape, without numbers
        self.names: list[str] = []
        for x in matrix.tensors:
            is_factor = any(x is factor for factor in matrix.parameters)
            self.names.append(f"{'factor' if is_factor else 'order'}{len(self.names)}")
            own = x.detach().clone()
            setattr(self, self.names[-1], nn.Parameter(own) if is_factor else nn.Buffer(own))

    def forward(self) -> StructuredMatrix:
        """Return the matrix."""
        return self.form.with_tensors(getattr(self, name) for name in self.names)


def _share(x: Tensor, heads: int) -> Tensor:
    """Give all heads the same rows [..., heads, n, size]: a stride of 0, no copy."""
    return x.unsqueeze(-3).expand(*x.shape[:-2], heads, *x.shape[-2:])


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Put the rows of each head together, [..., heads, n, size]; short ones end with zeros."""
    size = max(part.shape[-1] for part in parts)
    return torch.stack([nn.functional.pad(part, (0, size - part.shape[-1])) for part in parts], -3)


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


def parameter_groups(
    model: nn.Module, lr: float, *, exclude: Iterable[nn.Module] = ()
) -> list[dict[str, Any]]:
    """Group a model's parameters by learning rate, for an optimiser: matrices learn at ``lr * 768 / fan_in``.

    Matrices are the weights of this file's layers, but for factors of ``BilinearAttention`` with a fan-in
    below 16, and those of other linear layers with at least 16 inputs. All else, such as embeddings and
    gains, learns at ``lr``; so does a linear layer of fewer inputs, which reads coordinates.

    Args:
        model: its parameters are grouped.
        lr: the base rate.
        exclude: modules of the model whose parameters all learn at ``lr``, such as a linear layer that reads
            one-hot tokens.

    Raises:
        ValueError: if a module to exclude is not in the model.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(1, 96), nn.Linear(96, 96), nn.Linear(96, 9))
        >>> groups = parameter_groups(model, lr=0.1, exclude=[model[2]])
        >>> [(group["lr"], len(group["params"])) for group in groups]
        [(0.1, 5), (0.8, 1)]
    """
    fan_ins: dict[Tensor, int] = {}
    for module in model.modules():
        if isinstance(module, _Structured):
            own = (layer for layer in module.children() if isinstance(layer, nn.Linear))
            fan_ins |= module.fan_ins() | {layer.weight: layer.in_features for layer in own}
        elif isinstance(module, nn.Linear) and module.in_features >= LEAST_FAN_IN:
            fan_ins[module.weight] = module.in_features
    known = set(model.modules())
    for module in exclude:
        if module not in known:
            raise ValueError(f"exclude: wanted modules of the model, got another {type(module).__name__}")
        for parameter in module.parameters():
            fan_ins.pop(parameter, None)
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

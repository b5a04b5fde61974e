"""The layer that every mechanism is made of: attention over a relation, with its projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..arguments import as_flag
from ..attention import attention
from ..layouts.layout import Layout
from ..op.problem import Options
from ..op.weights import attention_weights
from ..op.words import describe
from ..relations import Full, Relation
from ..relations.relation import resolve_start
from ..scores.multilevel import MultiLevel
from ..scores.terms import Term
from ..sharding import Shard
from ..sharding.cache import cached_shard
from .rotary import Rotary

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class AttentionLayer(nn.Module):
    """The part that all attention layers share: a call with memory, positions and terms, tokens to tokens.

    A subclass defines ``project`` and ``join``, and may set ``score`` and ``scale``.

    Args:
        d_model: features per token.
        heads: number of heads.
        relation: which token attends to which; None relates all. A call may override it.
        dropout: fraction of the weights to drop in training.
        softcap: bound on the scores, as in ``attention``.
        rotary: rotates queries and keys by their position; None does not.

    Raises:
        ValueError: if the relation is for another number of heads.
        TypeError: if ``relation`` is not a relation.
    """

    score: MultiLevel | None = None  # in place of the dot product
    scale: float | None = None

    def __init__(
        self,
        d_model: int,
        heads: int,
        relation: Relation | None,
        dropout: float,
        softcap: float | None,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.heads = d_model, heads
        self.relation = relation if relation is None else check_relation(relation, heads)
        self.dropout, self.softcap, self.rotary = dropout, softcap, rotary

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries of x, and the keys and values of memory, [..., heads, n, size]."""
        raise NotImplementedError

    def join(self, h: Tensor) -> Tensor:
        """Return tokens [..., n, d_model] from what the heads gathered, [..., heads, n, size]."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        relation: Relation | Layout | Shard | None = None,
        terms: Sequence[Term] = (),
        q_start: int | Literal["end"] = 0,
        return_weights: bool = False,
        mesh: DeviceMesh | ProcessGroup | None = None,
        length: int | tuple[int, int] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from each token of ``x``.

        Args:
            x: tokens that attend, [n, d_model] or [B, n, d_model].
            memory: tokens that are attended to, with as many dimensions; ``x`` itself if None.
            relation: replaces the layer's own; a Layout works too. With a Shard, ``x`` and ``memory`` are the
                tokens of this rank.
            terms: score terms, as in ``attention``.
            q_start: position of the first token of ``x`` in ``memory``.
            return_weights: also return the weights before dropout, as a dense tensor; for short sequences.
            mesh: shard the relation over these ranks. ``x`` is this rank's part of the sequence, in order:
                ``ab.shard(relation, length, mesh, split="even").scatter(whole, -2)``.
            length: with ``mesh``, the tokens of all ranks; or those of ``x`` and of ``memory``.

        Returns:
            Tokens shaped like ``x``. With ``return_weights``, also the weights [B, heads, n, m], without B if
            x has none, and without the heads if ``heads == 1``.

        Raises:
            ValueError: if a shape does not fit, or options do not go together.
            TypeError: if ``x`` or ``memory`` is not a tensor.
        """
        memory = x if memory is None else memory
        self._check_tokens(x, memory)
        used = self.relation if relation is None else relation
        if mesh is not None or length is not None:
            used, q_start = make_shard(used, mesh, length, q_start), 0
        wants_weights = as_flag("return_weights", return_weights)
        if isinstance(used, Shard) and wants_weights:
            raise ValueError(
                "return_weights: wanted False with a shard, of which a rank has some tokens, got True; "
                "gather the tokens and call the layer with the relation"
            )
        query, key, value = self.project(x, memory)
        start = resolve_start(q_start, x.shape[-2], memory.shape[-2])
        if self.rotary is not None:
            of_queries, of_keys = (
                (used.positions, used.key_positions) if isinstance(used, Shard) else (start, 0)
            )
            query, key = self.rotary(query, of_queries), self.rotary(key, of_keys)
        scoring: Options = {"score": self.score, "scale": self.scale, "softcap": self.softcap}
        options: Options = {**scoring, "terms": terms, "q_start": start}
        in_training: Options = {**options, "dropout_p": self.dropout if self.training else 0.0}
        out = self.join(attention(query, key, value, used, **in_training))
        if not wants_weights or isinstance(used, Shard):
            return out
        weights = attention_weights(query, key, used, **options)
        return out, weights.squeeze(-3) if self.heads == 1 else weights

    def _check_tokens(self, x: Tensor, memory: Tensor) -> None:
        for name, tokens in (("x", x), ("memory", memory)):
            if not isinstance(tokens, Tensor):
                raise TypeError(f"{name}: wanted a tensor, got {type(tokens).__name__}")
            if tokens.dim() != x.dim() or tokens.dim() not in (2, 3) or tokens.shape[-1] != self.d_model:
                raise ValueError(
                    f"{name}: wanted [n, {self.d_model}] or [B, n, {self.d_model}], x and memory alike, "
                    f"got {list(tokens.shape)}"
                )

    def extra_repr(self) -> str:
        """See :class:`torch.nn.Module`."""
        return f"{self.d_model}, heads={self.heads}, relation={self.relation!r}"


class RelationalAttention(AttentionLayer):
    """Attention over a relation; the choice of relation makes the mechanism.

    Each token gets the mean of its neighbours' values, weighted by the softmax of
    ``query @ key / sqrt(head_size)`` over the neighbours. A token without neighbours gets zeros.

    Over several processes: a plan of tensor parallelism with ``ColwiseParallel`` for ``query``, ``key`` and
    ``value`` and ``RowwiseParallel`` for ``out`` gives each rank some of the heads. A call with a Shard, or
    with ``mesh=`` and ``length=``, gives each rank some of the tokens.

    Args:
        d_model: features per token.
        heads: number of heads.
        relation: which token attends to which; None relates all. A call may override it.
        head_size: features per head, ``d_model / heads`` if None.
        key_heads: heads of keys and values; divides ``heads``, and equals it if None.
        bias: give the projections a bias.
        project: end with a linear layer over the heads; None means yes if there are several heads. (One head
            without it is the layer of the paper's appendix.)
        dropout: fraction of the weights to drop in training.
        softcap: bound on the scores, as in ``attention``.
        rotary: rotates queries and keys by their position; None does not.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: if the sizes do not divide, or the relation is for another number of heads.
        TypeError: if ``relation`` is not a relation.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> from attnbias.nn import RelationalAttention
        >>> layer = RelationalAttention(32, heads=4, relation=ab.Causal() & ab.Window(before=15))
        >>> layer(torch.randn(2, 100, 32)).shape
        torch.Size([2, 100, 32])
        >>> h, weights = layer(torch.randn(100, 32), return_weights=True)
        >>> h.shape, weights.shape
        (torch.Size([100, 32]), torch.Size([4, 100, 100]))
    """

    def __init__(
        self,
        d_model: int,
        heads: int = 1,
        relation: Relation | None = None,
        *,
        head_size: int | None = None,
        key_heads: int | None = None,
        bias: bool = False,
        project: bool | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        rotary: Rotary | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, heads, relation, dropout, softcap, rotary)
        key_heads = heads if key_heads is None else key_heads
        if head_size is None:
            if heads < 1 or d_model % heads:
                raise ValueError(f"heads: wanted a number that divides d_model = {d_model}, got {heads}")
            head_size = d_model // heads
        if key_heads < 1 or heads % key_heads:
            raise ValueError(f"key_heads: wanted a number that divides heads = {heads}, got {key_heads}")
        if rotary is not None and rotary.head_size != head_size:
            raise ValueError(f"rotary: wanted one for head_size = {head_size}, got {rotary.head_size}")
        self.key_heads, self.head_size = key_heads, head_size
        own: dict[str, Any] = {"bias": as_flag("bias", bias), "device": device, "dtype": dtype}
        self.query = nn.Linear(d_model, heads * head_size, **own)
        self.key = nn.Linear(d_model, key_heads * head_size, **own)
        self.value = nn.Linear(d_model, key_heads * head_size, **own)
        width = heads * head_size
        has_out = heads > 1 if project is None else as_flag("project", project)
        self.out = nn.Linear(width, d_model, **own) if has_out else nn.Identity()

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`AttentionLayer`."""
        # By their size, not their number: with tensor parallelism a rank has some of the heads.
        query, key, value = (
            each.unflatten(-1, (-1, self.head_size)).transpose(-3, -2)  # [B, H or Hk, n, D], or without B
            for each in (self.query(x), self.key(memory), self.value(memory))
        )
        return query, key, value

    def join(self, h: Tensor) -> Tensor:
        """See :class:`AttentionLayer`."""
        out: Tensor = self.out(join_heads(h))
        return out


def make_shard(relation: object, mesh: object, length: object, q_start: int | Literal["end"]) -> Shard:
    """Shard a relation over ranks that hold parts of the sequence in order; made once.

    Raises:
        ValueError: unless a mesh and a length are given.
        TypeError: for a Layout or a Shard.
    """
    if mesh is None:
        raise ValueError(f"length: wanted None without mesh=, got {length!r}")
    if length is None:
        raise ValueError("length: wanted the number of tokens of all ranks with mesh=, got None")
    relation = Full() if relation is None else relation
    if not isinstance(relation, Relation):
        raise TypeError(f"relation: wanted a Relation or None with mesh=, got {type(relation).__name__}")
    lengths = (length, length) if isinstance(length, int) else length
    return cached_shard(relation, lengths, mesh, split="even", q_start=q_start)  # type: ignore[arg-type]


def check_relation(relation: Relation, heads: int) -> Relation:
    """Return a relation that fits a number of heads, or raise."""
    if not isinstance(relation, Relation):
        raise TypeError(f"relation: wanted a relation or None, got {describe(relation)}")
    if relation.head_count not in (None, 1, heads):
        name = type(relation).__name__
        raise ValueError(f"relation: wanted one for {heads} heads, got a {name} for {relation.head_count}")
    return relation


def split_heads(x: Tensor, heads: int) -> Tensor:
    """View [..., n, heads * D] as [..., heads, n, D]."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(-3, -2)


def join_heads(x: Tensor) -> Tensor:
    """Turn [..., heads, n, D] into [..., n, heads * D]; for the result of ``attention`` this is a view."""
    return x.transpose(-3, -2).flatten(-2)

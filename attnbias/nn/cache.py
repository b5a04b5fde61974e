"""A cache of keys and values for decoding with a multi-level score."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention import attention
from ..op.words import describe
from ..relations import Causal, Relation
from ..scores.multilevel import MultiLevel


class MultiLevelCache:
    """The keys and values of a sequence so far, without the key dimensions that no later token reads.

    Level l of a ``MultiLevel`` score compares the tokens of one block. When the sequence enters the next
    block, the level's dimensions of all keys before it are dropped. Values stay. After n tokens a key head
    holds ``ranks[l] * (n % widths[l])`` numbers of level l, ``ranks[l] * n`` of one that all tokens share.

    Args:
        score: with widths, since halving those of each length would ask for keys that are gone.

    Raises:
        TypeError: if ``score`` is not a ``MultiLevel``.
        ValueError: if it has no widths.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> from attnbias.nn import MultiLevelCache
        >>> cache = MultiLevelCache(ab.MultiLevel([8, 4, 4], widths=[None, 32, 8]))
        >>> q, k, v = torch.randn(3, 1, 2, 101, 16)
        >>> prompt = cache.attend(q[:, :, :100], k[:, :, :100], v[:, :, :100])
        >>> step = cache.attend(q[:, :, 100:], k[:, :, 100:], v[:, :, 100:])
        >>> out = ab.attention(q, k, v, ab.Causal(), score=cache.score)
        >>> torch.testing.assert_close(step, out[:, :, 100:])
        >>> cache.length, cache.nbytes, cache.full_nbytes
        (101, 19712, 25856)
    """

    def __init__(self, score: MultiLevel) -> None:
        if not isinstance(score, MultiLevel):
            raise TypeError(f"score: wanted a MultiLevel, got {type(score).__name__}")
        if score.widths is None:
            raise ValueError("score: wanted widths, which stay while the sequence grows, got None")
        self.score, self.length = score, 0
        self._widths = tuple(width or 0 for width in score.widths)  # 0: all tokens share the block
        self._levels: list[Tensor] = []  # of each level, the keys of its last block, [B, Hk, count, rank]
        self._value = torch.empty(0)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(x.untyped_storage().nbytes() for x in (*self._levels, self._value))

    @property
    def full_nbytes(self) -> int:
        """Bytes of a cache that keeps all keys whole."""
        rows = self._value.shape[:-1].numel() if self._levels else 0
        return rows * (sum(self.score.ranks) + self._value.shape[-1]) * self._value.element_size()

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        relation: Relation = Causal(),  # noqa: B008 - a frozen value
        *,
        scale: float = 1.0,
    ) -> Tensor:
        """Add the tokens that come next, and attend from them to all so far.

        A prompt runs on the kernels, a single token on a product per level with the keys that are held.

        Args:
            query: [B, H, n, D] or [H, n, D].
            key: [B, Hk, n, D].
            value: [B, Hk, n, E].
            relation: which token attends to which, in positions of the sequence; to none that comes later.
            scale: factor of the score.

        Returns:
            [B, H, n, E].

        Raises:
            TypeError: if ``relation`` is not a relation.
            ValueError: if a shape does not fit the score or the tokens so far. The cache is then as before.
        """
        self._check(query, key, value, relation)
        start, length = self.length, self.length + key.shape[-2]
        parts = key.split(self.score.ranks, dim=-1)
        held = self._levels or [part[..., :0, :] for part in parts]
        # Also copies the first tokens, which lie in a larger tensor of the caller's.
        levels = [torch.cat(both, -2) for both in zip(held, parts, strict=True)]
        values = torch.cat((self._value if self._levels else value[..., :0, :], value), -2)
        zero = torch.zeros(1, dtype=torch.int64)
        if query.shape[-2] == 1 and relation.multiplicity(zero, zero) is None:
            out = self._attend_once(query, levels, values, relation, scale)
        else:
            pairs = ((level, length - level.shape[-2]) for level in levels)
            whole = torch.cat([torch.nn.functional.pad(x, (0, 0, count, 0)) for x, count in pairs], -1)
            out = attention(query, whole, values, relation, score=self.score, scale=scale, q_start=start)
        for i, (level, width) in enumerate(zip(levels, self._widths, strict=True)):
            count = length % width if width else length
            if count < level.shape[-2]:
                levels[i] = level[..., level.shape[-2] - count :, :].clone()  # a view would keep all
        self._levels, self._value, self.length = levels, values, length  # only now, as a call may raise
        return out

    def _attend_once(
        self, query: Tensor, levels: Sequence[Tensor], values: Tensor, relation: Relation, scale: float
    ) -> Tensor:
        """Attend from the last token, [B, H, 1, E]."""
        length = values.shape[-2]
        precision = torch.float64 if query.dtype == torch.float64 else torch.float32
        heads, key_heads = query.shape[-3], values.shape[-3]
        grouped = query.unflatten(-3, (key_heads, heads // key_heads)).squeeze(-2)  # [B, Hk, H / Hk, D]
        scores = query.new_zeros(*grouped.shape[:-1], length, dtype=precision)
        shares = scores.new_full((length,), self.score.share(0))
        parts = grouped.split(self.score.ranks, dim=-1)
        for count, (part, level) in enumerate(zip(parts, levels, strict=True), 1):
            held = slice(length - level.shape[-2], None)
            scores[..., held] += (part @ level.mT).to(precision) / level.shape[-1]
            shares[held] = self.score.share(count)
        batch = query.shape[0] if query.dim() == 4 else 1
        related = relation.dense(1, length, length - 1, batch=batch, heads=heads).to(query.device)
        related = related.expand(batch, heads, 1, length).reshape(batch, *grouped.shape[-3:-1], -1)
        related = related if query.dim() == 4 else related[0]
        scores = (scores * shares * scale).masked_fill(~related, -torch.inf)
        empty = ~related.any(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0)
        return (weights.to(values.dtype) @ values).flatten(-3, -2).unsqueeze(-2)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, relation: Relation) -> None:
        if not isinstance(relation, Relation):
            raise TypeError(f"relation: wanted a Relation, got {describe(relation)}")
        size = sum(self.score.ranks)
        if key.shape[-1] != size or query.shape[-1] != size or query.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"key: wanted as many tokens as the query has, and the score's {size} dimensions, "
                f"got {list(key.shape)} and a query {list(query.shape)}"
            )
        if query.shape[:-3] != key.shape[:-3] or query.shape[-3] % max(key.shape[-3], 1):
            raise ValueError(
                f"key: wanted the query's batch, and heads that divide its own, got {list(key.shape)} "
                f"and a query {list(query.shape)}"
            )
        if value.shape[:-1] != key.shape[:-1]:
            raise ValueError(f"value: wanted the key's {list(key.shape[:-1])}, got {list(value.shape)}")
        if self._levels and (key.shape[:-2], value.shape[-1]) != (
            self._value.shape[:-2],
            self._value.shape[-1],
        ):
            raise ValueError(
                f"value: wanted the heads and sizes of the tokens so far, {list(self._value.shape)}, "
                f"got {list(value.shape)}"
            )
        self.score.bind(query.shape[-2], self.length + key.shape[-2], self.length)

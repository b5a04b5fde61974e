"""Structured matrices: families between low rank and dense, each a value made of small tensors.

Attention scores a pair by ``x^T M x'``. With ``M = W_Q W_K^T`` the form has low rank; these families give it
full rank, or more of it to near features than to far ones, for few parameters and multiply-adds. All are
instances of one, :class:`MLBTC`, and ``to_mlbtc()`` shows how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class StructuredMatrix:
    """A matrix [n, m] that is multiplied without being made dense."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The tensors that it is made of; they may require gradients."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int]:
        """Rows n and columns m."""
        raise NotImplementedError

    def _apply(self, x: Tensor) -> Tensor:
        """Multiply by x [m, count]."""
        raise NotImplementedError

    def to_mlbtc(self) -> MLBTC:
        """The same matrix as an instance of the umbrella family."""
        raise NotImplementedError

    def __matmul__(self, x: Tensor) -> Tensor:
        """Multiply by a vector [m] or by columns [m, count]."""
        rows, columns = self.shape
        if x.dim() not in (1, 2) or x.shape[0] != columns:
            raise ValueError(f"x: wanted [{columns}] or [{columns}, count], got {list(x.shape)}")
        return self._apply(x.reshape(columns, -1)).reshape(rows, *x.shape[1:])

    def dense(self) -> Tensor:
        """The matrix itself, [n, m]."""
        some = self.parameters[0]
        return self @ torch.eye(self.shape[1], dtype=some.dtype, device=some.device)

    def rank(self) -> int:
        """The numerical rank of the dense matrix."""
        return int(torch.linalg.matrix_rank(self.dense()))

    def macs(self) -> int:
        """Multiply-adds of the product with one vector."""
        return sum(x.numel() for x in self.parameters)


@dataclass(frozen=True, eq=False)
class LowRank(StructuredMatrix):
    """``left @ right.T``: rank r for r (n + m) numbers.

    Args:
        left: [n, r].
        right: [m, r].
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        _wanted("left", self.left, "[n, r]", 2)
        _wanted("right", self.right, "[m, r]", 2)
        _same("right", "rank", self.right.shape[1], self.left.shape[1])

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Left and right."""
        return self.left, self.right

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.left.shape[0], self.right.shape[0]

    def _apply(self, x: Tensor) -> Tensor:
        return self.left @ (self.right.T @ x)

    def to_mlbtc(self) -> MLBTC:
        """One level of one block."""
        return MLBTC([MLBTCLevel(self.left[None], self.right.T[None])])


@dataclass(frozen=True, eq=False)
class MLR(StructuredMatrix):
    """Multi-level low rank: a sum of block-diagonal matrices with low-rank blocks.

    Level l has p blocks ``left[l][k] @ right[l][k].T``, usually 1, 2, 4, ... of them. Its rank is that of all
    levels together, up to full, for ``(n + m) * sum of r`` numbers.

    Args:
        left: for each level [p, n / p, r].
        right: for each level [p, m / p, r].
    """

    left: Sequence[Tensor]
    right: Sequence[Tensor]

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", tuple(self.left))
        object.__setattr__(self, "right", tuple(self.right))
        _same("right", "number of levels", len(self.right), len(self.left))
        if not self.left:
            raise ValueError("left: wanted at least one level, got none")
        for i, (left, right) in enumerate(zip(self.left, self.right, strict=True)):
            _wanted(f"left[{i}]", left, "[p, n / p, r]", 3)
            _wanted(f"right[{i}]", right, "[p, m / p, r]", 3)
            _same(f"right[{i}]", "number of blocks", right.shape[0], left.shape[0])
            _same(f"right[{i}]", "rank", right.shape[2], left.shape[2])
            _same(f"left[{i}]", "number of rows", left.shape[0] * left.shape[1], self.shape[0])
            _same(f"right[{i}]", "number of columns", right.shape[0] * right.shape[1], self.shape[1])

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Left and right of each level."""
        return (*self.left, *self.right)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        left, right = self.left[0], self.right[0]
        return left.shape[0] * left.shape[1], right.shape[0] * right.shape[1]

    def _apply(self, x: Tensor) -> Tensor:
        out = x.new_zeros(self.shape[0], x.shape[1])
        for left, right in zip(self.left, self.right, strict=True):
            small = right.mT @ x.view(*right.shape[:2], -1)  # [p, r, count]
            out = out + (left @ small).flatten(0, 1)
        return out

    def to_mlbtc(self) -> MLBTC:
        """A level each, without permutations."""
        pairs = zip(self.left, self.right, strict=True)
        return MLBTC([MLBTCLevel(left, right.mT) for left, right in pairs])


@dataclass(frozen=True, eq=False)
class BTT(StructuredMatrix):
    """Block tensor train: two block-diagonal factors, a shuffle between: full rank for ~ 2 n^1.5 s numbers.

    With n = a b and m = c e, ``M[(i, j), (g, d)] = sum over t of left[j, i, g, t] * right[g, d, j, t]``.

    Args:
        left: [b, a, c, s].
        right: [c, e, b, s].
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        _wanted("left", self.left, "[b, a, c, s]", 4)
        _wanted("right", self.right, "[c, e, b, s]", 4)
        b, _, c, s = self.left.shape
        wanted, got = (c, b, s), (self.right.shape[0], *self.right.shape[2:])
        if wanted != got:
            raise ValueError(f"right: wanted (c, b, s) = {wanted} as in left, got {got}")

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Left and right."""
        return self.left, self.right

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        (b, a, c, _), e = self.left.shape, self.right.shape[1]
        return a * b, c * e

    def _apply(self, x: Tensor) -> Tensor:
        small = torch.einsum("gdjt,gdx->jgtx", self.right, x.view(*self.right.shape[:2], -1))
        return torch.einsum("jigt,jgtx->ijx", self.left, small).flatten(0, 1)

    def to_mlbtc(self) -> MLBTC:
        """One level with perfect shuffles between its factors and after them."""
        (b, a, c, s), e = self.left.shape, self.right.shape[1]
        left = self.left.reshape(b, a, c * s)
        right = self.right.permute(0, 2, 3, 1).reshape(c, b * s, e)
        # The right factor gives (g, j, t), the left one takes (j, g, t), gives (j, i), and (i, j) is wanted.
        inner = torch.arange(c * b * s).view(c, b, s).transpose(0, 1).reshape(-1)
        outer = torch.arange(b * a).view(b, a).T.reshape(-1)
        return MLBTC([MLBTCLevel(left, right, inner, outer)])


@dataclass(frozen=True, eq=False)
class Monarch(StructuredMatrix):
    """Block tensor train of s = 1 and square blocks: n = m = b * b.

    Args:
        left: [b, b, b], ``left[j, i, g]``.
        right: [b, b, b], ``right[g, d, j]``.
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        for name, x in (("left", self.left), ("right", self.right)):
            _wanted(name, x, "[b, b, b]", 3)
            if x.shape != (len(self.left),) * 3:
                raise ValueError(f"{name}: wanted [b, b, b] with b = {len(self.left)}, got {list(x.shape)}")

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Left and right."""
        return self.left, self.right

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.left) ** 2, len(self.left) ** 2

    def _apply(self, x: Tensor) -> Tensor:
        small = self.right.mT @ x.view(*self.right.shape[:2], -1)  # [g, j, count]
        return (self.left @ small.transpose(0, 1)).transpose(0, 1).flatten(0, 1)

    def to_mlbtc(self) -> MLBTC:
        """As a block tensor train."""
        return BTT(self.left[..., None], self.right[..., None]).to_mlbtc()


@dataclass(frozen=True, eq=False)
class Kronecker(StructuredMatrix):
    """``left`` Kronecker times ``right``: a block tensor train whose blocks are tied.

    Args:
        left: [a, c].
        right: [b, e].
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        _wanted("left", self.left, "[a, c]", 2)
        _wanted("right", self.right, "[b, e]", 2)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Left and right."""
        return self.left, self.right

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.left.shape[0] * self.right.shape[0], self.left.shape[1] * self.right.shape[1]

    def _apply(self, x: Tensor) -> Tensor:
        small = self.right @ x.view(self.left.shape[1], self.right.shape[1], -1)  # [c, b, count]
        return torch.einsum("ac,cbx->abx", self.left, small).flatten(0, 1)

    def macs(self) -> int:
        """Multiply-adds of the product with one vector."""
        (a, c), b = self.left.shape, self.right.shape[0]
        return c * self.right.numel() + b * a * c

    def to_mlbtc(self) -> MLBTC:
        """As a block tensor train, every block written out."""
        (_, c), (b, _) = self.left.shape, self.right.shape
        left = self.left.expand(b, -1, -1)[..., None]
        right = self.right.T.expand(c, -1, -1)[..., None]
        return BTT(left, right).to_mlbtc()


@dataclass(frozen=True, eq=False)
class Butterfly(StructuredMatrix):
    """A product of log2(n) factors, each of which mixes pairs: n = 2^len(factors).

    Factor i mixes the entries whose numbers differ in bit i alone; factor 0 is applied first. Pair k of a
    factor has the k-th number with bit i clear.

    Args:
        factors: [log2(n), n / 2, 2, 2].
    """

    factors: Tensor

    def __post_init__(self) -> None:
        _wanted("factors", self.factors, "[log2(n), n / 2, 2, 2]", 4)
        bits = self.factors.shape[0]
        wanted = (bits, 2**bits // 2, 2, 2)
        if bits == 0 or self.factors.shape != wanted:
            raise ValueError(f"factors: wanted [log2(n), n / 2, 2, 2], got {list(self.factors.shape)}")

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The factors."""
        return (self.factors,)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return 2 ** len(self.factors), 2 ** len(self.factors)

    def _apply(self, x: Tensor) -> Tensor:
        return self._mix(x, range(len(self.factors)))

    def _mix(self, x: Tensor, bits: range) -> Tensor:
        for i in bits:
            factor = self.factors[i].view(-1, 2**i, 2, 2)  # by the bits above i and below it
            x = torch.einsum("hlij,hjlx->hilx", factor, x.reshape(len(factor), 2, 2**i, -1))
        return x.reshape(self.shape[0], -1)

    def to_mlbtc(self) -> MLBTC:
        """One level: the factors of the low bits multiplied out, then those of the high bits."""
        bits, n = len(self.factors), self.shape[0]
        low, high = 2 ** (bits // 2), 2 ** (bits - bits // 2)
        eye = torch.eye(n, dtype=self.factors.dtype, device=self.factors.device)
        first = self._mix(eye, range(bits // 2)).view(high, low, high, low)
        then = self._mix(eye, range(bits // 2, bits)).view(high, low, high, low)
        right = first.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [high, low, low]
        left = then.diagonal(dim1=1, dim2=3).permute(2, 0, 1)  # [low, high, high]
        inner = torch.arange(n).view(high, low).T.reshape(-1)
        outer = torch.arange(n).view(low, high).T.reshape(-1)
        return MLBTC([MLBTCLevel(left, right, inner, outer)])


@dataclass(frozen=True, eq=False)
class MLBTCLevel:
    """One term of a :class:`MLBTC`: alpha * outer(blocks of left @ inner(blocks of right @ x)).

    Args:
        left: [p', i, j], the blocks of the second factor.
        right: [p, k, l], those of the first; p' j = p k.
        inner: [p k]: entry i between the factors is what the first one gives at ``inner[i]``; None keeps.
        outer: [p' i]: the same after the second factor.
        alpha: a number.
    """

    left: Tensor
    right: Tensor
    inner: Tensor | None = None
    outer: Tensor | None = None
    alpha: float = 1.0

    def __post_init__(self) -> None:
        _wanted("left", self.left, "[p', i, j]", 3)
        _wanted("right", self.right, "[p, k, l]", 3)
        between = self.left.shape[0] * self.left.shape[2]
        _same("right", "number of rows", self.right.shape[0] * self.right.shape[1], between)
        for name, order, count in (("inner", self.inner, between), ("outer", self.outer, self.shape[0])):
            if order is not None and not torch.equal(order.sort().values.cpu(), torch.arange(count)):
                raise ValueError(f"{name}: wanted a permutation of {count} numbers, got {list(order.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.left.shape[0] * self.left.shape[1], self.right.shape[0] * self.right.shape[2]

    def apply(self, x: Tensor) -> Tensor:
        """Multiply by x [columns, count]."""
        between = (self.right @ x.view(self.right.shape[0], self.right.shape[2], -1)).flatten(0, 1)
        between = between if self.inner is None else between[self.inner]
        out = (self.left @ between.view(self.left.shape[0], self.left.shape[2], -1)).flatten(0, 1)
        return self.alpha * (out if self.outer is None else out[self.outer])


@dataclass(frozen=True, eq=False)
class MLBTC(StructuredMatrix):
    """Multi-level block tensor contraction: a sum of products of two permuted block-diagonal matrices.

    The family that all others in this file are instances of.

    Args:
        levels: its terms.

    Example:
        >>> import torch
        >>> from attnbias.structured import LowRank
        >>> matrix = LowRank(torch.ones(4, 1), torch.ones(3, 1))
        >>> matrix.to_mlbtc().dense().shape, matrix.rank(), matrix.macs()
        (torch.Size([4, 3]), 1, 7)
    """

    levels: Sequence[MLBTCLevel]

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        if not self.levels:
            raise ValueError("levels: wanted at least one level, got none")
        for i, level in enumerate(self.levels):
            if level.shape != self.shape:
                raise ValueError(f"levels[{i}]: wanted the shape {self.shape}, got {level.shape}")

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Left and right of each level."""
        return tuple(x for level in self.levels for x in (level.left, level.right))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.levels[0].shape

    def _apply(self, x: Tensor) -> Tensor:
        return torch.stack([level.apply(x) for level in self.levels]).sum(0)

    def to_mlbtc(self) -> MLBTC:
        """Itself."""
        return self


def _wanted(name: str, x: Tensor, shape: str, rank: int) -> None:
    if not isinstance(x, Tensor) or x.dim() != rank:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name}: wanted a tensor {shape}, got {got}")


def _same(name: str, what: str, got: int, wanted: int) -> None:
    if got != wanted:
        raise ValueError(f"{name}: wanted the {what} {wanted}, got {got}")

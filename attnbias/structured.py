"""Structured matrices: families between low rank and dense, each a value made of small tensors.

Attention scores a pair by ``x^T M x'``. With ``M = W_Q W_K^T`` the form has low rank. These families give it
full rank, or more rank for near features than for far ones, with few parameters and multiply-adds. All are
instances of one family, :class:`MLBTC`; ``to_mlbtc()`` shows how. The layer ``attnbias.nn.BilinearAttention``
scores with one of them per head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class StructuredMatrix:
    """A matrix [n, m] that is multiplied without being written out; a frozen dataclass of tensors."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it is made of, in the order of its fields."""
        return tuple(_tensors(self))

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Those of its tensors that may learn, which permutations do not."""
        return tuple(x for x in self.tensors if not _is_order(x))

    @property
    def fan_ins(self) -> tuple[int, ...]:
        """For each of ``parameters``, how many products one of its sums has in :meth:`split`."""
        raise NotImplementedError

    def with_tensors(self, tensors: Iterable[Tensor]) -> Self:
        """Return the same matrix made of other tensors, which replace ``tensors`` in order, unchecked."""
        made: Self = _rebuild(self, iter(tensors))
        return made

    @property
    def shape(self) -> tuple[int, int]:
        """Rows n and columns m."""
        raise NotImplementedError

    def apply(self, x: Tensor) -> Tensor:
        """Multiply by the columns of x [m, count]."""
        raise NotImplementedError

    def split(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows a of x [..., n] and b of y [..., m] with a . b = x^T M y; short ones for low rank."""
        product = self.apply(y.flatten(0, -2).T).T  # not @, which torch.compile cannot trace
        return x, product.unflatten(0, y.shape[:-1])

    def to_mlbtc(self) -> MLBTC:
        """Return the same matrix as an instance of the umbrella family."""
        raise NotImplementedError

    def __matmul__(self, x: Tensor) -> Tensor:
        """Multiply by a vector [m] or by columns [m, count]."""
        rows, columns = self.shape
        if x.dim() not in (1, 2) or x.shape[0] != columns:
            raise ValueError(f"x: wanted [{columns}] or [{columns}, count], got {list(x.shape)}")
        return self.apply(x.reshape(columns, -1)).reshape(rows, *x.shape[1:])

    def dense(self) -> Tensor:
        """Write the matrix out, [n, m]."""
        some = self.parameters[0]
        return self @ torch.eye(self.shape[1], dtype=some.dtype, device=some.device)

    def rank(self) -> int:
        """Return the numerical rank of the dense matrix."""
        return int(torch.linalg.matrix_rank(self.dense()))

    def macs(self) -> int:
        """Count the multiply-adds of the product with one vector."""
        return sum(x.numel() for x in self.parameters)


def _tensors(part: Any) -> Iterator[Tensor]:
    """Yield the tensors of a matrix, a list of matrices or a field of one."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, (StructuredMatrix, tuple)):
        for each in _parts(part):
            yield from _tensors(each)


def _rebuild(part: Any, tensors: Iterator[Tensor]) -> Any:
    """Copy what :func:`_tensors` takes, with other tensors."""
    if isinstance(part, Tensor):
        return next(tensors)
    if isinstance(part, tuple):
        return tuple(_rebuild(each, tensors) for each in part)
    if not isinstance(part, StructuredMatrix):
        return part
    made = object.__new__(type(part))  # not its class, which would check permutations again
    for field in fields(part):  # type: ignore[arg-type]
        object.__setattr__(made, field.name, _rebuild(getattr(part, field.name), tensors))
    return made


def _parts(part: Any) -> Iterable[Any]:
    return part if isinstance(part, tuple) else (getattr(part, field.name) for field in fields(part))


def _is_order(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _match(
    sizes: dict[str, int], name: str, x: Any, letters: str, total: int | None = None, whose: str = ""
) -> None:
    """Add the sizes of a tensor to those known by letter; raise where they disagree.

    ``total`` is the wanted product of the first two sizes, ``whose`` its formula in the error.
    """
    wanted = f"[{', '.join(letters)}]"
    if not isinstance(x, Tensor) or x.dim() != len(letters):
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name}: wanted a tensor {wanted}, got {got}")
    for letter, size in zip(letters, x.shape, strict=True):
        if sizes.setdefault(letter, size) != size:
            raise ValueError(f"{name}: wanted {wanted} with {letter} = {sizes[letter]}, got {list(x.shape)}")
    if total not in (None, x.shape[0] * x.shape[1]):
        equation = f"{letters[0]} * {letters[1]} = {whose}{total}"
        raise ValueError(f"{name}: wanted {wanted} with {equation}, got {list(x.shape)}")


@dataclass(frozen=True, eq=False)
class _Pair(StructuredMatrix):
    """A matrix made of two tensors whose dimensions have letters; equal letters have equal sizes."""

    left: Tensor
    right: Tensor
    _letters: ClassVar[tuple[str, str]]  # of left and right
    _sides: ClassVar[tuple[str, str]]  # the letters whose product is n, and m
    _summed: ClassVar[tuple[str, str]]  # the letters that a product sums over, of left and right

    def __post_init__(self) -> None:
        self._sizes()

    def _sizes(self) -> dict[str, int]:
        """Return the size of each letter, or raise."""
        sizes: dict[str, int] = {}
        for name, x, letters in zip(("left", "right"), (self.left, self.right), self._letters, strict=True):
            _match(sizes, name, x, letters)
        return sizes

    @property
    def shape(self) -> tuple[int, int]:
        """See :class:`StructuredMatrix`."""
        sizes = self._sizes()
        rows, columns = (math.prod(sizes[letter] for letter in side) for side in self._sides)
        return rows, columns

    @property
    def fan_ins(self) -> tuple[int, ...]:
        """See :class:`StructuredMatrix`."""
        sizes = self._sizes()
        return tuple(math.prod(sizes[letter] for letter in summed) for summed in self._summed)


class LowRank(_Pair):
    """``left @ right.T``: rank r for r (n + m) numbers.

    Args:
        left: [n, r].
        right: [m, r].
    """

    _letters, _sides, _summed = ("nr", "mr"), ("n", "m"), ("n", "m")

    def apply(self, x: Tensor) -> Tensor:
        """See :class:`StructuredMatrix`."""
        return self.left @ (self.right.T @ x)

    def split(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`StructuredMatrix`; rows of r."""
        return x @ self.left, y @ self.right

    def to_mlbtc(self) -> MLBTC:
        """Return one level of one block."""
        return MLR([self.left[None]], [self.right[None]]).to_mlbtc()


@dataclass(frozen=True, eq=False)
class MLR(StructuredMatrix):
    """Multi-level low rank: a sum of block-diagonal matrices with low-rank blocks.

    Level l has p blocks ``left[l][k] @ right[l][k].T``, usually 1, 2, 4, ... of them. The rank is that of all
    levels together, up to full rank, for ``(n + m) * sum of r`` numbers.

    Args:
        left: [p, n / p, r] per level.
        right: [p, m / p, r] per level.
    """

    left: Sequence[Tensor]
    right: Sequence[Tensor]

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", tuple(self.left))
        object.__setattr__(self, "right", tuple(self.right))
        if not self.left:
            raise ValueError("left: wanted at least one level, got none")
        if len(self.right) != len(self.left):
            raise ValueError(f"right: wanted as many levels as left, {len(self.left)}, got {len(self.right)}")
        for i, (left, right) in enumerate(zip(self.left, self.right, strict=True)):
            sizes: dict[str, int] = {}
            rows, columns = self.shape if i else (None, None)
            _match(sizes, f"left[{i}]", left, "pir", rows)
            _match(sizes, f"right[{i}]", right, "pjr", columns)

    @property
    def shape(self) -> tuple[int, int]:
        """See :class:`StructuredMatrix`."""
        left, right = self.left[0], self.right[0]
        return left.shape[0] * left.shape[1], right.shape[0] * right.shape[1]

    def apply(self, x: Tensor) -> Tensor:
        """See :class:`StructuredMatrix`."""
        out = x.new_zeros(self.shape[0], x.shape[1])
        for left, right in zip(self.left, self.right, strict=True):
            small = right.mT @ x.view(*right.shape[:2], x.shape[1])  # [p, r, count]
            out = out + (left @ small).flatten(0, 1)
        return out

    @property
    def fan_ins(self) -> tuple[int, ...]:
        """See :class:`StructuredMatrix`."""
        return tuple(x.shape[1] for x in self.parameters)

    def levels(self, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return rows [..., r, p] for x and for y, level by level; x^T M y is the sum of their products."""
        pairs = zip(self.left, self.right, strict=True)
        return [(_by_block(x, left), _by_block(y, right)) for left, right in pairs]

    def split(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`StructuredMatrix`; rows of the sum of r p."""
        of_x, of_y = zip(*self.levels(x, y), strict=True)
        a, b = (torch.cat([part.flatten(-2) for part in parts], -1) for parts in (of_x, of_y))
        return a, b

    def to_mlbtc(self) -> MLBTC:
        """Return one level per level, without permutations."""
        pairs = zip(self.left, self.right, strict=True)
        return MLBTC([MLBTCLevel(left, right.mT) for left, right in pairs])


def _by_block(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply each slice of x [..., p * i] by its block of [p, i, r]: [..., r, p]."""
    return torch.einsum("...pi,pir->...rp", x.unflatten(-1, factor.shape[:2]), factor)


class BTT(_Pair):
    """Block tensor train: two block-diagonal factors with a shuffle between them.

    It has full rank for ~ 2 n^1.5 s numbers. With n = a b and m = c e,
    ``M[(i, j), (g, d)] = sum over t of left[j, i, g, t] * right[g, d, j, t]``.

    Args:
        left: [b, a, c, s].
        right: [c, e, b, s].
    """

    _letters, _sides, _summed = ("bacs", "cebs"), ("ab", "ce"), ("cs", "e")

    def apply(self, x: Tensor) -> Tensor:
        """See :class:`StructuredMatrix`."""
        small = torch.einsum("gdjt,gdx->jgtx", self.right, x.view(*self.right.shape[:2], x.shape[1]))
        return torch.einsum("jigt,jgtx->ijx", self.left, small).flatten(0, 1)

    def entries(self) -> Tensor:
        """Write the matrix out as M[i, j, g, d], [a, b, c, e]."""
        return torch.einsum("jigt,gdjt->ijgd", self.left, self.right)

    def to_mlbtc(self) -> MLBTC:
        """Return one level with perfect shuffles between its factors and after them."""
        (b, a, c, s), e = self.left.shape, self.right.shape[1]
        left = self.left.reshape(b, a, c * s)
        right = self.right.permute(0, 2, 3, 1).reshape(c, b * s, e)
        # The right factor yields (g, j, t) and the left one reads (j, g, t); the left one yields (j, i), and
        # the result is (i, j).
        inner = torch.arange(c * b * s).view(c, b, s).transpose(0, 1).reshape(-1)
        outer = torch.arange(b * a).view(b, a).T.reshape(-1)
        return MLBTC([MLBTCLevel(left, right, inner, outer)])


class Monarch(_Pair):
    """A block tensor train with s = 1 and square blocks: n = m = b * b.

    Args:
        left: [b, b, b], ``left[j, i, g]``.
        right: [b, b, b], ``right[g, d, j]``.
    """

    _letters, _sides, _summed = ("bbb", "bbb"), ("bb", "bb"), ("b", "b")

    def apply(self, x: Tensor) -> Tensor:
        """See :class:`StructuredMatrix`."""
        small = self.right.mT @ x.view(*self.right.shape[:2], x.shape[1])  # [g, j, count]
        return (self.left @ small.transpose(0, 1)).transpose(0, 1).flatten(0, 1)

    def to_mlbtc(self) -> MLBTC:
        """Return it as a block tensor train."""
        return BTT(self.left[..., None], self.right[..., None]).to_mlbtc()


class Kronecker(_Pair):
    """The Kronecker product of ``left`` and ``right``: a block tensor train whose blocks are tied.

    Args:
        left: [a, c].
        right: [b, e].
    """

    _letters, _sides, _summed = ("ac", "be"), ("ab", "ce"), ("c", "e")

    def apply(self, x: Tensor) -> Tensor:
        """See :class:`StructuredMatrix`."""
        small = self.right @ x.view(self.left.shape[1], self.right.shape[1], x.shape[1])  # [c, b, count]
        return torch.einsum("ac,cbx->abx", self.left, small).flatten(0, 1)

    def macs(self) -> int:
        """See :class:`StructuredMatrix`; ``right`` is applied c times, ``left`` b times."""
        (a, c), b = self.left.shape, self.right.shape[0]
        return c * self.right.numel() + b * a * c

    def to_mlbtc(self) -> MLBTC:
        """Return it as a block tensor train with every block written out."""
        (_, c), (b, _) = self.left.shape, self.right.shape
        left = self.left.expand(b, -1, -1)[..., None]
        right = self.right.T.expand(c, -1, -1)[..., None]
        return BTT(left, right).to_mlbtc()


@dataclass(frozen=True, eq=False)
class Butterfly(StructuredMatrix):
    """A product of log2(n) factors, each of which mixes pairs: n = 2^len(factors).

    Factor i mixes the entries whose indices differ only in bit i; factor 0 is applied first. Pair k of a
    factor has the k-th index with bit i clear.

    Args:
        factors: [log2(n), n / 2, 2, 2].
    """

    factors: Tensor

    def __post_init__(self) -> None:
        wanted = "factors: wanted a tensor [log2(n), n / 2, 2, 2]"
        if not isinstance(self.factors, Tensor):
            raise ValueError(f"{wanted}, got {type(self.factors).__name__}")
        bits = self.factors.shape[0] if self.factors.dim() else 0
        if bits == 0 or self.factors.shape != (bits, 2**bits // 2, 2, 2):
            raise ValueError(f"{wanted}, got {list(self.factors.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """See :class:`StructuredMatrix`."""
        return 2 ** len(self.factors), 2 ** len(self.factors)

    @property
    def fan_ins(self) -> tuple[int, ...]:
        """See :class:`StructuredMatrix`."""
        return (2,)

    def apply(self, x: Tensor) -> Tensor:
        """See :class:`StructuredMatrix`."""
        return self._mix(x, range(len(self.factors)))

    def _mix(self, x: Tensor, bits: range) -> Tensor:
        columns = x.shape[1]
        for i in bits:
            factor = self.factors[i].view(-1, 2**i, 2, 2)  # by the bits above i and below it
            x = torch.einsum("hlij,hjlx->hilx", factor, x.reshape(len(factor), 2, 2**i, columns))
        return x.reshape(self.shape[0], columns)

    def to_mlbtc(self) -> MLBTC:
        """Return one level: the factors of the low bits multiplied out, then those of the high bits."""
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
class MLBTCLevel(_Pair):
    """One term of an :class:`MLBTC`: alpha * outer(blocks of left @ inner(blocks of right @ x)).

    Args:
        left: [q, i, j], the blocks of the second factor.
        right: [p, k, l], the blocks of the first factor; q j = p k.
        inner: [p k], a permutation: entry i between the factors is entry ``inner[i]`` of the first factor's
            output; None leaves the order.
        outer: [q i], the same after the second factor.
        alpha: a number.
    """

    inner: Tensor | None = None
    outer: Tensor | None = None
    alpha: float = 1.0
    _letters, _sides, _summed = ("qij", "pkl"), ("qi", "pl"), ("j", "l")

    def __post_init__(self) -> None:
        sizes = self._sizes()
        between = sizes["q"] * sizes["j"]
        _match(sizes, "right", self.right, "pkl", between, "q * j = ")
        for name, order, count in (("inner", self.inner, between), ("outer", self.outer, self.shape[0])):
            if order is not None and not torch.equal(order.sort().values.cpu(), torch.arange(count)):
                raise ValueError(f"{name}: wanted a permutation of {count} numbers, got {order.tolist()}")

    def apply(self, x: Tensor) -> Tensor:
        """See :class:`StructuredMatrix`."""
        columns = x.shape[1]
        between = (self.right @ x.view(self.right.shape[0], self.right.shape[2], columns)).flatten(0, 1)
        between = between if self.inner is None else between[self.inner]
        out = (self.left @ between.view(self.left.shape[0], self.left.shape[2], columns)).flatten(0, 1)
        return self.alpha * (out if self.outer is None else out[self.outer])

    def to_mlbtc(self) -> MLBTC:
        """Return a sum of one level."""
        return MLBTC([self])


@dataclass(frozen=True, eq=False)
class MLBTC(StructuredMatrix):
    """Multi-level block tensor contraction: a sum of products of two permuted block-diagonal matrices.

    All other families in this file are instances of it.

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
    def shape(self) -> tuple[int, int]:
        """See :class:`StructuredMatrix`."""
        return self.levels[0].shape

    @property
    def fan_ins(self) -> tuple[int, ...]:
        """See :class:`StructuredMatrix`."""
        return tuple(fan_in for level in self.levels for fan_in in level.fan_ins)

    def apply(self, x: Tensor) -> Tensor:
        """See :class:`StructuredMatrix`."""
        return torch.stack([level.apply(x) for level in self.levels]).sum(0)

    def to_mlbtc(self) -> MLBTC:
        """Return itself."""
        return self

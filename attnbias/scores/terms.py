"""Score terms: what is added to the score of a related pair.

The reference adds ``value(b, h, q, k)``, pair by pair. Kernels know a few *parts*, small tensors from which
the sum of all terms follows: terms of the same part are added before the kernel sees them, and autograd takes
the part's gradient back to slopes and tables. So a new term of a known part needs no kernel.

=========== ======================== ==========================================================
part        shape                    added to the score of row i and key j
=========== ======================== ==========================================================
relative    [B, H, Q + K - 1]        ``relative[j - i + Q - 1]``: a function of the distance
key         [B, H, K]                ``key[j]``
pair        [B or 1, H or 1, Q, K]   ``pair[i, j]``; its gradient is summed over what has size 1
grid        [B, H, n]                ``grid[query_code[i] - key_code[j]]``
edge        [E, H or 1]              ``edge[n]``, n the caller's number of the edge; summed over 1
=========== ======================== ==========================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .buckets import Buckets, buckets_of_distances, distances, find_buckets

PARTS = ("relative", "key", "pair", "grid", "edge")


class Sizes(NamedTuple):
    """The sizes of a call that terms are made for."""

    batch: int
    heads: int
    q_len: int
    k_len: int
    q_start: int
    device: torch.device
    dtype: torch.dtype  # of scores: float32, or float64 for float64


@runtime_checkable
class Term(Protocol):
    """A relation that is not binary: a number for each related pair, added to its score.

    With ``s = softcap(scale * q @ k)`` the score of a pair is ``s`` plus the value of every term.
    -inf removes the pair. A term that holds tensors gets their gradients through ``value``.

    Example:
        >>> import torch
        >>> class Distance:
        ...     def value(self, b, h, q, k):
        ...         return -0.5 * (q - k).abs()
        >>> isinstance(Distance(), Term)
        True
        >>> Distance().value(0, 0, torch.tensor([[3], [4]]), torch.tensor([[2, 3]]))
        tensor([[-0.5000, -0.0000],
                [-1.0000, -0.5000]])
    """

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the term's value at pairs given by index.

        Args:
            b: batch index, int64; ``b, h, q, k`` broadcast together.
            h: query head, int64.
            q: query position (row + q_start), int64.
            k: key position, int64.

        Returns:
            Floating point, of a shape that broadcasts to that of ``b, h, q, k`` together.
        """
        ...


class KernelTerm:
    """A term that kernels know as a part; tensors [H] or [B, H] broadcast over the batch."""

    part: str  # one of PARTS
    edges: int | None = None  # how many edges it has numbers for

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See :class:`Term`."""
        raise NotImplementedError

    def check(self, sizes: Sizes) -> None:
        """Raise, naming what does not fit, unless the term is for these sizes."""
        raise NotImplementedError

    def make_part(self, sizes: Sizes) -> Tensor:
        """Return the term as its part, of the shape above; a batch or head size of 1 is for all."""
        raise NotImplementedError

    def codes(self, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        """Return the codes of queries and keys from which a grid's part is read; None for other parts."""
        return None

    def make_slopes(self, sizes: Sizes) -> Tensor | None:
        """Return [B or 1, H] that says it all of a part ``relative``: -slope * |distance|; else None."""
        return None

    def _check(self, name: str, sizes: Sizes, *shapes: str, **options: Any) -> None:
        """Raise unless the field is a tensor as :func:`check_tensor` wants it."""
        check_tensor(f"terms: {type(self).__name__}.{name}", getattr(self, name), sizes, *shapes, **options)


def check_tensor(
    what: str, x: object, sizes: Sizes, *shapes: str, broadcast: bool = False, **known: int
) -> None:
    """Raise unless ``x`` is a floating-point tensor on the call's device and of one of the shapes.

    A shape is written "B H K". B, H and K are the call's, ``known`` has more sizes, and any other name stands
    for any size. With ``broadcast`` a size of 1 will do.
    """
    known = {"B": sizes.batch, "H": sizes.heads, "K": sizes.k_len} | known
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else f"{type(x).__name__} {x!r}"
        raise TypeError(f"{what}: wanted a floating-point tensor {_text(shapes, known)}, got {got}")
    if x.device != sizes.device:
        raise ValueError(f"{what}: wanted the query's device, {sizes.device}, got {x.device}")

    def fits(size: int, name: str) -> bool:
        return size == known.get(name, size) or (broadcast and size == 1)

    if not any(x.dim() == len(names) and all(map(fits, x.shape, names)) for names in map(str.split, shapes)):
        ones = " (or sizes of 1)" if broadcast else ""
        raise ValueError(f"{what}: wanted {_text(shapes, known)}{ones}, got {list(x.shape)}")


def _text(shapes: Sequence[str], known: dict[str, int]) -> str:
    """Return shapes as an error shows them: ``[H] or [B, H] = [2, 4]``."""
    names = [shape.split() for shape in shapes]
    sizes = ", ".join(str(known.get(name, name)) for name in names[-1])
    return " or ".join(f"[{', '.join(each)}]" for each in names) + f" = [{sizes}]"


@dataclass(frozen=True, eq=False)
class MadePart(KernelTerm):
    """Terms that were added up, and checked, when their call was traced."""

    part: str
    edges: int | None

    def check(self, sizes: Sizes) -> None:
        """See :class:`KernelTerm`."""


def _by_head(x: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Return the entries of [H, ...] or [B, H, ...] at batch and head."""
    return x[h] if x.dim() == 1 else x[b, h]


@dataclass(frozen=True, eq=False)
class ALiBi(KernelTerm):
    """Subtract a slope times the distance: ``-slope * |q - k|``.

    Args:
        slopes: [H] or [B, H]; learnable.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> ab.ALiBi(torch.tensor([0.5])).value(*torch.tensor([0, 0, 7, 3]))
        tensor(-2.)
    """

    slopes: Tensor
    part = "relative"

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See :class:`Term`."""
        return -_by_head(self.slopes, b, h) * (q - k).abs()

    def check(self, sizes: Sizes) -> None:
        """See :class:`KernelTerm`."""
        self._check("slopes", sizes, "H", "B H")

    def make_part(self, sizes: Sizes) -> Tensor:
        """See :class:`KernelTerm`."""
        slopes = self.slopes.view(-1, sizes.heads, 1).to(sizes.dtype)
        return -slopes * _distances(sizes).abs()

    def make_slopes(self, sizes: Sizes) -> Tensor:
        """See :class:`KernelTerm`."""
        return self.slopes.detach().view(-1, sizes.heads).to(sizes.dtype)


@dataclass(frozen=True, eq=False)
class RelativeBias(KernelTerm):
    """A learned number for each head and bucket of distances: ``table[h, bucket(k - q)]``.

    Args:
        table: [H, n].
        buckets: from distances (int64) and n to buckets from 0 to n - 1, integers of the same shape:
            ``linear_buckets(most)``, ``t5_buckets(bidirectional, max_distance)``, or any function.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> table = torch.tensor([[-1.0, 0.0, 1.0]])  # distances of -1 or less, 0, 1 or more
        >>> RelativeBias(table, ab.linear_buckets(1)).value(*torch.tensor([0, 0, 5, 2]))
        tensor(-1.)
    """

    table: Tensor
    buckets: Buckets
    part = "relative"

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See :class:`Term`."""
        return _take(self.table, h, find_buckets(self.buckets, k - q, self.table.shape[1]))

    def check(self, sizes: Sizes) -> None:
        """See :class:`KernelTerm`."""
        self._check("table", sizes, "H n")
        self._index(sizes)

    def make_part(self, sizes: Sizes) -> Tensor:
        """See :class:`KernelTerm`."""
        return _take(self.table.to(sizes.dtype), slice(None), self._index(sizes))[None]

    def _index(self, sizes: Sizes) -> Tensor:
        """Return the bucket of each distance."""
        count = self.table.shape[1]
        if torch.compiler.is_compiling():  # lengths may be symbols
            return find_buckets(self.buckets, _distances(sizes), count)
        lengths = (sizes.q_len, sizes.k_len, sizes.q_start)
        return buckets_of_distances(self.buckets, count, *lengths, sizes.device)


@dataclass(frozen=True, eq=False)
class GridBias(KernelTerm):
    """A learned number for each head and offset on a 2-D grid, as in Swin.

    Args:
        table: [H, (2 rows - 1) * (2 columns - 1)]; a query dy rows below and dx columns right of its key
            gets the entry ``(dy + rows - 1) * (2 columns - 1) + dx + columns - 1``.
        shape: (rows, columns); token p stands at ``(p // columns, p % columns)``.

    Example:
        >>> import torch
        >>> table = torch.arange(9.0).expand(1, 9)  # a 2 x 2 grid has offsets of -1 to 1 in both directions
        >>> GridBias(table, (2, 2)).value(*torch.tensor([0, 0, 3, 0]))  # one row below, one column right
        tensor(8.)
    """

    table: Tensor
    shape: tuple[int, int]
    part = "grid"

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See :class:`Term`."""
        return _take(self.table, h, self._code(q) - self._code(k) + self._middle)

    def check(self, sizes: Sizes) -> None:
        """See :class:`KernelTerm`."""
        rows, columns = self.shape
        self._check("table", sizes, "H n", n=(2 * rows - 1) * (2 * columns - 1))
        for name, first, stop in (
            ("queries", sizes.q_start, sizes.q_start + sizes.q_len),
            ("keys", 0, sizes.k_len),
        ):
            if not 0 <= first <= stop <= rows * columns:
                raise ValueError(
                    f"terms: GridBias.shape: wanted places for {name} at {first} to {stop - 1}, "
                    f"got {rows * columns} ({rows} x {columns})"
                )

    def make_part(self, sizes: Sizes) -> Tensor:
        """See :class:`KernelTerm`."""
        return self.table.to(sizes.dtype)[None]

    def codes(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Return numbers of queries [Q] and keys [K], int32, whose difference is the place in the table."""
        queries = torch.arange(sizes.q_start, sizes.q_start + sizes.q_len, device=sizes.device)
        keys = torch.arange(sizes.k_len, device=sizes.device)
        return (self._code(queries) + self._middle).int(), self._code(keys).int()

    def _code(self, position: Tensor) -> Tensor:
        columns = self.shape[1]
        return position // columns * (2 * columns - 1) + position % columns

    @property
    def _middle(self) -> int:
        rows, columns = self.shape
        return (rows - 1) * (2 * columns - 1) + columns - 1


@dataclass(frozen=True, eq=False)
class KeyBias(KernelTerm):
    """A number for each key: a log-weight, renormalised by the softmax.

    Args:
        bias: [B, K] or [B, H, K]; sizes of 1 are for all.

    Example:
        >>> import torch
        >>> KeyBias(torch.tensor([[0.0, 2.0]])).value(*torch.tensor([0, 0, 5, 1]))  # of key 1, for any query
        tensor(2.)
    """

    bias: Tensor
    part = "key"

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See :class:`Term`."""
        return _entries(self._whole, b, h, k)

    def check(self, sizes: Sizes) -> None:
        """See :class:`KernelTerm`."""
        self._check("bias", sizes, "B K", "B H K", broadcast=True)

    def make_part(self, sizes: Sizes) -> Tensor:
        """See :class:`KernelTerm`."""
        return self._whole.to(sizes.dtype).expand(-1, -1, sizes.k_len)

    @property
    def _whole(self) -> Tensor:
        return self.bias[:, None] if self.bias.dim() == 2 else self.bias


@dataclass(frozen=True, eq=False)
class PairBias(KernelTerm):
    """A number for each pair, read where it lies: AlphaFold's pair bias, Graphormer's encodings.

    Args:
        bias: [B, H, rows, K], or fewer leading dimensions; sizes of 1 are for all.
        q_start: position of the first row. A step of decoding may be given all rows, or its own with
            their position.

    Example:
        >>> import torch
        >>> PairBias(torch.tensor([[0.0, 1.0], [2.0, 3.0]])).value(*torch.tensor([0, 0, 1, 0]))
        tensor(2.)
    """

    bias: Tensor
    q_start: int = 0
    part = "pair"

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """See :class:`Term`."""
        return _entries(self._whole, b, h, q - self.q_start, k)

    def check(self, sizes: Sizes) -> None:
        """See :class:`KernelTerm`."""
        self._check("bias", sizes, "rows K", "H rows K", "B H rows K", broadcast=True)
        rows, first = self.bias.shape[-2], sizes.q_start - self.q_start
        if rows != 1 and not 0 <= first <= first + sizes.q_len <= rows:
            raise ValueError(
                f"terms: PairBias.bias: wanted rows for positions {sizes.q_start} to "
                f"{sizes.q_start + sizes.q_len - 1}, got {self.q_start} to {self.q_start + rows - 1}"
            )

    def make_part(self, sizes: Sizes) -> Tensor:
        """See :class:`KernelTerm`."""
        bias, first = self._whole, sizes.q_start - self.q_start
        if bias.shape[2] != 1:
            bias = bias[:, :, first : first + sizes.q_len]
        return bias.to(sizes.dtype).expand(-1, -1, sizes.q_len, sizes.k_len)

    @property
    def _whole(self) -> Tensor:
        return self.bias[(None,) * (4 - self.bias.dim())]


@dataclass(frozen=True, eq=False)
class EdgeBias(KernelTerm):
    """A number for each edge of a ``Graph`` or ``Neighbors``, also of one ``& other``.

    Duplicate edges each have their own. A relation with this term is laid out as edges; a Layout has to be
    built so (``form="edges"``).

    Args:
        bias: [E] or [E, H] (H may be 1: for all), in the order of ``edge_index``, or of the flattened
            ``index`` of neighbours; learnable. Edges that ``& other`` drops get gradient 0.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> ring = ab.Graph([[0, 1, 2], [1, 2, 0]], num_nodes=3)
        >>> q = k = v = torch.zeros(1, 2, 3, 4)
        >>> ab.attention(q, k, v, ring, terms=[ab.EdgeBias(torch.randn(3, 2))]).shape
        torch.Size([1, 2, 3, 4])
    """

    bias: Tensor
    part = "edge"

    @property
    def edges(self) -> int:  # type: ignore[override]
        """The number of edges that it has numbers for."""
        return len(self.bias)

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Raise: the value is not known by position; see ``make_part``."""
        raise NotImplementedError("terms: EdgeBias has a value for each edge, not for each pair of positions")

    def check(self, sizes: Sizes) -> None:
        """See :class:`KernelTerm`."""
        self._check("bias", sizes, "E", "E H", broadcast=True)

    def make_part(self, sizes: Sizes) -> Tensor:
        """See :class:`KernelTerm`."""
        return (self.bias[:, None] if self.bias.dim() == 1 else self.bias).to(sizes.dtype)


def _entries(x: Tensor, *index: Tensor) -> Tensor:
    """Return the entries of x at indices that broadcast together; a dimension of size 1 is for all."""
    return _take(x, *(i if n > 1 else torch.zeros_like(i) for i, n in zip(index, x.shape, strict=True)))


def _take(x: Tensor, *index: Tensor | slice) -> Tensor:
    """Return the entries of x at indices, whose gradients add up in one order.

    Through float64: the gradients of float32 entries are added by the threads of a CPU as they come.
    """
    return x.double()[index].to(x.dtype)


def _distances(sizes: Sizes) -> Tensor:
    """Return key position minus query position, for each place of the part ``relative``."""
    return distances(sizes.q_len, sizes.k_len, sizes.q_start, sizes.device)


def why_not_parts(terms: Sequence[Term]) -> list[str]:
    """Return a sentence for each reason why kernels do not know the terms."""
    reasons = [
        f"terms[{i}]: {type(term).__name__} is known by its values alone, which only the reference reads"
        for i, term in enumerate(terms)
        if not isinstance(term, KernelTerm)
    ]
    found = [getattr(term, "shape", None) for term in terms]
    shapes = {shape for shape in found if shape is not None}  # dynamo cannot trace a := in here
    if len(shapes) > 1:
        reasons.append(f"terms: grids of one shape, got GridBias of shapes {sorted(shapes, key=str)}")
    return reasons


def make_parts(terms: Sequence[Term], sizes: Sizes) -> tuple[dict[str, Tensor], list[Tensor], Tensor | None]:
    """Add up the terms by part.

    Returns:
        The parts by name, of the shapes above; for a grid the codes of queries and keys; and the slopes of
        a part ``relative`` that is one ALiBi, [B or 1, H], from which some kernels compute it.
    """
    parts: dict[str, Tensor] = {}
    codes: list[Tensor] = []
    for term in terms:
        assert isinstance(term, KernelTerm)
        made = term.make_part(sizes)
        parts[term.part] = parts[term.part] + made if term.part in parts else made
        codes = list(term.codes(sizes) or codes)
    for name in ("relative", "key", "grid"):  # small: summing over batch and heads can be left to autograd
        if name in parts:
            parts[name] = parts[name].expand(sizes.batch, sizes.heads, -1)
    relative = [term for term in terms if isinstance(term, KernelTerm) and term.part == "relative"]
    slopes = relative[0].make_slopes(sizes) if len(relative) == 1 else None
    return parts, codes, slopes

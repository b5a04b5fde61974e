"""Multi-level low-rank scores: near pairs are scored in more dimensions than far ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from ..sets.intervals import ceil_div
from ..sets.levels import Levels
from .terms import Sizes

Normalize = Literal["pair", "levels"] | None

MOST_HALVINGS = 24  # of the default widths: finer levels than anyone has positions for


@dataclass(frozen=True)
class MultiLevel:
    """A score for which level l compares its own dimensions of the pairs in one of its blocks.

    The head's D dimensions are split into consecutive chunks of ``ranks``. Level l cuts the positions, from
    0 on, into blocks of ``widths[l]``; a pair in the same block adds ``q_l . k_l / ranks[l]``, any other
    pair 0: missing levels are no mask. So the score of a far pair reads only the first few dimensions, and
    kernels skip the others. ``scale``, 1 by default with this score, softcap and terms come after it.

    Args:
        ranks: dimensions of each level, coarsest first; their sum is D.
        widths: positions of a block of each level, each dividing the one before; None for the first, that
            all positions share it. By default the number of keys, rounded up to a multiple of
            ``2**(levels - 1)``, and halved from level to level, the first being shared by all: T, T/2,
            T/4, ... wherever these are whole. Give them where lengths change, as in decoding.
        normalize: "pair" divides the sum by the number of levels that the pair shares, "levels" by the
            number that there are, None by nothing.

    Raises:
        TypeError: for an argument of the wrong kind.
        ValueError: for ranks below 1, widths that do not nest, or many levels without widths.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> q, k, v = torch.randn(3, 1, 2, 16, 8)
        >>> score = ab.MultiLevel([4, 2, 2])
        >>> out = ab.attention(q, k, v, ab.Causal(), score=score)
        >>> score.depth(torch.arange(4), torch.tensor([[0]]), q_len=4, k_len=4)
        tensor([[3, 2, 1, 1]])
    """

    ranks: Sequence[int]
    widths: Sequence[int | None] | None = None
    normalize: Normalize = "pair"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", _integers("ranks", self.ranks))
        if not self.ranks:
            raise ValueError("ranks: wanted at least one level, got none")
        if min(self.ranks) < 1:
            raise ValueError(f"ranks: wanted at least 1 for each level, got {list(self.ranks)}")
        if self.normalize not in ("pair", "levels", None):
            raise ValueError(f"normalize: wanted 'pair', 'levels' or None, got {self.normalize!r}")
        if self.widths is None:
            if len(self.ranks) > MOST_HALVINGS:
                raise ValueError(
                    f"widths: wanted them for more than {MOST_HALVINGS} levels, "
                    f"got None for {len(self.ranks)}"
                )
            return
        is_open = isinstance(self.widths, (list, tuple)) and self.widths[:1] in ([None], (None,))
        widths = _integers("widths", self.widths[1:] if is_open else self.widths)
        if not all(1 <= width < 2**31 for width in widths):
            raise ValueError(f"widths: wanted numbers from 1 to 2^31 - 1, got {list(self.widths)}")
        for wide, narrow in pairwise(widths):
            if wide % narrow:
                raise ValueError(
                    f"widths: wanted each to divide the one before, got {wide} and then {narrow}"
                )
        count = len(widths) + is_open
        if count != len(self.ranks):
            raise ValueError(f"widths: wanted one for each of the {len(self.ranks)} ranks, got {count}")
        object.__setattr__(self, "widths", (None, *widths) if is_open else widths)

    def bind(self, q_len: int, k_len: int, q_start: int) -> Levels:
        """Return the levels at these lengths.

        Raises:
            ValueError: if ``normalize="pair"`` would divide by 0.
        """
        count = len(self.ranks)
        prefixes = tuple(accumulate(self.ranks))
        if self.widths is None:
            smallest = ceil_div(max(k_len, 1), 2 ** (count - 1))
            widths = tuple(smallest << (count - 1 - level) for level in range(count))
            return Levels((0, *widths[1:]), prefixes)
        widths = tuple(width or 0 for width in self.widths)
        reach = max(k_len, q_start + q_len)
        if self.normalize == "pair" and widths[0] and (widths[0] < reach or q_start < 0) and q_len and k_len:
            raise ValueError(
                f"score: normalize='pair' wants a first level that all {reach} positions share, "
                f"got widths[0] = {widths[0]}; None is shared by all"
            )
        return Levels(widths, prefixes)

    def check(self, sizes: Sizes, size: int) -> None:
        """Raise, naming what does not fit, unless the score is for these sizes and head size."""
        if sum(self.ranks) != size:
            raise ValueError(
                f"score: wanted ranks whose sum is the head size {size}, got {list(self.ranks)}, "
                f"whose sum is {sum(self.ranks)}"
            )
        self.bind(sizes.q_len, sizes.k_len, sizes.q_start)

    def depth(self, q: Tensor, k: Tensor, *, q_len: int, k_len: int, q_start: int = 0) -> Tensor:
        """Return how many levels each pair of positions shares."""
        return depth(self.bind(q_len, k_len, q_start), q, k)

    def share(self, count: int) -> float:
        """Return the factor of the sum of a pair that shares ``count`` levels."""
        if self.normalize == "pair":
            return 1 / max(count, 1)
        return 1 / len(self.ranks) if self.normalize == "levels" else 1.0

    def compare(self, levels: Levels, q: Tensor, k: Tensor, product: Callable[[slice], Tensor]) -> Tensor:
        """Return the scores by definition: the masked sum over the levels.

        Args:
            levels: those of this score at the call's lengths.
            q: query positions; they and ``k`` broadcast to the scores.
            k: key positions.
            product: gives the dot products over some of the dimensions.
        """
        total, count = None, torch.zeros_like(q + k)
        for width, rank, end in zip(levels.widths, self.ranks, levels.prefixes, strict=True):
            related = _same_block(width, q, k)
            part = torch.where(related, product(slice(end - rank, end)) / rank, 0.0)
            total = part if total is None else total + part
            count = count + related
        assert total is not None
        if self.normalize == "pair":
            return total / count.clamp(min=1).to(total.dtype)
        return total / len(self.ranks) if self.normalize == "levels" else total

    def spread(self, levels: Levels, q: Tensor, k: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the dimensions of each level, and the factor of their products at each pair, float64."""
        shared = depth(levels, q, k)
        shares = shared.new_tensor([self.share(n) for n in range(len(self.ranks) + 1)], dtype=torch.float64)
        for level, (rank, end) in enumerate(zip(self.ranks, levels.prefixes, strict=True)):
            factor = (shares[shared] / rank).masked_fill(shared <= level, 0)
            yield slice(end - rank, end), factor


def depth(levels: Levels, q: Tensor, k: Tensor) -> Tensor:
    """Return how many levels each pair of positions shares."""
    shared = [_same_block(width, q, k) for width in levels.widths]
    return torch.stack(torch.broadcast_tensors(*shared)).sum(0)


def _same_block(width: int, q: Tensor, k: Tensor) -> Tensor:
    if not width:
        return torch.ones_like(q + k, dtype=torch.bool)
    return q.div(width, rounding_mode="floor") == k.div(width, rounding_mode="floor")


def _integers(name: str, given: object) -> tuple[int, ...]:
    wanted = f"{name}: wanted a list of integers"
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{wanted}, got {type(given).__name__} {given!r}")
    for number in given:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{wanted}, got {number!r} in it")
    return tuple(given)

"""Relations that compare positions: every one a rule on ``q`` and ``k``, without lengths."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layouts.bound import Bound, Place
from ..layouts.edges import Edges
from ..layouts.intervals import Intervals, Ints
from .relation import Relation, as_count, as_indices

RANGES_PER_ROW = 64  # beyond that many key ranges a row, testing pairs tile by tile is smaller
MANY_RANGES = 1 << 22  # but fewer in all are never too many


def ranges(at: Place, start: Ints | int, stop: Ints | int) -> Bound:
    """One range of keys per query."""
    row = np.zeros(at.q_len, np.int64)
    return Bound(Intervals.one_per_row(at.q_len, at.k_len, row + start, row + stop))


class Full(Relation):
    """Every query attends to every key: self-attention, the complete graph."""

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return torch.ones_like(q + k, dtype=torch.bool)

    def _bind(self, at: Place) -> Bound:
        return ranges(at, 0, at.k_len)

    @property
    def stationary(self) -> bool:
        return True

    def __invert__(self) -> Relation:
        return Empty()

    @property
    def T(self) -> Relation:
        return self


class Empty(Relation):
    """No query attends to any key."""

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return torch.zeros_like(q + k, dtype=torch.bool)

    def _bind(self, at: Place) -> Bound:
        return ranges(at, 0, 0)

    @property
    def stationary(self) -> bool:
        return True

    def __invert__(self) -> Relation:
        return Full()

    @property
    def T(self) -> Relation:
        return self


class Causal(Relation):
    """Keys up to the query's own position: masked attention, a total order.

    Example:
        >>> import attnbias as ab
        >>> print(ab.Causal().picture(3, 4))
        #...
        ##..
        ###.
    """

    @property
    def band(self) -> tuple[float, float]:
        """Reach before and after the query."""
        return math.inf, 0

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return k <= q

    def _bind(self, at: Place) -> Bound:
        return ranges(at, 0, at.positions + 1)

    @property
    def stationary(self) -> bool:
        return True

    @property
    def T(self) -> Relation:
        return Window(before=0, after=None)


class Window(Relation):
    """The ``before`` previous keys, the query's own, and the ``after`` next ones.

    ``Window(before=p)`` is the strided attention of the relational paper: p + 1 keys.

    Args:
        before: keys before the query; None = all of them.
        after: keys after the query; None = all of them.

    Example:
        >>> import attnbias as ab
        >>> ab.Causal() & ab.Window(before=255, after=255)
        Window(before=255)
    """

    before: int | None
    after: int | None = 0

    def __post_init__(self) -> None:
        for name in ("before", "after"):
            reach = getattr(self, name)
            if reach is None:
                continue
            if not isinstance(reach, bool) and isinstance(reach, int | np.integer) and reach < 0:
                raise ValueError(f"{name}: wanted 0 or more, or None for no limit, got {reach}")
            object.__setattr__(self, name, as_count(name, reach))
        super().__post_init__()

    def _content(self) -> Hashable:
        # A window without limits is the same value as the relation with a name for it.
        named = window_of(*self.band) if self.before is None else self
        return super()._content() if isinstance(named, Window) else named._content()

    @property
    def band(self) -> tuple[float, float]:
        """Reach before and after the query."""
        before, after = self.before, self.after
        return math.inf if before is None else before, math.inf if after is None else after

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        near = torch.ones_like(q + k, dtype=torch.bool)
        if self.before is not None:
            near = near & (k >= q - self.before)
        if self.after is not None:
            near = near & (k <= q + self.after)
        return near

    def _bind(self, at: Place) -> Bound:
        start = 0 if self.before is None else at.positions - self.before
        stop = at.k_len if self.after is None else at.positions + self.after + 1
        return ranges(at, start, stop)

    @property
    def stationary(self) -> bool:
        return True

    @property
    def T(self) -> Relation:
        return Window(self.after, self.before)


def window_of(before: float, after: float) -> Relation:
    """The simplest relation of that reach; ``math.inf`` = no limit."""
    if before == math.inf and after in (0, math.inf):
        return Causal() if after == 0 else Full()
    return Window(*(None if reach == math.inf else int(reach) for reach in (before, after)))


class Dilated(Relation):
    """Keys at steps of ``dilation`` from the query.

    Args:
        dilation: distance between related keys.
        before: steps before the query; its own key is always related.
        after: steps after the query.

    Example:
        >>> import attnbias as ab
        >>> print(ab.Dilated(2, before=2).picture(6, 6))
        #.....
        .#....
        #.#...
        .#.#..
        #.#.#.
        .#.#.#
    """

    dilation: int
    before: int
    after: int = 0

    def __post_init__(self) -> None:
        for name, least in (("dilation", 1), ("before", 0), ("after", 0)):
            object.__setattr__(self, name, as_count(name, getattr(self, name), least))
        super().__post_init__()

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        gap = q - k
        near = (gap <= self.before * self.dilation) & (-gap <= self.after * self.dilation)
        return near & (gap % self.dilation == 0)

    def _bind(self, at: Place) -> Bound:
        if self.dilation == 1:
            return Window(self.before, self.after)._bind(at)
        if self.before + self.after >= RANGES_PER_ROW:
            return super()._bind(at)
        steps = np.arange(-self.before, self.after + 1) * self.dilation
        key = at.positions[:, None] + steps
        row = np.broadcast_to(np.arange(at.q_len)[:, None], key.shape)
        exists = (key >= 0) & (key < at.k_len)
        group = np.zeros((1, 1), np.int64)
        return Bound(None, Edges.from_pairs(at.q_len, at.k_len, group, row[exists], key[exists]))

    @property
    def stationary(self) -> bool:
        return True

    @property
    def T(self) -> Relation:
        return Dilated(self.dilation, self.after, self.before)


class Columns(Relation):
    """Every ``stride``-th key counted back from the query: the columns of sparse transformers.

    Args:
        stride: distance between related keys.

    Example:
        >>> import attnbias as ab
        >>> print(ab.Columns(3).picture(5, 5))
        #....
        .#...
        ..#..
        #..#.
        .#..#
    """

    stride: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", as_count("stride", self.stride, 1))
        super().__post_init__()

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return (k <= q) & ((q - k) % self.stride == 0)

    @property
    def stationary(self) -> bool:
        return True


class Chunks(Relation):
    """Keys in the query's own chunk of ``size`` positions: block-diagonal attention."""

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", as_count("size", self.size, 1))
        super().__post_init__()

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        chunk = torch.div(q, self.size, rounding_mode="floor")
        return chunk == torch.div(k, self.size, rounding_mode="floor")

    def _bind(self, at: Place) -> Bound:
        start = at.positions // self.size * self.size
        return ranges(at, start, start + self.size)

    @property
    def T(self) -> Relation:
        return self


class Prefix(Relation):
    """Keys before ``length``, for every query.

    Args:
        length: an integer, or one per batch [B].
    """

    length: int | Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", as_lengths("length", self.length))
        super().__post_init__()

    @property
    def batch_size(self) -> int:
        return 1 if isinstance(self.length, int) else len(self.length)

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return k < per_batch(self.length, q, b) + torch.zeros_like(q)

    def _bind(self, at: Place) -> Bound:
        if isinstance(self.length, int):
            return ranges(at, 0, self.length)
        return key_ranges(at, self.length)


def as_lengths(name: str, length: Any) -> int | Tensor:
    """A length, or a private tensor of one per batch."""
    if isinstance(length, int | np.integer):
        return as_count(name, length)
    lengths = as_indices(name, length, (1,))
    if not len(lengths):
        raise ValueError(f"{name}: wanted at least one length, got none")
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling():  # else when they are laid out
        _check_lengths(name, int(lengths.min()))
    return lengths


def _check_lengths(name: str, least: int) -> None:
    if least < 0:
        raise ValueError(f"{name}: wanted 0 or more, got {least}")


def per_batch(length: int | Tensor, q: Tensor, b: Tensor | None) -> Tensor:
    """The length that holds in each batch."""
    if isinstance(length, int):
        return torch.full((), length, device=q.device)
    length = length.to(q.device)
    return length[0] if b is None else length[b.clamp(max=len(length) - 1)]


def key_ranges(at: Place, length: Tensor) -> Bound:
    """Keys below a length per batch; equal lengths are held once."""
    host, group = np.unique(length.cpu().numpy(), return_inverse=True)
    _check_lengths("lengths", int(host.min()))
    stop = np.repeat(host[:, None], at.q_len, 1)
    form = Intervals.one_per_row(at.q_len, at.k_len, np.zeros_like(stop), stop)
    return Bound(Intervals(at.q_len, at.k_len, group[:, None], form.ptr, form.start, form.stop))


class Bipartite(Relation):
    """Positions from ``split`` on attend to those before it: one part of a bipartite graph to the other."""

    split: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", as_count("split", self.split))
        super().__post_init__()

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return (q >= self.split) & (k < self.split)

    def _bind(self, at: Place) -> Bound:
        return ranges(at, 0, np.where(at.positions >= self.split, self.split, 0))


class Global(Relation):
    """The given positions attend to all and are attended by all.

    Args:
        positions: their numbers.

    Example:
        >>> import attnbias as ab
        >>> print((ab.Window(before=1) | ab.Global([0])).picture(5, 5))
        #####
        ##...
        ###..
        #.##.
        #..##
    """

    positions: Iterable[int]

    def __post_init__(self) -> None:
        if not isinstance(self.positions, Iterable):
            raise TypeError(f"positions: wanted a list of positions, got {self.positions!r}")
        positions = list(self.positions)
        if not all(type(x) is int for x in positions):
            positions = as_indices("positions", positions, (1,)).tolist()
        positions = sorted(set(positions))
        if positions and positions[0] < 0:
            raise ValueError(f"positions: wanted 0 or more, got {positions[0]}")
        object.__setattr__(self, "positions", tuple(positions))
        super().__post_init__()

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        chosen = torch.tensor(tuple(self.positions), dtype=torch.int64, device=q.device)
        return torch.isin(q, chosen) | torch.isin(k, chosen)

    def _bind(self, at: Place) -> Bound:
        chosen = np.array(tuple(self.positions), np.int64)
        first = np.concatenate(([True], np.diff(chosen) > 1)) if len(chosen) else chosen > 0
        last = np.concatenate((np.diff(chosen) > 1, [True])) if len(chosen) else first
        start, stop = chosen[first], chosen[last] + 1
        if len(start) * at.q_len > max(RANGES_PER_ROW * at.q_len, MANY_RANGES):
            return super()._bind(at)
        start, stop = np.minimum(start, at.k_len), np.minimum(stop, at.k_len)
        form = Intervals.empty(at.q_len, at.k_len, np.zeros((1, 1), np.int64)).from_ranges(
            np.repeat(np.arange(at.q_len), len(start)),
            np.tile(start, at.q_len),
            np.tile(stop, at.q_len),
        )
        everything = np.where(np.isin(at.positions, chosen), at.k_len, 0)
        rows = Intervals.one_per_row(at.q_len, at.k_len, np.zeros_like(everything), everything)
        return Bound(form | rows)

    @property
    def T(self) -> Relation:
        return self


class RandomBlocks(Relation):
    """Each block of queries attends to ``count`` blocks drawn at random from those up to its own.

    Drawn without replacement, by block number alone, so that the relation needs no length and a decoding
    step sees what a whole pass saw; the first ``count`` blocks attend to all of each other. Both
    directions: ``r | r.T``.

    Args:
        size: positions in a block.
        count: blocks that a block attends to.
        seed: another seed, another draw.
    """

    size: int
    blocks: int
    seed: int

    def __init__(self, size: int, count: int, seed: int = 0) -> None:
        # The argument is "count"; the attribute is not, for every relation has a method of that name.
        object.__setattr__(self, "size", as_count("size", size, 1))
        object.__setattr__(self, "blocks", as_count("count", count))
        object.__setattr__(self, "seed", as_count("seed", seed))
        self.__post_init__()

    def _draw(self, block: Tensor) -> Tensor:
        """The key blocks of each query block, [..., count], all different (Floyd's sampling)."""
        picks: list[Tensor] = []
        for turn in range(self.blocks):
            # Of the block + 1 blocks up to its own, the last ``count - turn - 1`` wait for later turns.
            top = block + 1 - self.blocks + turn
            pick = _hash(self.seed, block, turn) % (top + 1)
            taken = torch.zeros_like(pick, dtype=torch.bool)
            for earlier in picks:
                taken |= pick == earlier
            picks.append(torch.where(taken, top, pick))
        return torch.stack(picks, -1) if picks else block.new_empty((*block.shape, 0))

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        block = torch.div(k, self.size, rounding_mode="floor")
        mine = torch.div(q, self.size, rounding_mode="floor")
        early = (mine < self.blocks) & (block < self.blocks)  # as many blocks as there are: all of them
        if torch.compiler.is_compiling() or bool((mine >= self.blocks).any()):
            drawn = self._draw(mine.clamp(min=self.blocks))
            hit = torch.zeros_like(early)
            for turn in range(self.blocks):
                hit = hit | (drawn[..., turn] == block)
            early = early | (hit & (mine >= self.blocks))
        return early & (q >= 0) & (k >= 0)

    def _bind(self, at: Place) -> Bound:
        position = at.positions
        mine = position // self.size
        early = np.flatnonzero((position >= 0) & (mine < self.blocks))
        late = np.flatnonzero(mine >= self.blocks)
        if len(late) * self.blocks > max(RANGES_PER_ROW * at.q_len, MANY_RANGES):
            return super()._bind(at)
        start = np.zeros((0, self.blocks), np.int64)
        if len(late):
            first = mine[late[0]]
            drawn = self._draw(torch.arange(first, mine[late[-1]] + 1, device="cpu")).numpy()
            start = drawn[mine[late] - first] * self.size  # [rows, count]
        form = Intervals.empty(at.q_len, at.k_len, np.zeros((1, 1), np.int64)).from_ranges(
            np.concatenate((early, np.repeat(late, self.blocks))),
            np.concatenate((np.zeros_like(early), np.minimum(start, at.k_len).reshape(-1))),
            np.minimum(
                np.concatenate((early * 0 + self.blocks * self.size, (start + self.size).reshape(-1))),
                at.k_len,
            ),
        )
        return Bound(form)

    def _values(self) -> list[tuple[str, Any, Any]]:
        return [("size", self.size, None), ("count", self.blocks, None), ("seed", self.seed, 0)]


def _hash(seed: int, block: Tensor, turn: int) -> Tensor:
    """32 random-looking bits (the finaliser of MurmurHash3), in int64."""
    low = 0xFFFFFFFF
    x = (block * 0x9E3779B1 + (turn + 1) * 0x85EBCA77 + seed * 0xC2B2AE3D) & low
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & low
    return x ^ (x >> 16)

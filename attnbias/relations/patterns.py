"""Relations that compare positions: each is a rule on ``q`` and ``k``, without lengths or data."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_count, as_indices, warn_caller
from ..sets.bound import MANY_RANGES, MOST_PER_ROW, Bound, Place
from ..sets.intervals import Intervals, Ints, make_groups
from ..sets.predicate import Predicate
from .relation import Relation
from .value import integer

_MOST_LISTED = 8  # steps of a dilation that are listed; more are a rule, and each distance is tested once


def ranges(at: Place, start: Ints | int, stop: Ints | int) -> Bound:
    """Return one range of key positions per query."""
    row = np.full(at.q_len, -at.k_start, np.int64)
    return Bound(Intervals.one_per_row(at.q_len, at.k_len, row + start, row + stop))


class Full(Relation):
    """Every query attends to every key: self-attention, the complete graph.

    Example:
        >>> print(Full().picture(2, 4))
        ####
        ####
    """

    stationary = _symmetric = True

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return torch.ones_like(q + k, dtype=torch.bool)

    def _bind(self, at: Place) -> Bound:
        return ranges(at, at.k_start, at.k_stop)

    def __invert__(self) -> Relation:
        return Empty()


class Empty(Relation):
    """No query attends to any key.

    Example:
        >>> Empty().count(4, 4)
        0
    """

    stationary = _symmetric = True

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return torch.zeros_like(q + k, dtype=torch.bool)

    def _bind(self, at: Place) -> Bound:
        return ranges(at, 0, 0)

    def __invert__(self) -> Relation:
        return Full()


class Causal(Relation):
    """Keys up to the query's own position: masked attention, a total order.

    Example:
        >>> import attnbias as ab
        >>> print(ab.Causal().picture(3, 4))
        #...
        ##..
        ###.
    """

    stationary = True
    band = (math.inf, 0)  # reach before and after the query

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return k <= q

    def _bind(self, at: Place) -> Bound:
        return ranges(at, at.k_start, at.positions + 1)

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
    stationary = True

    def __post_init__(self) -> None:
        for name in ("before", "after"):
            reach = getattr(self, name)
            if reach is None:
                continue
            if not isinstance(reach, bool) and isinstance(reach, int | np.integer) and reach < 0:
                raise ValueError(f"{name}: wanted 0 or more, or None for no limit, got {reach}")
            object.__setattr__(self, name, as_count(name, reach))
        super().__post_init__()

    @property
    def _content(self) -> Hashable:
        # A window without limits is the same value as the relation with a name for it.
        named = window_of(*self.band) if self.before is None else self
        return super()._content if isinstance(named, Window) else named._content

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
        start = at.k_start if self.before is None else at.positions - self.before
        stop = at.k_stop if self.after is None else at.positions + self.after + 1
        return ranges(at, start, stop)

    @property
    def T(self) -> Relation:
        return Window(self.after, self.before)


def window_of(before: float, after: float) -> Relation:
    """Return the simplest relation of that reach; ``math.inf`` = no limit."""
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

    dilation: int = integer(least=1)
    before: int = integer()
    after: int = integer(default=0)
    stationary = True

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        gap = q - k
        near = (gap <= self.before * self.dilation) & (-gap <= self.after * self.dilation)
        return near & (gap % self.dilation == 0)

    def _bind(self, at: Place) -> Bound:
        if self.dilation == 1:
            return Window(self.before, self.after)._bind(at)
        if self.before + self.after >= _MOST_LISTED:
            band = Window(self.before * self.dilation, self.after * self.dilation)._bind(at).solid
            assert isinstance(band, Intervals)
            rule = at.rule(self.related)
            return Bound(Predicate(band, rule, at.q_start, True, at.device, is_implied=True))
        steps = np.arange(-self.before, self.after + 1) * self.dilation
        key = at.positions[:, None] + steps
        row = np.broadcast_to(np.arange(at.q_len)[:, None], key.shape)
        exists = (key >= at.k_start) & (key < at.k_stop)
        return at.bind_pairs(row[exists], key[exists])

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

    stride: int = integer(least=1)
    stationary = True

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return (k <= q) & ((q - k) % self.stride == 0)


class Chunks(Relation):
    """Keys in the query's own chunk of ``size`` positions: block-diagonal attention.

    Example:
        >>> print(Chunks(2).picture(4))
        ##..
        ##..
        ..##
        ..##
    """

    size: int = integer(least=1)
    _symmetric = True

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        chunk = torch.div(q, self.size, rounding_mode="floor")
        return chunk == torch.div(k, self.size, rounding_mode="floor")

    def _bind(self, at: Place) -> Bound:
        start = at.positions // self.size * self.size
        return ranges(at, start, start + self.size)


class Bipartite(Relation):
    """Positions from ``split`` on attend to those before it: one part of a bipartite graph to the other.

    Example:
        >>> Bipartite(2).picture(4).split()
        ['....', '....', '##..', '##..']
    """

    split: int = integer()

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        return (q >= self.split) & (k < self.split)

    def _bind(self, at: Place) -> Bound:
        return ranges(at, at.k_start, np.where(at.positions >= self.split, self.split, at.k_start))


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
    _symmetric = True

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

    def _check(self, at: Place) -> None:
        super()._check(at)
        first = next(iter(self.positions), 0)
        if not at.is_moved and at.q_len and at.k_len and first >= max(at.k_stop, at.q_start + at.q_len):
            warn_caller(f"Global: its first position, {first}, is past the last token: it relates nothing")

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        chosen = torch.tensor(tuple(self.positions), dtype=torch.int64, device=q.device)
        return torch.isin(q, chosen) | torch.isin(k, chosen)

    def _bind(self, at: Place) -> Bound:
        chosen = np.array(tuple(self.positions), np.int64)
        seen = chosen[(chosen >= at.k_start) & (chosen < at.k_stop)] - at.k_start
        # The keys that every query sees, as one row; then a row for each query.
        runs = Intervals.empty(1, at.k_len, make_groups()).from_ranges(np.zeros_like(seen), seen, seen + 1)
        if len(runs.start) * at.q_len > max(MOST_PER_ROW * at.q_len, MANY_RANGES):
            return super()._bind(at)
        columns = runs.take_rows(np.zeros(at.q_len, np.int64), at.q_len)
        everything = np.where(np.isin(at.positions, chosen), at.k_len, 0)
        return Bound(columns | Intervals.one_per_row(at.q_len, at.k_len, 0 * everything, everything))


class RandomBlocks(Relation):
    """Each block of queries attends to ``count`` blocks drawn at random from those up to its own.

    Drawn without replacement, from nothing but the block's number: so the relation needs no length, and a
    decoding step sees what a whole pass saw. The first ``count`` blocks attend to all of each other. Both
    directions: ``r | r.T``.

    Args:
        size: positions in a block.
        count: blocks that a block attends to.
        seed: another seed, another draw.

    Example:
        >>> RandomBlocks(2, count=1).within(Causal() | Chunks(2), 8)
        True
    """

    size: int = integer(least=1)
    count_: int = integer()
    seed: int = integer(default=0)

    def __init__(self, size: int, count: int, seed: int = 0) -> None:
        for name, value in (("size", size), ("count_", count), ("seed", seed)):
            object.__setattr__(self, name, value)
        self.__post_init__()

    def _draw(self, block: Tensor) -> Tensor:
        """Return the key blocks of each query block, [..., count], all different (Floyd's sampling)."""
        picks: list[Tensor] = []
        for turn in range(self.count_):
            # Of the block + 1 blocks up to its own, the last ``count - turn - 1`` wait for later turns.
            top = block + 1 - self.count_ + turn
            pick = _hash(self.seed, block, turn) % (top + 1)
            taken = torch.zeros_like(pick, dtype=torch.bool)
            for earlier in picks:
                taken |= pick == earlier
            picks.append(torch.where(taken, top, pick))
        return torch.stack(picks, -1) if picks else block.new_empty((*block.shape, 0))

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        block = torch.div(k, self.size, rounding_mode="floor")
        mine = torch.div(q, self.size, rounding_mode="floor")
        early = (mine < self.count_) & (block < self.count_)  # as many blocks as there are: all of them
        if torch.compiler.is_compiling() or bool((mine >= self.count_).any()):
            drawn = self._draw(mine.clamp(min=self.count_))
            hit = torch.zeros_like(early)
            for turn in range(self.count_):
                hit = hit | (drawn[..., turn] == block)
            early = early | (hit & (mine >= self.count_))
        return early & (q >= 0) & (k >= 0)

    def _bind(self, at: Place) -> Bound:
        late = max(0, at.q_len - self.count_ * self.size)
        if late * self.count_ > max(MOST_PER_ROW * at.q_len, MANY_RANGES):
            return super()._bind(at)
        return at.in_steps(self._bind_some)

    def _bind_some(self, at: Place) -> Bound:
        mine = at.positions // self.size
        early = np.flatnonzero((mine >= 0) & (mine < self.count_))
        late = np.flatnonzero(mine >= self.count_)
        start = np.zeros((0, self.count_), np.int64)
        if len(late):
            first = mine[late[0]]
            drawn = self._draw(torch.arange(first, mine[late[-1]] + 1, device="cpu")).numpy()
            start = drawn[mine[late] - first] * self.size  # [rows, count]
        row = np.concatenate((early, np.repeat(late, self.count_)))
        stop = np.concatenate((0 * early + self.count_ * self.size, start.reshape(-1) + self.size))
        start = np.concatenate((0 * early, start.reshape(-1)))
        return at.bind_ranges(row, start, stop)


def _hash(seed: int, block: Tensor, turn: int) -> Tensor:
    """Return 32 random-looking bits (the finaliser of MurmurHash3), in int64."""
    low = 0xFFFFFFFF
    x = (block * 0x9E3779B1 + (turn + 1) * 0x85EBCA77 + seed * 0xC2B2AE3D) & low
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & low
    return x ^ (x >> 16)

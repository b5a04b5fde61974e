"""The base class of relations: a pointwise definition, binding it to lengths, and the algebra."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.serialization import add_safe_globals
from typing_extensions import Unpack, dataclass_transform

from ..arguments import as_count
from ..layouts.build import outline_bound
from ..layouts.cache import cached_layout
from ..sets.bound import Bound, Place
from ..sets.inclusion import is_within
from ..sets.pairs import Pairs
from ..sets.predicate import Predicate
from .recipe import register
from .value import Value, integer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..layouts.fill import Form
    from ..layouts.layout import Layout
    from ..layouts.outline import Outline
    from ..scores.multilevel import MultiLevel
    from .ranges import Ranges

Start = int | Literal["end"]
Size = int | None


class Sizes(TypedDict, total=False):
    """Sizes for relations that fit any."""

    batch: Size
    heads: Size


class Algebra(NamedTuple):
    """The functions that make what operators and methods of a relation return."""

    conjunction: Callable[[Relation, Relation], Relation]
    disjunction: Callable[[Relation, Relation], Relation]
    complement: Callable[[Relation], Relation]
    transpose: Callable[[Relation], Relation]
    shift: Callable[[Relation, int], Relation]
    permute: Callable[[Relation, Any], Relation]
    ranges: Callable[[Bound, str], Ranges]


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(integer,))
class Relation(Value):
    """A rule that says which query may attend to which key.

    A subclass declares its fields as a dataclass does, and defines :meth:`related`; everything else follows.
    It is made a frozen dataclass without a decorator. It may define ``_bind`` as well, to give its pairs
    exactly, as ranges or edges, instead of having each tested.

    Example:
        >>> import attnbias as ab
        >>> class Every(ab.Relation):
        ...     step: int
        ...     def related(self, q, k, b=None, h=None):
        ...         return (k % self.step == 0) & (k <= q)
        >>> print((Every(2) | ab.Window(before=1)).picture(4, 4))
        #...
        ##..
        ###.
        #.##
    """

    _algebra: ClassVar[Algebra]  # set by algebra.py, whose classes are relations themselves

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        cls._least = {f.name: f.metadata["least"] for f in fields if "least" in f.metadata}
        inherited = next((base for base in cls.__mro__[1:-1] if "_bind" in vars(base)), Relation)
        if "related" in vars(cls) and "_bind" not in vars(cls) and inherited is not Relation:
            raise TypeError(
                f"{cls.__name__}: related() is overridden and {inherited.__name__}._bind() is not; "
                "override both, or subclass ab.Relation"
            )
        is_ours = cls.__module__.startswith(f"{__package__}.")
        add_safe_globals([cls])  # torch.load(weights_only=True) may make one: it holds numbers and tensors
        cls._registered = register(cls, cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}")

    # -- the definition ---------------------------------------------------------------------------

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        """Return whether queries at positions ``q`` may attend to keys at positions ``k``.

        Args:
            q: positions of queries, int64; a query row stands at its number plus ``q_start``.
            k: positions of keys, int64.
            b: batch numbers (None = 0); all four broadcast together.
            h: head numbers (None = 0).
        """
        raise NotImplementedError(f"{type(self).__name__} does not define related(q, k, b, h)")

    def multiplicity(
        self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None
    ) -> Tensor | None:
        """Return how often each pair counts (duplicate edges; 0 = unrelated), or None: at most once."""
        return None

    @property
    def batch_size(self) -> int | None:
        """1, the batch size that the relation is made for, or None when it fits any."""
        return 1

    @property
    def head_count(self) -> int | None:
        """1, the number of heads that the relation is made for, or None when it fits any."""
        return 1

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """Query positions and keys that the relation's data describes; None where it fits any."""
        return None, None

    @property
    def stationary(self) -> bool:
        """Whether ``related`` depends on ``q - k`` only."""
        return False

    @property
    def _symmetric(self) -> bool:
        """Whether the relation is known to be its own reverse."""
        return False

    @property
    def listed(self) -> bool:
        """Whether the relation stores its pairs one by one."""
        return False

    @property
    def repeats(self) -> bool:
        """Whether a pair may count more than once."""
        return False

    # -- binding ----------------------------------------------------------------------------------

    def check(self, q_len: int, k_len: int, q_start: int = 0, batch: Size = None, heads: Size = None) -> None:
        """Raise ValueError, naming both sizes, unless the relation can be bound there."""
        self._check(Place(q_len, k_len, q_start, batch, heads))

    def _check(self, at: Place) -> None:
        queries, keys = self.lengths
        name = type(self).__name__
        if keys is not None and keys != at.k_len:
            raise ValueError(f"relation: this {name} is for {keys} keys, got k_len = {at.k_len}")
        if queries is not None and not (at.q_start >= 0 and at.q_start + at.q_len <= queries):
            where = f" at q_start = {at.q_start}" if at.q_start else ""
            raise ValueError(f"relation: this {name} is for {queries} queries, got q_len = {at.q_len}{where}")
        for what, mine, given in (("batch", self.batch_size, at.batch), ("heads", self.head_count, at.heads)):
            if given is not None and mine is not None and mine not in (1, given):
                raise ValueError(f"relation: this {name} has {what} {mine}, got {what} {given}")

    def bind(
        self,
        q_len: int,
        k_len: int,
        q_start: Start = 0,
        *,
        batch: Size = None,
        heads: Size = None,
        device: str = "cpu",
        most_listed: float = 1.0,
    ) -> Bound:
        """Return the set of related pairs at these lengths.

        Args:
            q_len: number of queries.
            k_len: number of keys.
            q_start: position of the first query among the keys, or "end".
            batch: batch size, for relations that fit any.
            heads: head count, for relations that fit any.
            device: where pairs are tested that no exact form holds.
            most_listed: share of related pairs up to which a scattered mask is listed.
        """
        start = resolve_start(q_start, q_len, k_len)
        self.check(q_len, k_len, start, batch, heads)
        batch, heads = batch or self.batch_size, heads or self.head_count
        return self._bind(Place(q_len, k_len, start, batch, heads, device, most_listed))

    def _bind(self, at: Place) -> Bound:
        everywhere = at.everywhere(*self._sizes_in_use(at))
        rule = at.rule(self.related)
        return Bound(Predicate(everywhere, rule, at.q_start, self.stationary, at.device, is_implied=True))

    def _sizes_in_use(self, at: Place) -> tuple[int, int]:
        """Return the batches and heads to tell apart; of sizes that fit any, the shape of one pair tells."""
        known = (self.batch_size, self.head_count)
        if None not in known or not at.q_len or not at.k_len:
            return known[0] or 1, known[1] or 1
        wanted = known[0] or at.batch, known[1] or at.heads
        b, h, one = (torch.arange(n, device=at.device) for n in (*(size or 2 for size in wanted), 1))
        pair = self.related(one[:, None] + at.q_start, one, b.view(-1, 1, 1, 1), h.view(-1, 1, 1))
        shape = (1, 1, 1, 1, *pair.shape)[-4:-2]
        for what, size, given in zip(("batch", "heads"), shape, wanted, strict=True):
            if size > 1 and given is None:
                raise ValueError(f"{what}: {self!r} differs by {what}, so their number is wanted, got None")
        return shape[0], shape[1]

    def _outline(self, at: Place, tile: int) -> Outline | None:
        """Return which tiles hold pairs, found on the device of the data; None if only the host can tell."""
        is_moved = at.is_moved or at.k_start != 0
        if self.repeats or self.listed or not self._is_on_host or (is_moved and self.lengths != (None, None)):
            return None
        return _outline_once(self, at, tile) if self.is_small else outline_bound(self._bind(at), at, tile)

    @property
    def _is_on_host(self) -> bool:
        """Whether all data is."""
        return all(x.device.type == "cpu" for x in self.recipe.data)

    def list_pairs(self, q_len: int, k_len: int, q_start: int, batch: Size, heads: Size) -> Pairs | None:
        """Return the pairs at these lengths if they are stored one by one on a GPU, else None."""
        return None

    def layout(
        self,
        q_len: int,
        k_len: int | None = None,
        *,
        q_start: Start = 0,
        device: torch.device | str = "cpu",
        form: Form = "auto",
        batch: Size = None,
        heads: Size = None,
        score: MultiLevel | None = None,
        capacity: int | tuple[int, int] | None = None,
    ) -> Layout:
        """Return the layout at these lengths, built once and kept with the relation.

        The arguments are those of :meth:`Layout.build`. A layout with a capacity is built anew in each call.
        """
        k_len = q_len if k_len is None else k_len
        make = cached_layout
        if torch.is_inference_mode_enabled():  # what is kept is used in training, too
            make = torch.inference_mode(False)(cached_layout)
        return make(
            self,
            q_len,
            k_len,
            q_start=resolve_start(q_start, q_len, k_len),
            device=torch.device(device),
            form=form,
            # Sizes matter only to relations that fit any: elsewhere they would split the cache.
            batch=batch if self.batch_size is None else None,
            heads=heads if self.head_count is None else None,
            score=score,
            capacity=capacity,
        )

    # -- a look at the pairs ----------------------------------------------------------------------

    def dense(
        self,
        q_len: int,
        k_len: int | None = None,
        q_start: Start = 0,
        *,
        batch: Size = None,
        heads: Size = None,
    ) -> Tensor:
        """Return booleans [q_len, k_len], or [batch, heads, q_len, k_len] if the relation differs there.

        There are as many keys as queries if ``k_len`` is None, here and in the methods below.
        """
        k_len = q_len if k_len is None else k_len
        start, device = resolve_start(q_start, q_len, k_len), self._device
        self.check(q_len, k_len, start, batch, heads)
        self._sizes_in_use(Place(q_len, k_len, start, batch, heads, str(device)))  # raises if one is missing
        b = torch.arange(self.batch_size or batch or 1, device=device).view(-1, 1, 1, 1)
        h = torch.arange(self.head_count or heads or 1, device=device).view(-1, 1, 1)
        q = torch.arange(start, start + q_len, device=device).view(-1, 1)
        grid = self.related(q, torch.arange(k_len, device=device), b, h).cpu()
        grid = grid.expand(len(b), len(h), q_len, k_len).contiguous()
        return grid[0, 0] if len(b) == len(h) == 1 else grid

    def picture(
        self, q_len: int, k_len: int | None = None, q_start: Start = 0, *, batch: int = 0, head: int = 0
    ) -> str:
        """Draw the relation of one batch and head: a line per query, '#' where it may attend to the key.

        Example:
            >>> import attnbias as ab
            >>> print(ab.Window(before=1).picture(4))
            #...
            ##..
            .##.
            ..##
        """
        from . import display

        grid = display.pairs(self, q_len, q_len if k_len is None else k_len, q_start, batch, head)
        return "\n".join("".join("#" if x else "." for x in row) for row in grid.tolist())

    def plot(
        self,
        q_len: int | None = None,
        k_len: int | None = None,
        q_start: Start = 0,
        *,
        batch: int = 0,
        head: int = 0,
        axes: Axes | None = None,
        title: str | None = None,
    ) -> Axes:
        """Draw with matplotlib which pairs are related, for one batch and head; return the axes.

        Above 128 tokens a cell stands for a square of pairs, and is shaded by how many of them are related.

        Args:
            q_len: number of queries; the relation's own if None, or 32.
            k_len: number of keys; as many as queries if None.
            q_start: position of the first query among the keys, or "end".
            batch: which batch, of relations that differ by batch.
            head: which head, of relations that differ by head.
            axes: where to draw; those of a new figure if None.
            title: what to write above, in place of the relation.

        Example:
            >>> import attnbias as ab
            >>> axes = (ab.Window(before=9) | ab.Global([0])).plot(64)  # doctest: +SKIP
        """
        from ..layouts.plot import plot
        from . import display

        q_len, k_len = display.lengths_of(self, q_len, k_len)
        drawn = display.cells(self, q_len, k_len, q_start, batch, head)
        return plot(drawn, title or repr(self), axes)

    def _repr_html_(self) -> str | None:
        from . import display

        return display.as_html(self)

    def count(
        self,
        q_len: int,
        k_len: int | None = None,
        q_start: Start = 0,
        *,
        batch: Size = None,
        heads: Size = None,
    ) -> int:
        """Return the number of related pairs in ``dense``; where the relation is exact, without a visit."""
        k_len = q_len if k_len is None else k_len
        bound = self.bind(q_len, k_len, q_start, batch=batch, heads=heads)
        uses = (self.batch_size or batch or 1) * (self.head_count or heads or 1)
        return bound.count() * (uses // bound.group.size)

    def ranges(
        self,
        q_len: int,
        k_len: int | None = None,
        q_start: Start = 0,
        *,
        batch: Size = None,
        heads: Size = None,
    ) -> Ranges:
        """Return the keys of each query at these lengths as a relation of ranges.

        Its row 0 is the first query, so use it at ``q_start=0``.

        Raises:
            ValueError: if the relation tests pairs one by one, as ``Where`` does.

        Example:
            >>> import attnbias as ab
            >>> (ab.Window(before=0) | ab.Prefix(1)).ranges(3, 3)
            Ranges(start=[[0, 0], [0, 0], [0, 2]], stop=[[1, 0], [2, 0], [1, 3]])
        """
        k_len = q_len if k_len is None else k_len
        bound = self.bind(q_len, k_len, q_start, batch=batch, heads=heads)
        return self._algebra.ranges(bound, repr(self))

    def within(
        self,
        other: Relation,
        q_len: int,
        k_len: int | None = None,
        q_start: Start = 0,
        **sizes: Unpack[Sizes],
    ) -> bool:
        """Return whether the other relation relates every pair that this one does, at these lengths.

        Decided on ranges and edges, so that a million tokens take part of a second. ``sizes`` are ``batch``
        and ``heads``, for relations that fit any.

        Example:
            >>> import attnbias as ab
            >>> ab.Window(before=255).within(ab.Causal(), 1_000_000)
            True
        """
        k_len = q_len if k_len is None else k_len
        known = is_within(*(each.bind(q_len, k_len, q_start, **sizes) for each in (self, other)))
        if known is None:  # without exact forms each pair is tested
            return (self - other).count(q_len, k_len, q_start, **sizes) == 0
        return known

    def equivalent(
        self,
        other: Relation,
        q_len: int,
        k_len: int | None = None,
        q_start: Start = 0,
        **sizes: Unpack[Sizes],
    ) -> bool:
        """Return whether both relate the same pairs, at these lengths; ``sizes`` are those of ``within``.

        Example:
            >>> import attnbias as ab
            >>> ab.Window(before=9).equivalent(ab.Causal(), 10)
            True
            >>> ab.Window(before=9).equivalent(ab.Causal(), 11)
            False
        """
        both = ((self, other), (other, self))
        return all(a.within(b, q_len, k_len, q_start, **sizes) for a, b in both)

    # -- algebra ----------------------------------------------------------------------------------

    def __and__(self, other: Relation) -> Relation:
        return self._algebra.conjunction(self, other) if isinstance(other, Relation) else NotImplemented

    def __or__(self, other: Relation) -> Relation:
        return self._algebra.disjunction(self, other) if isinstance(other, Relation) else NotImplemented

    def __invert__(self) -> Relation:
        return self._algebra.complement(self)

    def __sub__(self, other: Relation) -> Relation:
        # Not ~other: dynamo traces the method, not the operator.
        return self & other.__invert__() if isinstance(other, Relation) else NotImplemented

    @property
    def T(self) -> Relation:  # named as torch names a transpose
        """The reverse relation: ``k`` may attend to ``q``."""
        return self if self._symmetric else self._algebra.transpose(self)

    def shift(self, distance: int) -> Relation:
        """Return the relation with every key moved ``distance`` positions later (earlier when negative)."""
        return self._algebra.shift(self, distance)

    def permute(self, order: Tensor | Sequence[int]) -> Relation:
        """Return the relation among relabelled tokens: new ``i`` is what was at ``order[i]``."""
        return self._algebra.permute(self, order)

    def __bool__(self) -> NoReturn:
        raise TypeError("a relation is neither true nor false: write a & b, a | b, ~a")


@lru_cache(maxsize=16)  # patterns around data that changes in every step
def _outline_once(relation: Relation, at: Place, tile: int) -> Outline:
    return outline_bound(relation._bind(at), at, tile)


def resolve_start(q_start: Start, q_len: int, k_len: int) -> int:
    """Return the first query's position as a number; check it and the lengths."""
    q_len, k_len = as_count("q_len", q_len), as_count("k_len", k_len)
    if q_start == "end":
        return k_len - q_len
    if isinstance(q_start, bool) or not isinstance(q_start, int | np.integer):
        raise TypeError(f"q_start: wanted an integer or 'end', got {q_start!r}")
    return int(q_start)

"""What every relation is: a frozen value with a pointwise definition, an exact bound form and an algebra."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.serialization import add_safe_globals
from typing_extensions import dataclass_transform

from ..arguments import check_dense
from ..layouts.bound import Bound, Place
from ..layouts.predicate import Predicate
from .fields import MANY_NUMBERS, count_numbers, hashable, show
from .recipe import Recipe, register, write

if TYPE_CHECKING:
    from ..layouts.device import Pairs
    from ..layouts.layout import Form, Layout
    from ..multilevel import MultiLevel


@dataclass_transform(frozen_default=True, eq_default=False)
class Relation:
    """Which query may attend to which key.

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

    recipe: Recipe  # a plain attribute, because torch.compile guards its text and takes its tensors as inputs
    _registered: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        inherited = next((base for base in cls.__mro__[1:-1] if "_bind" in vars(base)), Relation)
        if "related" in vars(cls) and "_bind" not in vars(cls) and inherited is not Relation:
            raise TypeError(
                f"{cls.__name__}: related() is overridden and {inherited.__name__}._bind() is not; "
                "override both, or subclass ab.Relation"
            )
        is_ours = cls.__module__.startswith(f"{__package__}.")
        add_safe_globals([cls])  # torch.load(weights_only=True) may make one: it holds numbers and tensors
        cls._registered = register(cls, cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}")

    def __post_init__(self) -> None:
        fields = self.__dataclass_fields__  # type: ignore[attr-defined]
        if not torch.compiler.is_compiling() and (others := self.__dict__.keys() - fields - {"recipe"}):
            names = ", ".join(sorted(others))
            raise TypeError(f"{type(self).__name__}: wanted every attribute declared as a field, got {names}")
        values = [getattr(self, name) for name in fields]
        object.__setattr__(self, "recipe", write(self, self._registered, values))

    listed = False  # whether its pairs are held one by one, so that there are none beyond them
    repeats = False  # whether a pair may count more than once
    least_keys = 0  # keys that a list names without saying how many there are

    # -- the definition ---------------------------------------------------------------------------

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        """Whether queries at positions ``q`` may attend to keys at positions ``k``.

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
        """How often each pair counts (duplicate edges of a graph; 0 = unrelated), or None: at most once."""
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
        """Whether ``related`` depends on ``q - k`` alone."""
        return False

    # -- binding ----------------------------------------------------------------------------------

    def check(
        self,
        q_len: int,
        k_len: int,
        q_start: int = 0,
        batch: int | None = None,
        heads: int | None = None,
    ) -> None:
        """Raise ValueError, naming both sizes, unless the relation can be bound there."""
        queries, keys = self.lengths
        name = type(self).__name__
        if keys is not None and keys != k_len:
            raise ValueError(f"relation: this {name} is for {keys} keys, got k_len = {k_len}")
        if queries is not None and not (q_start >= 0 and q_start + q_len <= queries):
            raise ValueError(
                f"relation: this {name} is for {queries} queries, got q_len = {q_len}"
                + (f" at q_start = {q_start}" if q_start else "")
            )
        for what, mine, theirs in (
            ("batch", self.batch_size, batch),
            ("heads", self.head_count, heads),
        ):
            if theirs is not None and mine is not None and mine not in (1, theirs):
                raise ValueError(f"relation: this {name} has {what} {mine}, got {what} {theirs}")

    def bind(
        self,
        q_len: int,
        k_len: int,
        q_start: int | Literal["end"] = 0,
        *,
        batch: int | None = None,
        heads: int | None = None,
        device: str = "cpu",
    ) -> Bound:
        """The exact set of related pairs at these lengths."""
        start = resolve_start(q_start, q_len, k_len)
        self.check(q_len, k_len, start, batch, heads)
        batch, heads = batch or self.batch_size, heads or self.head_count
        return self._bind(Place(q_len, k_len, start, batch, heads, device))

    def _bind(self, at: Place) -> Bound:
        everywhere = at.everywhere(*self._sizes_in_use(at))
        return Bound(Predicate(everywhere, self.related, at.q_start, self.stationary, at.device))

    def _sizes_in_use(self, at: Place) -> tuple[int, int]:
        """Batches and heads to tell apart: for sizes that fit any, read from the shape of one pair."""
        known = (self.batch_size, self.head_count)
        if None not in known or not at.q_len or not at.k_len:
            return known[0] or 1, known[1] or 1
        wanted = known[0] or at.batch, known[1] or at.heads
        tried = [size or 2 for size in wanted]
        b, h, one = (torch.arange(n, device=at.device) for n in (*tried, 1))
        pair = self.related(one[:, None] + at.q_start, one, b.view(-1, 1, 1, 1), h.view(-1, 1, 1))
        shape = (1, 1, 1, 1, *pair.shape)[-4:-2]
        for what, size, given in zip(("batch", "heads"), shape, wanted, strict=True):
            if size > 1 and given is None:
                raise ValueError(f"{what}: {self!r} differs by {what}, so their number is wanted, got None")
        return shape[0], shape[1]

    def list_pairs(
        self, q_len: int, k_len: int, q_start: int, batch: int | None, heads: int | None
    ) -> Pairs | None:
        """Its pairs at these lengths if it holds them one by one, and on a GPU."""
        return None

    def layout(
        self,
        q_len: int,
        k_len: int,
        *,
        q_start: int | Literal["end"] = 0,
        device: torch.device | str = "cpu",
        form: Form = "auto",
        batch: int | None = None,
        heads: int | None = None,
        score: MultiLevel | None = None,
    ) -> Layout:
        """The layout at these lengths, built once and kept with the relation."""
        from ..layouts.cache import cached_layout

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
        )

    def dense(
        self,
        q_len: int,
        k_len: int,
        q_start: int | Literal["end"] = 0,
        *,
        batch: int | None = None,
        heads: int | None = None,
    ) -> Tensor:
        """The relation as booleans, [q_len, k_len], or [batch, heads, q_len, k_len] if it differs there."""
        start = resolve_start(q_start, q_len, k_len)
        self.check(q_len, k_len, start, batch, heads)
        device = self._device
        self._sizes_in_use(Place(q_len, k_len, start, batch, heads, str(device)))  # raises if one is missing
        b = torch.arange(self.batch_size or batch or 1, device=device).view(-1, 1, 1, 1)
        h = torch.arange(self.head_count or heads or 1, device=device).view(-1, 1, 1)
        q = torch.arange(start, start + q_len, device=device).view(-1, 1)
        grid = self.related(q, torch.arange(k_len, device=device), b, h).cpu()
        grid = grid.expand(len(b), len(h), q_len, k_len).contiguous()
        return grid[0, 0] if len(b) == len(h) == 1 else grid

    def picture(
        self,
        q_len: int,
        k_len: int,
        q_start: int | Literal["end"] = 0,
        *,
        batch: int = 0,
        head: int = 0,
    ) -> str:
        """Draw it for one batch and head: a line per query, '#' where it may attend to the key.

        Example:
            >>> import attnbias as ab
            >>> print(ab.Window(before=1).picture(4, 4))
            #...
            ##..
            .##.
            ..##
        """
        grid = self.dense(
            q_len, k_len, q_start, batch=self.batch_size or batch + 1, heads=self.head_count or head + 1
        )
        if grid.dim() == 4:
            for name, number, size in (("batch", batch, len(grid)), ("head", head, grid.shape[1])):
                if size > 1 and not 0 <= number < size:
                    raise ValueError(f"{name}: wanted 0..{size - 1}, got {number}")
            grid = grid[min(batch, len(grid) - 1), min(head, grid.shape[1] - 1)]
        return "\n".join("".join("#" if x else "." for x in row) for row in grid.tolist())

    def count(
        self,
        q_len: int,
        k_len: int,
        q_start: int | Literal["end"] = 0,
        *,
        batch: int | None = None,
        heads: int | None = None,
    ) -> int:
        """Number of related pairs in ``dense``, without visiting them where the relation is exact."""
        bound = self.bind(q_len, k_len, q_start, batch=batch, heads=heads)
        uses = (self.batch_size or batch or 1) * (self.head_count or heads or 1)
        return bound.count() * (uses // bound.group.size)

    def within(
        self,
        other: Relation,
        q_len: int,
        k_len: int,
        q_start: int | Literal["end"] = 0,
        *,
        batch: int | None = None,
        heads: int | None = None,
    ) -> bool:
        """Whether the other relation relates every pair that this one does, at these lengths.

        Decided on ranges and edges, so that a million tokens take part of a second.

        Example:
            >>> import attnbias as ab
            >>> ab.Window(before=255).within(ab.Causal(), 1_000_000, 1_000_000)
            True
        """
        from ..symmetry import is_within

        return is_within(self, other, q_len, k_len, q_start, batch=batch, heads=heads)

    def equivalent(
        self,
        other: Relation,
        q_len: int,
        k_len: int,
        q_start: int | Literal["end"] = 0,
        *,
        batch: int | None = None,
        heads: int | None = None,
    ) -> bool:
        """Whether both relate the same pairs, at these lengths.

        Example:
            >>> import attnbias as ab
            >>> ab.Window(before=9).equivalent(ab.Causal(), 10, 10)
            True
            >>> ab.Window(before=9).equivalent(ab.Causal(), 11, 11)
            False
        """
        from ..symmetry import is_within

        return is_within(self, other, q_len, k_len, q_start, batch=batch, heads=heads) and is_within(
            other, self, q_len, k_len, q_start, batch=batch, heads=heads
        )

    # -- algebra ----------------------------------------------------------------------------------

    def __and__(self, other: Relation) -> Relation:
        from .algebra import conjunction

        return conjunction(self, other) if isinstance(other, Relation) else NotImplemented

    def __or__(self, other: Relation) -> Relation:
        from .algebra import disjunction

        return disjunction(self, other) if isinstance(other, Relation) else NotImplemented

    def __invert__(self) -> Relation:
        from .algebra import Not

        return Not(self)

    def __sub__(self, other: Relation) -> Relation:
        # Not ~other: dynamo traces the method, not the operator.
        return self & other.__invert__() if isinstance(other, Relation) else NotImplemented

    @property
    def T(self) -> Relation:  # the reverse relation, named as torch names a transpose
        """The reverse relation: ``k`` may attend to ``q``."""
        from .algebra import Transposed

        return Transposed(self)

    def shift(self, distance: int) -> Relation:
        """The relation with every key moved ``distance`` positions later (earlier when negative)."""
        from .algebra import shifted

        return shifted(self, distance)

    def permute(self, order: Tensor | Sequence[int]) -> Relation:
        """The relation among relabelled tokens: new position ``i`` holds what was at ``order[i]``."""
        from .algebra import Permuted

        return Permuted(self, order)  # type: ignore[arg-type]  # made a tensor there

    def __bool__(self) -> NoReturn:
        raise TypeError("a relation is neither true nor false: write a & b, a | b, ~a")

    # -- values -----------------------------------------------------------------------------------

    def _values(self) -> list[tuple[str, Any, Any]]:
        """Name, value and default of each field."""
        kind = type(self)  # asked for the defaults, because dynamo cannot trace a field's own
        return [
            (f.name, getattr(self, f.name), getattr(kind, f.name, dataclasses.MISSING))
            for f in dataclasses.fields(self)  # type: ignore[arg-type]
        ]

    @property
    def _device(self) -> torch.device | str:
        """Where the relation's data lives."""
        for _, value, _ in self._values():
            if isinstance(value, Tensor):
                return value.device
        return "cpu"

    def _content(self) -> Hashable:
        """What makes two relations equal; reads the data, once."""
        content = self.__dict__.get("_content_")
        if content is None:
            content = (type(self), *(hashable(value) for _, value, _ in self._values()))
            object.__setattr__(self, "_content_", content)
        return content

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Relation):
            return NotImplemented
        return self is other or self._content() == other._content()

    def __hash__(self) -> int:
        number: int | None = self.__dict__.get("_hash_")
        if number is None:
            number = hash(self._content())
            object.__setattr__(self, "_hash_", number)
        return number

    @property
    def is_small(self) -> bool:
        """Whether it holds so little, on the host, that equal ones share layouts."""
        _, data, is_portable = self.recipe
        if not data:
            return True
        return is_portable and all(x.device.type == "cpu" and x.numel() <= MANY_NUMBERS for x in data)

    def _numbers(self) -> int:
        """How many numbers the repr would show."""
        return sum(count_numbers(value) for _, value, _ in self._values())

    def __repr__(self) -> str:
        short = self._numbers() > MANY_NUMBERS
        shown = [
            f"{name}={show(value, short)}"
            for name, value, default in self._values()
            if isinstance(value, Tensor) or default is dataclasses.MISSING or value != default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        Relation.__post_init__(self)


def resolve_start(q_start: int | Literal["end"], q_len: int, k_len: int) -> int:
    """The first query's position as a number; checks it and the lengths."""
    q_len, k_len = as_count("q_len", q_len), as_count("k_len", k_len)
    if q_start == "end":
        return k_len - q_len
    if isinstance(q_start, bool) or not isinstance(q_start, int | np.integer):
        raise TypeError(f"q_start: wanted an integer or 'end', got {q_start!r}")
    return int(q_start)


def as_indices(name: str, value: Any, ranks: Sequence[int]) -> Tensor:
    """A private int64 copy of integers given as a tensor, an array, nested lists, or a list of tensors."""
    tensor = _as_tensor(name, value)
    if tensor.numel() == 0 and not isinstance(value, Tensor | np.ndarray):
        tensor = tensor.long()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name}: wanted integers, got {tensor.dtype}")
    if tensor.dim() not in ranks:
        wanted = " or ".join(str(rank) for rank in ranks)
        raise ValueError(f"{name}: wanted {wanted} dimensions, got shape {list(tensor.shape)}")
    with torch.inference_mode(False):  # what is kept is used in training, too
        return tensor.detach().to(torch.int64, copy=True)


def _as_tensor(name: str, value: Any) -> Tensor:
    several = isinstance(value, list | tuple) and len(value) and all(isinstance(x, Tensor) for x in value)
    try:
        if several:  # such as sources and targets
            return torch.stack(list(value))
        # Copied, for torch takes no negative strides; on the host, whatever torch's default device is.
        array = np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(array, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        wanted = "integers in a tensor, an array or lists of equal length"
        raise TypeError(f"{name}: wanted {wanted}, got {type(value).__name__}") from None
    check_dense(name, tensor)
    return tensor


def as_count(name: str, value: Any, least: int = 0) -> int:
    """A Python integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: wanted an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: wanted at least {least}, got {value}")
    if value >= 1 << 31:
        raise ValueError(f"{name}: wanted less than 2^31, got {value}")
    return int(value)

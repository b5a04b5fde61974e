"""Launches kept for later calls: what Triton finds out about some forty arguments, found out once.

``kernel[grid](...)`` binds its arguments, sorts them into types, multiples of 16 and ones, and hashes all of
it in every call. A plan keeps the compiled kernel and its arguments but for the tensors, under a key of all
that the compiled kernel depends on, and calls the kernel's launcher with new addresses.

Arguments are given with a ``Hole`` for each tensor, so that a launch and its repetition are made of the same.
A plan holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from threading import Lock, local
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ..records import Strided

MOST = 1024  # plans; the oldest goes
_NEEDED = "run", "function", "packed_metadata"
_PLAIN = frozenset((type(None), int, float, bool, str))
_TENSORS = frozenset((Tensor, torch.nn.Parameter))


Key = tuple[Any, ...]
More = Callable[[Any], dict[str, Any]]


class Hole:
    """Stands for a tensor among arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the kernel takes."""
        return tensors[self.index]


class TileHole(Hole):
    """Stands for the descriptor of a tensor's tiles."""

    __slots__ = ("fields",)

    def __init__(self, index: int, x: Tensor, strides: list[int], block: list[int]) -> None:
        super().__init__(index)
        # Triton checks it here, once: a plan is for tensors of these sizes, strides and alignment.
        made = TensorDescriptor(x, list(x.shape), strides, block)
        self.fields = {**vars(made), "base": None}

    def fill(self, tensors: Sequence[Tensor]) -> TensorDescriptor:
        """Return the descriptor."""
        made = TensorDescriptor.__new__(TensorDescriptor)  # a dataclass, whose checks are left out
        made.__dict__.update(self.fields)
        made.base = tensors[self.index]
        return made


class Given:
    """The tensors of a launch, in the order of the holes, and a key of all else that it depends on."""

    __slots__ = ("addresses", "key", "tensors")

    def __init__(self, key: list[Any]) -> None:
        self.key = key
        self.tensors: list[Tensor] = []
        self.addresses: list[int] = []

    def add(self, values: Iterable[Any]) -> None:
        """Add to the key what a compiled kernel depends on in each value."""
        key = self.key
        for x in values:
            kind = type(x)
            if kind in _PLAIN:
                key.append(x)
            elif kind in _TENSORS or isinstance(x, Tensor):
                address = x.data_ptr()
                key += x.dtype, x.get_device(), address % 16
                self.tensors.append(x)
                self.addresses.append(address)
            elif kind is Strided and x[0] is not None:  # most are: this is what ``add`` would do
                address = x[0].data_ptr()
                key += kind, x[0].dtype, x[0].get_device(), address % 16, x[1], x[2]
                key += type(x[3]), getattr(x[3], "value", x[3])
                self.tensors.append(x[0])
                self.addresses.append(address)
            elif isinstance(x, tuple):
                key.append(kind)
                self.add(x)
            else:
                key += kind, getattr(x, "value", x)  # a constexpr is compared by its number

    def add_shapes(self, tensors: Iterable[Tensor | None]) -> None:
        """Add tensors with their sizes and strides, from which other arguments are made."""
        key = self.key
        for x in tensors:
            if x is None:
                key.append(None)
                continue
            address = x.data_ptr()
            key += x.shape, x.stride(), x.dtype, x.get_device(), address % 16
            self.tensors.append(x)
            self.addresses.append(address)

    def more(self, values: Iterable[Any]) -> Given:
        """Return a copy with more tensors, and a key of its own."""
        found = Given([])
        found.tensors, found.addresses = self.tensors.copy(), self.addresses.copy()
        found.add(values)
        return found


def with_holes(x: Any, first: int) -> tuple[Any, int]:
    """Return a value with holes in the place of its tensors, in the order of ``Given.add``, and the next."""
    if isinstance(x, Tensor):
        return Hole(first), first + 1
    if not isinstance(x, tuple):
        return x, first
    items = []
    for y in x:
        item, first = with_holes(y, first)
        items.append(item)
    return _like(x, items), first


def fill(x: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a value with its tensors in the holes."""
    if isinstance(x, Hole):
        return x.fill(tensors)
    return _like(x, [fill(y, tensors) for y in x]) if _has_hole(x) else x


def _has_hole(x: Any) -> bool:
    return isinstance(x, Hole) or (isinstance(x, tuple) and any(map(_has_hole, x)))


def _like(x: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    return type(x)._make(items) if hasattr(x, "_make") else tuple(items)  # a record stays one


class Planned(NamedTuple):
    """A launch, with holes."""

    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    note: Any = None  # what the caller wants to know in the next call


class Plan:
    """A launch that needs only tensors.

    Values are numbered: first those of the tensors, then the constants, then each descriptor, then the
    records, inner ones first; the arguments are a choice among them.
    """

    def __init__(self, kernel: Any, compiled: Any, planned: Planned, tensors: int, more: list[Any]) -> None:
        self.compiled, self.note, self.more = compiled, planned.note, more
        self.grid = (*planned.grid, 1, 1)[:3]
        # Triton's own launcher looks at the memory of each tensor, but takes addresses as they are; another
        # one may need to know how long a tensor is.
        self.takes_addresses = isinstance(compiled.run, CudaLauncher)
        self._constants: list[Any] = []
        self._described: list[TileHole] = []
        self._records: list[Callable[[list[Any]], Any]] = []
        arguments = [planned.arguments[name] for name in kernel.arg_names]
        self._count(arguments)
        self._first = tensors, tensors + len(self._constants)
        self._next_constant, self._next_described = self._first
        self._take = itemgetter(*[self._place(x) for x in arguments])

    def _count(self, items: Sequence[Any]) -> None:
        """Collect the constants and the descriptors."""
        for x in items:
            if isinstance(x, TileHole):
                self._described.append(x)
            elif isinstance(x, tuple) and _has_hole(x):
                self._count(x)
            elif not isinstance(x, Hole):
                self._constants.append(x)

    def _place(self, x: Any) -> int:
        """Return the number of a value."""
        if isinstance(x, TileHole):
            self._next_described += 1
            return self._next_described - 1
        if isinstance(x, Hole):
            return x.index
        if not _has_hole(x):
            self._next_constant += 1
            return self._next_constant - 1
        places = [self._place(y) for y in x]
        choose: Callable[[list[Any]], Any] = itemgetter(*places) if len(places) > 1 else _tuple_of(places)
        self._records.append(choose)
        return self._first[1] + len(self._described) + len(self._records) - 1

    def launch(self, addresses: Sequence[int], tensors: Sequence[Tensor], stream: int) -> None:
        """Launch the kernel on these tensors."""
        compiled = self.compiled
        values: list[Any] = [*(addresses if self.takes_addresses else tensors), *self._constants]
        for hole in self._described:
            values.append(hole.fill(tensors))
        for choose in self._records:
            values.append(choose(values))
        # As Triton's own JITFunction.run does, without hooks.
        compiled.run(
            *(*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None),
            *self._take(values),
        )


def _tuple_of(places: list[int]) -> Callable[[list[Any]], Any]:
    return lambda values: tuple(values[place] for place in places)


T = TypeVar("T")


class Bounded(Generic[T]):
    """Values by key, a bounded number, for all threads; the oldest goes."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._kept: dict[Key, T] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> T | None:
        """Return what is kept under a key."""
        return self._kept.get(key)

    def put(self, key: Key, value: T) -> None:
        """Keep a value."""
        with self._lock:
            while len(self._kept) >= self._most():
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = value

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._kept = {}


class Tape:
    """What a pass launches: plans and their tensors."""

    def __init__(self) -> None:
        self.launches: list[tuple[Plan, list[Tensor]]] = []
        self.scratch: list[Tensor] = []
        self.is_whole = True  # False: something was launched without a plan


_recording = local()


def scratch(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return float32 memory for what one kernel of a pass leaves to another one, and nothing else reads."""
    x = like.new_empty(shape, dtype=torch.float32)
    tape: Tape | None = getattr(_recording, "tape", None)
    if tape is not None:
        tape.scratch.append(x)
    return x


class Plans(Bounded[Plan]):
    """Plans by key."""

    def __init__(self) -> None:
        super().__init__(lambda: MOST)
        self.state = object()  # another one since they were last forgotten

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self.state = object()

    def record(self, run: Callable[[], None]) -> Tape:
        """Run, and return what this thread launched."""
        before, tape = getattr(_recording, "tape", None), Tape()
        _recording.tape = tape
        try:
            run()
        finally:
            _recording.tape = before
        return tape

    def _note(self, plan: Plan | None, given: Given) -> None:
        tape: Tape | None = getattr(_recording, "tape", None)
        if tape is None:
            return
        if plan is None:
            tape.is_whole = False
        else:
            tape.launches.append((plan, given.tensors))

    def again(self, given: Given, more: More | None = None) -> bool:
        """Launch what is kept under the key; return whether anything is.

        Args:
            given: the tensors, with a key of all that the kernel and its other arguments depend on.
            more: makes arguments that depend on what the first launch noted, such as buffers.
        """
        plan = self.get(tuple(given.key))
        if plan is None:
            return False
        if more is not None:
            given = given.more(more(plan.note).values())
            if given.key != plan.more:
                return False
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        plan.launch(given.addresses, given.tensors, stream)
        self._note(plan, given)
        return True

    def start(
        self, kernel: Any, given: Given, planned: Planned, more: More | None = None, *, keep: bool
    ) -> None:
        """Launch in Triton's own way, and keep the plan."""
        key, found = tuple(given.key), []
        if more is not None:
            made, count = more(planned.note), len(given.tensors)
            given = given.more(made.values())
            hollow, _ = with_holes(tuple(made.values()), count)
            arguments = {**planned.arguments, **dict(zip(made, hollow, strict=True))}
            planned, found = planned._replace(arguments=arguments), given.key
        arguments = {name: fill(x, given.tensors) for name, x in planned.arguments.items()}
        compiled = kernel[planned.grid](**arguments, **planned.options)
        # Triton documents none of these; without them every launch is its own.
        if not keep or not all(hasattr(compiled, name) for name in _NEEDED):
            self._note(None, given)
            return
        plan = Plan(kernel, compiled, planned, len(given.tensors), found)
        self.put(key, plan)
        self._note(plan, given)


PLANS = Plans()


def launch_with(
    kernel: Any,
    grid: tuple[int, ...],
    numbers: Mapping[str, Any],
    arguments: Mapping[str, Any],
    **options: Any,
) -> None:
    """Launch a kernel as ``kernel[grid]`` does, from a plan where there is one.

    Args:
        kernel: the Triton function.
        grid: how many programs.
        numbers: arguments without tensors.
        arguments: those that may be or hold tensors.
        options: of the compilation.
    """
    around = surroundings(kernel)
    given = Given([around, grid, *options.values(), *numbers.values()])
    given.add(arguments.values())
    if around is None or not PLANS.again(given):
        hollow, _ = with_holes(tuple(arguments.values()), 0)
        planned = Planned(grid, {**numbers, **dict(zip(arguments, hollow, strict=True))}, options)
        PLANS.start(kernel, given, planned, keep=around is not None)


class Surroundings(NamedTuple):
    """What Triton looks at besides arguments."""

    kernels: tuple[Any, ...]  # the functions
    device: int
    mode: tuple[Any, ...]


def surroundings(*kernels: Any) -> Surroundings | None:
    """Start a key with what Triton looks at besides arguments; None: it must launch in its own way."""
    for kernel in kernels:
        if type(kernel) is not JITFunction or kernel.pre_run_hooks:
            return None
    runtime, compilation = triton.knobs.runtime, triton.knobs.compilation
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return None
    inspect = runtime.add_stages_inspection_hook
    mode = (
        runtime.debug,
        compilation.instrumentation_mode,
        None if inspect is None else inspect(),
        # What else there may be, since Triton 3.9.
        getattr(compilation, "fpsan_homomorphic_casts", None),
    )
    return Surroundings(tuple([x.fn for x in kernels]), driver.active.get_current_device(), mode)

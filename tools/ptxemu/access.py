"""ld and st: global, shared, local and generic memory, and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .decode import Decoder, Source, Step, instruction
from .memory import OutOfBounds
from .parse import Instruction
from .state import LOCAL, Group
from .values import BITS, NUMPY, RAW, Array, Mask, raw

# ---- one access: addresses are int64, one per lane; a vector is several words of ``bits`` bits


def load_global(group: Group, at: Array, count: int, bits: int, mask: Mask) -> list[Array]:
    memory, size = group.launch.memory.mapped, count * bits // 8
    at = at - memory.base
    live = at if mask is None else at[mask]
    memory.check(live, size, size)
    if group.launch.races is not None:
        group.launch.races.read(live, size, group.cta_number if mask is None else group.cta_number[mask])
    group.launch.counters.bytes["ld"] += live.size * size
    word = (at if mask is None else np.where(mask, at, 0)) // (bits // 8)
    return [memory.view[bits][word + i] for i in range(count)]


def store_global(group: Group, at: Array, values: Sequence[Array], bits: int, mask: Mask) -> None:
    memory, size = group.launch.memory.mapped, len(values) * bits // 8
    at = at - memory.base
    live = at if mask is None else at[mask]
    memory.check(live, size, size)
    if group.launch.races is not None:
        group.launch.races.write(live, size, group.cta_number if mask is None else group.cta_number[mask])
    group.launch.counters.bytes["st"] += live.size * size
    for i, value in enumerate(values):
        memory.view[bits][live // (bits // 8) + i] = _live(group, value, mask)


def _live(group: Group, value: Array, mask: Mask) -> Array:
    """Return the values of the active lanes."""
    return group.wide(value) if mask is None else group.wide(value)[mask]


def check_shared(group: Group, at: Array, size: int) -> None:
    """Raise unless ``size`` bytes at each address belong to the CTA and are aligned."""
    if at.size and (at.min() < 0 or at.max() + size > group.batch.shared_bytes):
        wrong = int(at.min() if at.min() < 0 else at.max())
        raise OutOfBounds(f"shared access out of bounds: {wrong} size {size} of {group.batch.shared_bytes}")
    if (at & (size - 1)).any():
        raise OutOfBounds(f"misaligned shared access: {size} bytes at {int(at[(at & (size - 1)) != 0][0])}")


def load_shared(
    group: Group, at: Array, count: int, bits: int, mask: Mask, what: str = "ld.shared"
) -> list[Array]:
    size = count * bits // 8
    check_shared(group, at if mask is None else at[mask], size)
    if mask is not None:
        at = np.where(mask, at, 0)
    group.launch.counters.shared_access("ld", at.reshape(-1, 32), size)
    start = at + group.shared_base
    if group.batch.races is not None:
        touch_shared(group, what, start, size, mask)
    words, word = group.batch.shared.view(RAW[bits]), start // (bits // 8)
    return [words[word + i] for i in range(count)]


def store_shared(
    group: Group, at: Array, values: Sequence[Array], bits: int, mask: Mask, what: str = "st.shared"
) -> None:
    size = len(values) * bits // 8
    live = at if mask is None else at[mask]
    check_shared(group, live, size)
    if mask is None:
        group.launch.counters.shared_access("st", at.reshape(-1, 32), size)
    words = group.batch.shared.view(RAW[bits])
    start = live + (group.shared_base if mask is None else group.shared_base[mask])
    word = start // (bits // 8)
    for i, value in enumerate(values):
        words[word + i] = _live(group, value, mask)
    races = group.batch.races
    if races is not None:
        lost = np.zeros(live.shape, bool)
        for i, value in enumerate(values):
            lost |= words[word + i] != _live(group, value, mask).astype(RAW[bits])
        place, warp = lanes_of(group, mask)
        races.write(what, races.words(start, size), place, warp, lost=lost)


def lanes_of(group: Group, mask: Mask) -> tuple[Array, Array]:
    """Return the CTA's place and the warp's number of each active lane."""
    warp = (group.thread >> np.uint32(5)).astype(np.int64)
    return (group.place, warp) if mask is None else (group.place[mask], warp[mask])


def touch_shared(group: Group, what: str, start: Array, size: int, mask: Mask) -> None:
    """Report to the race check that each lane reads ``size`` bytes at its place in the batch's memory."""
    races = group.batch.races
    assert races is not None
    place, warp = lanes_of(group, mask)
    races.read(what, races.words(start if mask is None else start[mask], size), place, warp)


def load_local(group: Group, at: Array, count: int, bits: int, mask: Mask) -> list[Array]:
    word = (np.where(mask, at - LOCAL, 0) if mask is not None else at - LOCAL) // (bits // 8)
    words = group.batch.local.view(RAW[bits])
    return [words[group.number, word + i] for i in range(count)]


def store_local(group: Group, at: Array, values: Sequence[Array], bits: int, mask: Mask) -> None:
    live = slice(None) if mask is None else mask
    word, thread = ((at - LOCAL) // (bits // 8))[live], group.number[live]
    for i, value in enumerate(values):
        group.batch.local.view(RAW[bits])[thread, word + i] = group.wide(value)[live]


def _spaces(group: Group, at: Array, mask: Mask) -> dict[str, Array]:
    """Return the active lanes by the space of their generic address: the ranges are disjoint."""
    shared, local = at < group.batch.shared_bytes, at >= LOCAL
    spaces = {"shared": shared, "local": local, "global": ~shared & ~local}
    return {name: lanes if mask is None else lanes & mask for name, lanes in spaces.items()}


def load_generic(group: Group, at: Array, count: int, bits: int, mask: Mask) -> list[Array]:
    results = [np.zeros(group.lanes, RAW[bits]) for _ in range(count)]
    for space, lanes in _spaces(group, at, mask).items():
        if lanes.any():
            found = _LOAD[space](group, at, count, bits, lanes)
            results = [np.where(lanes, new, old) for new, old in zip(found, results, strict=True)]
    return results


def store_generic(group: Group, at: Array, values: Sequence[Array], bits: int, mask: Mask) -> None:
    for space, lanes in _spaces(group, at, mask).items():
        if lanes.any():
            _STORE[space](group, at, values, bits, lanes)


_LOAD: dict[str, Callable[[Group, Array, int, int, Mask], list[Array]]] = {
    "global": load_global,
    "const": load_global,
    "shared": load_shared,
    "local": load_local,
    "generic": load_generic,
}
_STORE: dict[str, Callable[[Group, Array, Sequence[Array], int, Mask], None]] = {
    "global": store_global,
    "shared": store_shared,
    "local": store_local,
    "generic": store_generic,
}


# ---- instructions


def space_of(ins: Instruction) -> str:
    """Return the state space that an opcode names."""
    for part in ins.modifiers:
        plain = part.partition("::")[0]
        if plain in ("global", "shared", "local", "const", "param"):
            return plain
    return "generic"


@instruction("ld", "ldu")
def _load(ins: Instruction, code: Decoder) -> Step | None:
    space = space_of(ins)
    if space == "param":
        return _load_parameter(ins, code)
    targets, address, bits = code.vector(ins.operands[0]), code.address(ins.operands[1]), BITS[ins.type]
    load, extend = _LOAD[space], _extension(ins, code, targets)

    def values(group: Group, mask: Mask) -> list[Array]:
        found = load(group, address(group), len(targets), bits, mask)
        return found if extend is None else [extend(value) for value in found]

    return code.assign_all(targets, values)


@instruction("st")
def _store(ins: Instruction, code: Decoder) -> Step | None:
    space = space_of(ins)
    if space == "param":
        return None  # of a device call, which is refused itself
    address, bits = code.address(ins.operands[0]), BITS[ins.type]
    sources: list[Source] = code.sources(code.vector(ins.operands[1]), f"b{bits}")
    store = _STORE[space]

    def step(group: Group, mask: Mask) -> None:
        store(group, address(group), [source(group) for source in sources], bits, mask)

    return step


def _extension(ins: Instruction, code: Decoder, targets: Sequence[str]) -> Callable[[Array], Array] | None:
    """Return how a load fills registers wider than it: with the sign or with zeros."""
    kind = ins.type
    wide = max(code.function.bits(target, BITS[kind]) for target in targets)
    if wide <= BITS[kind]:
        return None
    signed = kind[0] == "s"
    wider = NUMPY[f"s{wide}"] if signed else RAW[wide]
    return lambda value: raw((value.view(NUMPY[kind]) if signed else value).astype(wider))


def _load_parameter(ins: Instruction, code: Decoder) -> Step | None:
    targets, bits = code.vector(ins.operands[0]), BITS[ins.type]
    name, _, offset = ins.operands[1].strip("[] ").partition("+")
    if name not in code.parameters:
        return None  # of a device call
    i = code.parameters[name]
    parameter = code.function.parameters[i]
    extend = _extension(ins, code, targets)
    whole = not parameter.is_struct and bits == BITS[parameter.type]
    first = int(offset or 0) // (bits // 8)

    def values(group: Group, mask: Mask) -> list[Array]:
        given = group.launch.parameters[i]
        if whole:
            found = [given]
        else:
            words = np.frombuffer(given.tobytes(), RAW[bits])
            found = [words[first + k] for k in range(len(targets))]
        return found if extend is None else [extend(value) for value in found]

    return code.assign_all(targets, values)

"""Exchange between lanes of a warp: shuffles, votes, matches, reductions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import Decoder, Step, instruction, refuse
from .parse import Instruction
from .state import Group
from .values import BITS, NUMPY, Array, Mask, constant

_LANES = np.arange(32)
_BITS = np.uint64(1) << np.arange(32, dtype=np.uint64)


def _to_words(flags: Array) -> Array:
    """Pack bits [..., 32] into words."""
    return np.where(flags, _BITS, np.uint64(0)).sum(-1).astype(np.uint32)


@instruction("shfl")
def _shuffle(ins: Instruction, code: Decoder) -> Step:
    mode = ins.modifiers[1]
    value, distance, clamp = code.sources(ins.operands[1:4])

    def values(group: Group, mask: Mask) -> list[Array]:
        lanes = group.by_warp(value(group))
        b, c = (group.by_warp(x(group)).astype(np.int64) for x in (distance, clamp))
        segment = (c >> 8) & 31
        last = (_LANES & segment) | (c & 31 & ~segment)
        if mode == "idx":
            source = (_LANES & segment) | (b & 31 & ~segment)
        else:
            source = {"bfly": _LANES ^ b, "down": _LANES + b, "up": _LANES - b}[mode]
        inside = source >= last if mode == "up" else source <= last
        source = np.where(inside, source, _LANES)
        found = np.take_along_axis(lanes, source, 1)
        if mask is not None:  # what a lane reads from one that takes no part is undefined: make it show
            found = np.where(np.take_along_axis(mask.reshape(-1, 32), source, 1), found, ~found.dtype.type(0))
        return [found.reshape(-1), inside.reshape(-1)]

    return code.assign_all(ins.operands[0].split("|"), values)


@instruction("vote.sync", "activemask")
def _vote(ins: Instruction, code: Decoder) -> Step:
    mode = "ballot" if ins.name == "activemask" else ins.modifiers[1]
    condition = code.predicate(ins.operands[1] if ins.name == "vote" else "1")
    members = code.source(ins.operands[2] if ins.name == "vote" else "0xffffffff")

    def values(group: Group, mask: Mask) -> list[Array]:
        counted = (group.by_warp(members(group)) >> _LANES.astype(np.uint32)) & np.uint32(1) != 0
        if mask is not None:
            counted = counted & mask.reshape(-1, 32)
        flags = group.by_warp(condition(group))
        some, every = (flags & counted).any(1), (flags | ~counted).all(1)
        results: dict[str, Callable[[], Array]] = {
            "ballot": lambda: _to_words(flags & counted),
            "any": lambda: some,
            "all": lambda: every,
            "uni": lambda: every | ~some,
        }
        return [np.repeat(results[mode](), 32)]

    return code.assign_all(ins.operands[:1], values)


@instruction("match.any")
def _match(ins: Instruction, code: Decoder) -> Step:
    """Find the lanes that hold the same value."""
    value = code.source(ins.operands[1], f"b{BITS[ins.type]}")

    def values(group: Group, mask: Mask) -> list[Array]:
        lanes = group.by_warp(value(group))
        equal = lanes[:, :, None] == lanes[:, None, :]
        if mask is not None:
            equal = equal & mask.reshape(-1, 1, 32)
        return [_to_words(equal).reshape(-1)]

    return code.assign_all(ins.operands[:1], values)


@instruction("redux")
def _reduce(ins: Instruction, code: Decoder) -> Step:
    operation = ins.one_of("add", "min", "max", "and", "or", "xor")
    kind = NUMPY[ins.type]
    floating = ins.type[0] == "f"
    functions: dict[str | None, np.ufunc] = {
        "add": np.add,
        "min": np.fmin if floating else np.minimum,
        "max": np.fmax if floating else np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    function, value = functions[operation], code.source(ins.operands[1])

    def values(group: Group, mask: Mask) -> list[Array]:
        lanes = group.by_warp(group.dense(value(group)).view(kind))
        active = np.ones(lanes.shape, bool) if mask is None else mask.reshape(-1, 32)
        if operation in ("add", "xor"):
            others = np.zeros((len(lanes), 1), kind)
        else:  # an active lane's value changes nothing
            others = np.take_along_axis(lanes, np.argmax(active, 1)[:, None], 1)
        result = function.reduce(np.where(active, lanes, others), 1).astype(kind)
        return [np.repeat(result, 32).view(np.uint32)]

    return code.assign_all(ins.operands[:1], values)


@instruction("elect")
def _elect(ins: Instruction, code: Decoder) -> Step:
    """Elect one lane of each warp, here the first."""

    def values(group: Group, mask: Mask) -> list[Array]:
        if mask is None:
            return [constant(0, 32), group.lane == np.uint32(0)]
        first = np.repeat(np.argmax(mask.reshape(-1, 32), 1).astype(np.uint32), 32)
        return [first, group.lane == first]

    return code.assign_all(ins.operands[0].split("|"), values)


@instruction("bar.red", "barrier.red", "barrier.cta.red")
def _barrier_reduction(ins: Instruction, code: Decoder) -> Step:
    """Wait at a barrier that also counts over the CTA, or tests for any or all."""
    operation = ins.one_of("popc", "and", "or")
    condition = code.predicate(ins.operands[-1])

    def values(group: Group, mask: Mask) -> list[Array]:
        if mask is not None:
            refuse(ins)
        flags = group.wide(condition(group)).reshape(-1, group.threads)
        if group.batch.races is not None:
            warps = np.ones((len(group.places), group.threads // 32), bool)
            group.batch.races.barrier(group.places, warps)
        found = {"popc": flags.sum(1).astype(np.uint32), "and": flags.all(1), "or": flags.any(1)}[
            operation or ""
        ]
        return [np.repeat(found, group.threads)]

    return code.assign_all(ins.operands[:1], values)


@instruction(
    "fence", "membar", "bar.warp", "nanosleep", "griddepcontrol", "prefetch", "setmaxnreg", "discard"
)
def _nothing(ins: Instruction, code: Decoder) -> None:
    """Do nothing: every step is done before the next begins, and hints have no effect."""


@instruction("call")
def _call(ins: Instruction, code: Decoder) -> Step:
    name = next((text for text in ins.operands if not text.startswith("(")), ins.opcode)
    failed = " (a device assertion failed)" if "assertfail" in name else ""

    def step(group: Group, mask: Mask) -> None:
        if mask is None or mask.any():
            raise RuntimeError(f"device function call: {name}{failed}")

    return step

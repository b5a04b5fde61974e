"""atom and red: read, change and write memory in one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .access import check_shared, space_of
from .decode import Decoder, Step, instruction, refuse
from .parse import Instruction
from .state import Group
from .values import BITS, NUMPY, RAW, Array, Mask, from_bf16, to_bf16

# The new value, from the old one and the operand.
_UPDATE: dict[str, Callable[[Array, Array], Any]] = {
    "add": lambda old, x: old + x,
    "min": np.fmin,
    "max": np.fmax,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": lambda old, x: np.where(old >= x, 0, old + 1),
    "dec": lambda old, x: np.where((old == 0) | (old > x), x, old - 1),
}
# The same as ufuncs, which can update one place several times without giving the old values.
_REDUCE: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("atom", "red")
def _atomic(ins: Instruction, code: Decoder) -> Step:
    operation = ins.one_of(*_UPDATE, "cas")
    space, kind, bits = space_of(ins), ins.type, BITS[ins.type]
    if operation is None or space not in ("global", "shared", "generic"):
        refuse(ins)
    targets = code.vector(ins.operands[0]) if ins.name == "atom" else []
    where, *texts = ins.operands[1:] if targets else ins.operands
    address = code.address(where)
    wanted = any(target != "_" and code.is_read(target) for target in targets)
    if operation == "cas":
        compare, new = code.sources(texts[:2], f"b{bits}")

        def swap(group: Group, mask: Mask) -> list[Array]:
            return [_compare_and_swap(group, space, address(group), bits, compare(group), new(group), mask)]

        return code.assign_all(targets, swap)
    sources = code.sources(code.vector(texts[0]), f"b{bits}")
    one = _update_halves if kind in ("f16x2", "bf16x2") else _update

    def values(group: Group, mask: Mask) -> list[Array]:
        at = address(group)
        return [
            one(group, space, at + i * bits // 8, operation, source(group), kind, mask, wanted)
            for i, source in enumerate(sources)
        ]

    return code.assign_all(targets if wanted else [], values)


def _place(group: Group, space: str, at: Array, bits: int, mask: Mask) -> tuple[Array, Array, Array]:
    """Return memory as raw words, the word that each active lane updates, and the active lanes."""
    size, lanes = bits // 8, group.active(mask)
    if space == "generic":
        inside = at[lanes] < group.batch.shared_bytes
        if inside.any() and not inside.all():
            raise NotImplementedError(
                "atomics on shared and global memory in one instruction are not supported"
            )
        space = "shared" if inside.any() else "global"
    if space == "shared":
        check_shared(group, at[lanes], size)
        return group.batch.shared.view(RAW[bits]), (at + group.shared_base)[lanes] // size, lanes
    memory = group.launch.memory.mapped
    offsets = at[lanes] - memory.base
    memory.check(offsets, size, size)
    group.launch.counters.bytes["atom"] += len(lanes) * size
    return memory.view[bits], offsets // size, lanes


def _update_halves(
    group: Group, space: str, at: Array, operation: str, value: Array, kind: str, mask: Mask, wanted: bool
) -> Array:
    """Update the two 16-bit halves of a word."""
    halves = group.dense(value).view(np.uint16).reshape(-1, 2)
    low, high = (
        _update(
            group, space, at + 2 * i, operation, np.ascontiguousarray(halves[:, i]), kind[:-2], mask, wanted
        )
        for i in range(2)
    )
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def _update(
    group: Group, space: str, at: Array, operation: str, value: Array, kind: str, mask: Mask, wanted: bool
) -> Array:
    """Update memory and return the old values; lanes that share a word update it one after the other."""
    bits = BITS[kind]
    memory, word, lanes = _place(group, space, at, bits, mask)
    operand = group.dense(value)[lanes]
    old = np.zeros(group.lanes, RAW[bits])
    if len(np.unique(word)) == len(word):
        old[lanes] = memory[word]
        memory[word] = _updated(operation, kind, old[lanes], operand)
    elif not wanted and kind != "bf16" and operation in _REDUCE:
        places, which = np.unique(word, return_inverse=True)
        sums = memory[places].view(NUMPY[kind])  # a copy: ufunc.at must not see all of memory
        _REDUCE[operation].at(sums, which, operand.view(NUMPY[kind]))
        memory[places] = sums.view(RAW[bits])
    else:
        for i, lane in enumerate(lanes):
            one = slice(word[i], word[i] + 1)
            old[lane] = memory[word[i]]
            memory[one] = _updated(operation, kind, memory[one].copy(), operand[i : i + 1])
    return old


def _updated(operation: str, kind: str, old: Array, operand: Array) -> Array:
    if kind == "bf16":
        return to_bf16(_UPDATE[operation](from_bf16(old), from_bf16(operand)))
    view = NUMPY[kind]
    new: Array = np.asarray(_UPDATE[operation](old.view(view), operand.view(view))).astype(view)
    return new.view(old.dtype)


def _compare_and_swap(
    group: Group, space: str, at: Array, bits: int, compare: Array, new: Array, mask: Mask
) -> Array:
    memory, word, lanes = _place(group, space, at, bits, mask)
    wanted, value, old = group.wide(compare), group.wide(new), np.zeros(group.lanes, RAW[bits])
    for i, lane in zip(word, lanes, strict=True):
        old[lane] = memory[i]
        if old[lane] == wanted[lane]:
            memory[i] = value[lane]
    return old

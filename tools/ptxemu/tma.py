"""TMA (sm_90): bulk copies of boxes of tensors, and the tensor maps that describe them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .access import check_shared
from .decode import Decoder, Step, instruction, refuse
from .mbarrier import receive
from .parse import Instruction
from .state import Group
from .values import BITS, RAW, Array, Mask

_SWIZZLE_BITS = {0: 0, 1: 1, 2: 3, 3: 7}  # none, 32, 64, 128 bytes
# CU_TENSOR_MAP_DATA_TYPE: all others have 4 bytes.
_ITEM_BYTES = {0: 1, 1: 2, 6: 2, 10: 2, 4: 8, 5: 8, 9: 8}
_FLOAT32 = 7
_NAN = {2: 0x7FFF, 4: 0x7FFFFFFF}


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that one instruction copies; outermost dimension first.

    Attributes:
        base: its address.
        shape: its shape; outside it, reads give zeros (or NaN) and writes do nothing.
        strides: its strides in elements.
        box: shape of the box.
        item: bytes per element.
        swizzle: 0 none, 1, 2, 3 for 32, 64, 128 bytes.
        nan: read NaN outside the shape.
        is_float32: needed by reductions, which add numbers.
    """

    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    item: int
    swizzle: int = 0
    nan: bool = False
    is_float32: bool = False

    @property
    def fill(self) -> Any:
        return RAW[8 * self.item](_NAN.get(self.item, 0) if self.nan else 0)

    def locate(self, corner: Sequence[int], rows: Sequence[int] = ()) -> tuple[Array, Array, Array]:
        """Return a box's byte offsets from the base, which of them are inside, and bytes in shared memory.

        Args:
            corner: coordinates of its first element.
            rows: the four rows of a gather or scatter, in place of consecutive ones.
        """
        box = (4, *self.box[1:]) if rows else self.box
        if len(corner) != len(box):
            raise NotImplementedError(
                f"a TMA box of rank {len(box)} with {len(corner)} coordinates is not supported"
            )
        offset: Array = np.zeros(box, np.int64)
        dense: Array = np.zeros(box, np.int64)
        inside = np.ones(box, bool)
        for axis, (size, start) in enumerate(zip(box, corner, strict=True)):
            steps = np.arange(size)
            index = np.array(rows) if rows and axis == 0 else steps + start
            shape = [-1 if i == axis else 1 for i in range(len(box))]
            inside &= ((index >= 0) & (index < self.shape[axis])).reshape(shape)
            offset = offset + (index * self.strides[axis] * self.item).reshape(shape)
            dense = dense * size + steps.reshape(shape)
        return offset, inside, dense * self.item


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


@instruction("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def _tensor_copy(ins: Instruction, code: Decoder) -> Step:
    loads = ".shared::" in ins.opcode.partition(".global")[0] and ins.name == "cp"
    if loads and "cp.reduce" in ins.opcode:
        refuse(ins)
    shared, described = ins.operands[:2] if loads else ins.operands[1::-1]
    reduction = ins.one_of("add", "min", "max", "and", "or", "xor") if "reduce" in ins.opcode else None
    if reduction not in (None, "add"):
        refuse(ins)
    four_rows = any("gather4" in part or "scatter4" in part for part in ins.modifiers)
    found = re.match(r"\[\s*(%?\w+)\s*,\s*\{(.*?)\}\s*\]", described)
    if found is None or any("im2col" in part for part in ins.modifiers):
        refuse(ins)
    target, descriptor = code.address(shared), code.source(found[1], "b64")
    coordinates = code.sources([text.strip() for text in found[2].split(",")])
    barrier = code.address(ins.operands[2]) if loads else None
    what = ins.opcode.partition(".shared")[0].partition(".global")[0]

    def step(group: Group, mask: Mask) -> None:
        at, maps = target(group), group.wide(descriptor(group))
        corners = [group.wide(x(group)) for x in coordinates]
        barriers = None if barrier is None else barrier(group)
        for lane in group.active(mask):
            corner = [_signed(int(x[lane])) for x in corners][::-1]
            rows: Sequence[int] = ()
            if four_rows:  # column, then four rows
                rows, corner = corner[3::-1], [0, corner[4]]
            tensor = group.launch.tensor_maps[int(maps[lane])]
            _copy_box(
                group, int(lane), tensor, tensor.locate(corner, rows), int(at[lane]), loads, reduction, what
            )
            if barriers is not None:
                box = tensor.box if not four_rows else (4, tensor.box[1])
                receive(group, int(lane), int(barriers[lane]), int(np.prod(box)) * tensor.item)

    return step


def _copy_box(
    group: Group,
    lane: int,
    tensor: TensorMap,
    where: tuple[Array, Array, Array],
    shared: int,
    loads: bool,
    reduction: str | None,
    what: str,
) -> None:
    memory, item = group.launch.memory.mapped, tensor.item
    offset, inside, dense = where
    dense = shared + dense
    dense = dense ^ (((dense >> 7) & _SWIZZLE_BITS[tensor.swizzle]) << 4)
    check_shared(group, dense.reshape(-1), item)
    start = dense + int(group.shared_base[lane])
    offset = offset + (tensor.base - memory.base)
    live = offset[inside]
    memory.check(live, item, item)
    group.launch.counters.bytes["tma.ld" if loads else "tma.st"] += live.size * item
    _note_shared(group, lane, what, start, item, loads)
    words, there = group.batch.shared.view(RAW[8 * item]), memory.view[8 * item]
    races = group.launch.races
    if loads:
        if races is not None:
            races.read(live, item, group.cta_number[lane])
        words[start // item] = np.where(inside, there[np.where(inside, offset, 0) // item], tensor.fill)
    elif reduction is None:
        if races is not None:
            races.write(live, item, group.cta_number[lane])
        there[live // item] = words[start // item][inside]
    elif tensor.is_float32:
        more = words[start // item][inside].view(np.float32)
        there[live // item] = (there[live // item].view(np.float32) + more).view(np.uint32)
    else:
        raise NotImplementedError(f"{what}: only float32 is supported")


def _note_shared(group: Group, lane: int, what: str, start: Array, item: int, writes: bool) -> None:
    """Report TMA's accesses for a lane to the race check."""
    races = group.batch.races
    if races is None:
        return
    words = np.unique(races.words(start.reshape(-1), item))[None]
    place, warp = np.array([group.place[lane]]), np.array([int(group.thread[lane]) // 32])
    if writes:
        races.write(what, words, place, warp, races.tma)
    else:
        races.read(what, words, place, warp, races.tma)


@instruction("cp.async.bulk", "cp.reduce.async.bulk")
def _bulk_copy(ins: Instruction, code: Decoder) -> Step:
    """Copy contiguous bytes, or add float32 numbers to global memory."""
    loads, adds = ".shared::" in ins.opcode.partition(".global")[0], ins.modifiers[0] == "reduce"
    if ".global" not in ins.opcode or (adds and (loads or not ins.opcode.endswith(".add.f32"))):
        refuse(ins)
    first, second = code.address(ins.operands[0]), code.address(ins.operands[1])
    length = code.source(ins.operands[2])
    barrier = code.address(ins.operands[3]) if loads else None

    def step(group: Group, mask: Mask) -> None:
        memory, sizes = group.launch.memory.mapped, group.wide(length(group))
        shared, outside = (first(group), second(group)) if loads else (second(group), first(group))
        for lane in group.active(mask):
            size, start = int(sizes[lane]), int(shared[lane])
            check_shared(group, np.array([start, start + size - 16]), 16)
            offset = int(outside[lane]) - memory.base
            memory.check(np.array([offset]), size, 16)
            group.launch.counters.bytes["tma.ld" if loads else "tma.st"] += size
            inside = start + int(group.shared_base[lane])
            _note_shared(group, int(lane), ins.opcode, np.arange(inside, inside + size, 16), 16, loads)
            here, there = slice(inside, inside + size), slice(offset, offset + size)
            if group.launch.races is not None and not adds:  # as for other atomics
                note = group.launch.races.read if loads else group.launch.races.write
                note(np.arange(offset, offset + size, 16), 16, np.array(group.cta_number[lane]))
            if barrier is not None:
                group.batch.shared[here] = memory.view[8][there]
                receive(group, int(lane), int(barrier(group)[lane]), size)
            elif adds:
                total = memory.view[8][there].view(np.float32) + group.batch.shared[here].view(np.float32)
                memory.view[8][there] = total.view(np.uint8)
            else:
                memory.view[8][there] = group.batch.shared[here]

    return step


@instruction("cp.async.bulk.commit_group")
def _commit(ins: Instruction, code: Decoder) -> None:
    """Do nothing: copies are done when they are issued, and the race check treats them as one group."""


@instruction("cp.async.bulk.wait_group")
def _wait(ins: Instruction, code: Decoder) -> Step:
    def step(group: Group, mask: Mask) -> None:
        races = group.batch.races
        if races is not None:
            lanes = group.active(mask)
            first = lanes[group.lane[lanes] == 0]
            races.wait_for_engine(group.place[first], group.thread[first] // 32, races.tma)

    return step


# ---- tensor maps made on the device: kept as fields until they are copied to global memory


@instruction("tensormap.replace")
def _replace_field(ins: Instruction, code: Decoder) -> Step:
    address, name = code.address(ins.operands[0]), ins.modifiers[2]
    index, text = ("0", ins.operands[1]) if len(ins.operands) == 2 else ins.operands[1:]
    value = code.source(text, f"b{BITS[ins.type]}")

    def step(group: Group, mask: Mask) -> None:
        at, values = address(group), group.wide(value(group))
        for lane in group.active(mask):
            key = int(group.cta_number[lane]), int(at[lane])
            fields = group.launch.tensor_map_fields.setdefault(key, {})
            fields[name, int(index, 0)] = int(values[lane])

    return step


@instruction("tensormap.cp_fenceproxy")
def _publish(ins: Instruction, code: Decoder) -> Step:
    target, origin = code.address(ins.operands[0]), code.address(ins.operands[1])

    def step(group: Group, mask: Mask) -> None:
        to, at = target(group), origin(group)
        for lane in group.active(mask):
            key = int(group.cta_number[lane]), int(at[lane])
            fields = group.launch.tensor_map_fields.get(key)
            if fields:
                group.launch.tensor_maps[int(to[lane])] = _from_fields(fields)

    return step


def _from_fields(fields: dict[tuple[str, int], int]) -> TensorMap:
    """Make a tensor map from replaced fields: innermost dimension first, strides in bytes."""
    kind = fields.get(("elemtype", 0), 0)
    item = _ITEM_BYTES.get(kind, 4)
    axes = range(fields["rank", 0], -1, -1)
    return TensorMap(
        fields["global_address", 0],
        tuple(fields["global_dim", i] for i in axes),
        tuple(fields["global_stride", i - 1] // item if i else 1 for i in axes),
        tuple(fields["box_dim", i] for i in axes),
        item,
        fields.get(("swizzle_mode", 0), 0),
        bool(fields.get(("fill_mode", 0), 0)),
        kind == _FLOAT32,
    )

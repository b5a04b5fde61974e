"""mma.sync and the instructions that move its 8x8 matrices: ldmatrix, stmatrix, movmatrix."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from .access import check_shared, lanes_of, touch_shared
from .decode import Decoder, Step, instruction, refuse
from .parse import Instruction
from .state import Group
from .values import OPERANDS, Array, Mask, accumulate, operand_bytes

_LANES = np.arange(32)
_ROW, _COLUMN = (
    _LANES // 4,
    _LANES % 4,
)  # a lane holds two elements of an 8x8 matrix, in columns 2c and 2c + 1


def fragment(group: Group, registers: Sequence[Array], kind: str, rows: int) -> Array:
    """Return the operand that warps hold in registers, as float32 [warps, rows, k].

    A register holds 32 bits of one row of 8. The two halves of 16 rows alternate, then k advances.
    """
    stored, decode = OPERANDS[kind]
    per_row = 16 // operand_bytes(kind)
    parts = [decode(group.dense(r).view(stored)).reshape(-1, 8, per_row) for r in registers]
    if rows == 16:
        parts = [np.concatenate(parts[i : i + 2], 1) for i in range(0, len(parts), 2)]
    return np.concatenate(parts, 2)


class _Fragments:
    """A cache of operands, which many instructions use, with the registers they came from."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Sequence[Array], Array]] = {}

    def __call__(self, group: Group, registers: Sequence[Array], kind: str, rows: int) -> Array:
        key = (kind, rows, group.lanes, *map(id, registers))
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) > 512:
                self._kept.clear()
            # Keep the registers alive, so that their ids stay valid.
            found = self._kept[key] = (registers, fragment(group, registers, kind, rows))
        return found[1]

    def clear(self) -> None:
        self._kept.clear()


fragments = _Fragments()


@instruction("mma.sync")
def _mma(ins: Instruction, code: Decoder) -> Step:
    shape = re.search(r"m16n8k(\d+)", ins.opcode)
    d_kind, a_kind, b_kind, c_kind = ins.modifiers[-4:]
    if shape is None or d_kind not in ("f32", "s32") or not {a_kind, b_kind} <= OPERANDS.keys():
        refuse(ins)
    k = int(shape[1])
    targets = code.vector(ins.operands[0])
    a, b, c = (code.sources(code.vector(text)) for text in ins.operands[1:4])

    def values(group: Group, mask: Mask) -> list[Array]:
        left = fragments(group, [x(group) for x in a], a_kind, 16)  # [warps, 16, k]
        right = fragments(group, [x(group) for x in b], b_kind, 8)  # [warps, 8, k]
        warps = len(left) if mask is None else int(mask[::32].sum())
        group.launch.counters.macs += warps * 16 * 8 * k
        product = (left @ right.transpose(0, 2, 1)).reshape(-1, 2, 8, 4, 2)  # half, row, column pair
        return [
            accumulate(product[:, i // 2, :, :, i % 2].reshape(-1), group.wide(c[i](group)), c_kind)
            for i in range(4)
        ]

    return code.assign_all(targets, values)


# ---- 8x8 matrices of 16-bit elements in shared memory: lane 8 i + r has the address of row r of matrix i


def _row_addresses(group: Group, at: Array, count: int, mask: Mask) -> Array:
    """Return the places of the rows in the batch's shared memory, [warps, 8 * count]."""
    rows = at.reshape(-1, 32)[:, : 8 * count]
    active = slice(None) if mask is None else mask.reshape(-1, 32)[:, 0]
    check_shared(group, rows[active], 16)
    rows = rows if mask is None else np.where(mask.reshape(-1, 32)[:, : 8 * count], rows, 0)
    group.launch.counters.shared_access("matrix", rows, 16)
    return rows + group.by_warp(group.shared_base)[:, : 8 * count]


@instruction("ldmatrix")
def _load_matrix(ins: Instruction, code: Decoder) -> Step:
    targets, address = code.vector(ins.operands[0]), code.address(ins.operands[1])
    transposed, what = "trans" in ins.modifiers, ins.opcode
    if "m8n8" not in ins.modifiers or ins.type != "b16":
        refuse(ins)

    def values(group: Group, mask: Mask) -> list[Array]:
        rows = _row_addresses(group, address(group), len(targets), mask)
        if group.batch.races is not None:
            owner = np.zeros((len(rows), 32), np.int64)
            owner[:, : rows.shape[1]] = rows
            reading = _row_mask(group, len(targets), mask)
            touch_shared(group, what, owner.reshape(-1), 16, reading)
        found = []
        for i in range(0, rows.shape[1], 8):
            if transposed:
                halves = group.batch.shared.view(np.uint16)
                low = halves[(rows[:, i + 2 * _COLUMN] + 2 * _ROW) // 2].astype(np.uint32)
                high = halves[(rows[:, i + 2 * _COLUMN + 1] + 2 * _ROW) // 2].astype(np.uint32)
                found.append((low | (high << np.uint32(16))).reshape(-1))
            else:
                words = group.batch.shared.view(np.uint32)
                found.append(words[(rows[:, i + _ROW] + 4 * _COLUMN) // 4].reshape(-1))
        return found

    return code.assign_all(targets, values)


def _row_mask(group: Group, count: int, mask: Mask) -> Array:
    """Return the lanes that hold the address of a row."""
    gives = np.tile(8 * count > _LANES, group.lanes // 32)
    return gives if mask is None else gives & mask


@instruction("stmatrix")
def _store_matrix(ins: Instruction, code: Decoder) -> Step:
    address, sources = code.address(ins.operands[0]), code.sources(code.vector(ins.operands[1]))
    transposed, what = "trans" in ins.modifiers, ins.opcode
    if "m8n8" not in ins.modifiers or ins.type != "b16":
        refuse(ins)

    def step(group: Group, mask: Mask) -> None:
        warps = slice(None) if mask is None else mask.reshape(-1, 32).all(1)
        rows = _row_addresses(group, address(group), len(sources), mask)[warps]
        halves = group.batch.shared.view(np.uint16)
        for i, source in enumerate(sources):
            pair = group.dense(source(group)).view(np.uint16).reshape(-1, 32, 2)[warps]
            for k in range(2):
                if transposed:
                    at = rows[:, 8 * i + 2 * _COLUMN + k] + 2 * _ROW
                else:
                    at = rows[:, 8 * i + _ROW] + 4 * _COLUMN + 2 * k
                halves[at // 2] = pair[:, :, k]
        if group.batch.races is not None:
            races, count = group.batch.races, 8 * len(sources)
            place, warp = (x.reshape(-1, 32)[warps][:, :count].reshape(-1) for x in lanes_of(group, None))
            races.write(what, races.words(rows.reshape(-1), 16), place, warp)

    return step


@instruction("movmatrix")
def _transpose_matrix(ins: Instruction, code: Decoder) -> Step:
    source = code.source(ins.operands[1])

    def value(group: Group) -> Array:
        matrix = group.dense(source(group)).view(np.uint16).reshape(-1, 8, 8)
        return np.ascontiguousarray(matrix.transpose(0, 2, 1)).reshape(-1).view(np.uint32)

    return code.assign(ins.operands[0], value)

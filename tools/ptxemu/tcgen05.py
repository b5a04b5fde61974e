"""tcgen05 (sm_100): tensor memory and the matrix products that accumulate there.

Tensor memory of a CTA has 128 lanes (rows) and 512 columns of 32 bits; an address is row << 16 | column.
"""

from __future__ import annotations

import re

import numpy as np

from .access import store_shared
from .decode import Address, Decoder, Source, Step, instruction, refuse
from .mbarrier import products_done
from .parse import Instruction
from .state import Group
from .values import OPERANDS, Array, Mask, accumulate, operand_bytes
from .wgmma import shared_operand

# Types of an operand by its number in the instruction descriptor, for each kind of product.
_KINDS = {
    "f16": ("f16", "bf16"),
    "tf32": ("", "", "tf32"),
    "i8": ("u8", "s8"),
    "f8f6f4": ("e4m3", "e5m2"),
}


@instruction("tcgen05.dealloc", "tcgen05.relinquish_alloc_permit", "tcgen05.wait", "tcgen05.fence")
def _nothing(ins: Instruction, code: Decoder) -> None:
    """Do nothing: every access is done before the next begins, and memory is not freed."""


@instruction("tcgen05.alloc")
def _allocate(ins: Instruction, code: Decoder) -> Step:
    """Allocate columns for a whole warp, and write their address to shared memory."""
    address, columns = code.address(ins.operands[0]), code.source(ins.operands[1])

    def step(group: Group, mask: Mask) -> None:
        free, wanted = group.batch.tensor_columns, group.wide(columns(group))
        active = np.ones(group.lanes, bool) if mask is None else mask
        first = active & (group.lane == 0)
        store_shared(group, address(group), [free[group.place].astype(np.uint32)], 32, first)
        free[group.place[first]] += wanted[first].astype(np.int64)
        if (free > 512).any():
            raise RuntimeError(f"tensor memory: {int(free.max())} columns allocated, at most 512")

    return step


@instruction("tcgen05.commit")
def _commit(ins: Instruction, code: Decoder) -> Step:
    address = code.address(ins.operands[0])

    def step(group: Group, mask: Mask) -> None:
        at = address(group)
        for lane in group.active(mask):
            products_done(group, int(lane), int(at[lane]))

    return step


@instruction("tcgen05.ld", "tcgen05.st")
def _load_or_store(ins: Instruction, code: Decoder) -> Step:
    """Move a row per lane, or (16x32bx2) 16 rows, where the upper half of the warp has other columns."""
    if not {"32x32b", "16x32bx2"} & {*ins.modifiers} or "pack::16b" in ins.modifiers:
        refuse(ins)
    registers = code.vector(next(text for text in ins.operands if text.startswith("{")))
    address = code.address(next(text for text in ins.operands if text.startswith("[")))
    second_half = next((int(text, 0) for text in ins.operands if text[0] not in "{["), None)

    def place(group: Group) -> tuple[Array, Array, Array]:
        at, lane = address(group), group.lane.astype(np.int64)
        row, column = at >> 16, at & 0xFFFF
        if second_half is None:
            return group.place, row + lane, column
        return group.place, row + lane % 16, column + lane // 16 * second_half

    if ins.modifiers[0] == "ld":

        def values(group: Group, mask: Mask) -> list[Array]:
            cta, row, column = place(group)
            if mask is not None:
                row, column = np.where(mask, row, 0), np.where(mask, column, 0)
            return [group.batch.tensor_memory[cta, row, column + i] for i in range(len(registers))]

        return code.assign_all(registers, values)
    sources = code.sources(registers)

    def step(group: Group, mask: Mask) -> None:
        live = slice(None) if mask is None else mask
        cta, row, column = (x[live] for x in place(group))
        for i, source in enumerate(sources):
            group.batch.tensor_memory[cta, row, column + i] = group.wide(source(group))[live]

    return step


@instruction("tcgen05.mma")
def _mma(ins: Instruction, code: Decoder) -> Step:
    kind = re.search(r"kind::(\w+)", ins.opcode)
    if kind is None or kind[1] not in _KINDS or "cta_group::1" not in ins.modifiers or "ws" in ins.modifiers:
        refuse(ins)
    types, total = _KINDS[kind[1]], "s32" if kind[1] == "i8" else "f32"
    target, (a_text, b_text, d_text, keep_text) = code.address(ins.operands[0]), ins.operands[1:5]
    a: Address | Source = code.address(a_text) if a_text.startswith("[") else code.source(a_text, "b64")
    b, descriptor, keep = code.source(b_text, "b64"), code.source(d_text), code.predicate(keep_text)

    def step(group: Group, mask: Mask) -> None:
        to, lefts, rights = target(group), group.wide(a(group)), group.wide(b(group))
        shapes, keeps = group.wide(descriptor(group)), group.wide(keep(group))
        for lane in group.active(mask):
            d = int(shapes[lane])
            m, n = ((d >> 24) & 31) << 4, ((d >> 17) & 63) << 3
            a_kind, b_kind = types[(d >> 7) & 7], types[(d >> 10) & 7]
            k = 32 // operand_bytes(a_kind)
            places, warps = group.place[[lane]], group.thread[[lane]].astype(np.int64) // 32
            rows = np.arange(m) if m == 128 else np.arange(m) // 16 * 32 + np.arange(m) % 16
            memory = group.batch.tensor_memory[places[0]]
            if isinstance(a, Address):
                row, column = divmod(int(lefts[lane]), 1 << 16)
                words = np.ascontiguousarray(memory[row + rows, column : column + 8])
                stored, decode = OPERANDS[a_kind]
                left = decode(words.view(stored))
            else:
                left = shared_operand(
                    group,
                    lefts[[lane]],
                    (m, k),
                    bool((d >> 15) & 1),
                    a_kind,
                    places,
                    warps,
                    ins.opcode,
                    blackwell=True,
                )[0]
            right = shared_operand(
                group,
                rights[[lane]],
                (n, k),
                bool((d >> 16) & 1),
                b_kind,
                places,
                warps,
                ins.opcode,
                blackwell=True,
            )[0]
            product = left @ right.T
            row, column = divmod(int(to[lane]), 1 << 16)
            old = memory[row + rows, column : column + n] if keeps[lane] else np.zeros((m, n), np.uint32)
            memory[row + rows, column : column + n] = accumulate(product, old, total)
            group.launch.counters.macs += m * n * k

    return step

"""wgmma (sm_90): matrix products of a warpgroup with operands in shared memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import numpy as np

from .access import check_shared
from .decode import Decoder, Step, instruction, refuse
from .mma import fragment
from .parse import Instruction
from .state import Group
from .values import OPERANDS, Array, Mask, accumulate, operand_bytes

_SWIZZLE_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}  # width of a swizzled row, by the descriptor's mode
_SWIZZLE_BITS = {0: 0, 1: 7, 2: 3, 3: 1}  # address bits 7.. that are added to bits 4.. without carry


@functools.lru_cache(4096)
def tile_offsets(descriptor: int, rows: int, k: int, row_major: bool, item: int, blackwell: bool) -> Array:
    """Return the element numbers [rows, k] of an operand tile, from its shared-memory descriptor.

    Args:
        descriptor: 64 bits, as in the PTX manual.
        rows: rows of A, or columns of B.
        k: the dimension that is summed over.
        row_major: whether rows, not k, are contiguous in memory ("MN-major").
        item: bytes of an element.
        blackwell: whether swizzle modes are numbered as for tcgen05.
    """
    start, leading, stride = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    mode = {0: 0, 2: 1, 4: 2, 6: 3}[(descriptor >> 61) & 7] if blackwell else (descriptor >> 62) & 3
    if row_major and item != 2 and not (blackwell and item == 1):
        raise NotImplementedError(f"MN-major operands of {item}-byte elements are not supported")
    i, j = np.arange(rows)[:, None], np.arange(k)[None, :]
    width, chunk = _SWIZZLE_BYTES[mode], 16 // item
    if mode == 0 and row_major:
        at = i % chunk * item + i // chunk * stride + j % 8 * 16 + j // 8 * leading
    elif mode == 0:
        at = i % 8 * 16 + i // 8 * stride + j % chunk * item + j // chunk * leading
    elif row_major:
        across = width // item
        at = i % across * item + i // across * leading + j % 8 * width + j // 8 * stride
    else:
        at = i % 8 * width + i // 8 * stride + j * item
    at = start + at
    return (at ^ (((at >> 7) & _SWIZZLE_BITS[mode]) << 4)) // item


def shared_operand(
    group: Group,
    descriptors: Array,
    shape: tuple[int, int],
    row_major: bool,
    kind: str,
    places: Array,
    warps: Array,
    what: str,
    *,
    blackwell: bool = False,
) -> Array:
    """Return tiles [descriptors, rows, k] of shared memory, read for these warps, as float32."""
    stored, decode = OPERANDS[kind]
    item = operand_bytes(kind)
    tiles = np.stack([tile_offsets(int(d), *shape, row_major, item, blackwell) for d in descriptors])
    check_shared(group, tiles.reshape(-1) * item, item)
    elements = tiles + (places * (group.batch.shared_bytes // item))[:, None, None]
    races = group.batch.races
    if races is not None:
        for tile, place, warp in zip(elements, places, warps, strict=True):
            words = np.unique(races.words(tile.reshape(-1) * item, item))[None]
            for one in [warp] if blackwell else range(warp, warp + 4):  # each warp of the group does a part
                engine = races.tcgen05 if blackwell else races.warps + one
                races.read(what, words, np.array([place]), np.array([one]), engine)
    return decode(group.batch.shared.view(stored)[elements])


@instruction("wgmma.mma_async")
def _wgmma(ins: Instruction, code: Decoder) -> Step:
    shape = re.search(r"m64n(\d+)k(\d+)", ins.opcode)
    d_kind, a_kind, b_kind = ins.modifiers[-3:]
    if shape is None or d_kind == "f16":
        refuse(ins)
    n, k = int(shape[1]), int(shape[2])
    targets, in_registers = code.vector(ins.operands[0]), ins.operands[1].startswith("{")
    old = code.sources(targets)
    a = code.sources(code.vector(ins.operands[1]), "b32" if in_registers else "b64")
    b, keep = code.source(ins.operands[2], "b64"), code.predicate(ins.operands[3])
    signs, majors = _numbers(ins.operands[4:6]), _numbers(ins.operands[6:])
    if -1 in signs:
        refuse(ins)
    a_rows, b_rows = (False, any(majors)) if in_registers else (*map(bool, majors), False, False)[:2]

    def values(group: Group, mask: Mask) -> list[Array]:
        per_cta = group.threads // 128
        active = np.arange(len(group.places) * per_cta) if mask is None else np.nonzero(mask[::128])[0]
        places, warps = group.places[active // per_cta], active % per_cta * 4
        right = shared_operand(
            group, group.wide(b(group))[::128][active], (n, k), b_rows, b_kind, places, warps, ins.opcode
        )
        if in_registers:
            left = fragment(group, [x(group) for x in a], a_kind, 16).reshape(-1, 64, k)[active]
        else:
            first = group.wide(a[0](group))[::128][active]
            left = shared_operand(group, first, (64, k), a_rows, a_kind, places, warps, ins.opcode)
        product = np.zeros((len(group.places) * per_cta, 64, n), np.float32)
        product[active] = left @ right.transpose(0, 2, 1)
        group.launch.counters.macs += len(active) * 64 * n * k
        parts = product.reshape(-1, 2, 8, n // 8, 4, 2)  # warp, half, row, 8 columns, column pair
        kept = keep(group)
        return [
            accumulate(
                parts[:, i // 2, :, j, :, i % 2].reshape(-1),
                np.where(kept, group.wide(old[4 * j + i](group)), np.uint32(0)),
                d_kind,
            )
            for j in range(n // 8)
            for i in range(4)
        ]

    return code.assign_all(targets, values)


def _numbers(texts: Sequence[str]) -> list[int]:
    return [int(text, 0) for text in texts]


@instruction("wgmma.fence")
def _fence(ins: Instruction, code: Decoder) -> None:
    """Do nothing: products are done when they are issued; only the race check knows their groups."""


@instruction("wgmma.commit_group")
def _commit(ins: Instruction, code: Decoder) -> Step:
    def step(group: Group, mask: Mask) -> None:
        races = group.batch.races
        if races is not None:
            for place, warp in _warps(group, mask):
                races.commit_wgmma(place, warp)

    return step


@instruction("wgmma.wait_group")
def _wait(ins: Instruction, code: Decoder) -> Step:
    pending = int(ins.operands[-1], 0)

    def step(group: Group, mask: Mask) -> None:
        races = group.batch.races
        if races is not None:
            for place, warp in _warps(group, mask):
                races.wait_wgmma(place, warp, pending)

    return step


def _warps(group: Group, mask: Mask) -> list[tuple[int, int]]:
    """Return the CTA's place and the number of each active warp."""
    lanes = group.active(mask)
    first = lanes[group.lane[lanes] == 0]
    return [(int(group.place[i]), int(group.thread[i]) // 32) for i in first]

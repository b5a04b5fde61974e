"""cvt: between integers and floating-point formats of all widths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import Decoder, Source, Step, instruction
from .parse import Instruction
from .state import Group
from .values import (
    BITS,
    FLOATS,
    FP8,
    NUMPY,
    RAW,
    Array,
    float_to_int,
    from_bf16,
    from_f16,
    raw,
    to_bf16,
    to_bf16_toward_zero,
    to_f16,
    to_f16_toward_zero,
    to_fp8,
    to_tf32,
)

_TO_INTEGRAL = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


@instruction("cvt")
def _convert(ins: Instruction, code: Decoder) -> Step:
    to, origin = ins.modifiers[-2:]
    if origin in ("e4m3x2", "e5m2x2"):
        return _from_fp8_pair(ins, code)
    if to in ("e4m3x2", "e5m2x2"):
        return _to_fp8_pair(ins, code)
    if to in ("f16x2", "bf16x2"):
        return _to_half_pair(ins, code)
    return code.elementwise(ins.operands[0], _conversion(ins, code), _numbers(ins, code))


def _numbers(ins: Instruction, code: Decoder) -> Source:
    """Return the operand as numbers, from the low bits of a register that is too wide."""
    text, kind = ins.operands[1], ins.modifiers[-1]
    bits = BITS[kind]
    if text.startswith("%") and code.function.bits(text, bits) > bits:
        whole = code.source(text, f"b{bits}")
        return lambda group: whole(group).astype(RAW[bits]).view(NUMPY[kind])
    return code.source(text, kind)


def _conversion(ins: Instruction, code: Decoder) -> Callable[[Array], Array]:
    to, origin = ins.modifiers[-2:]
    narrow = _rounding_to_half(to, "rz" in ins.modifiers)
    integral = _TO_INTEGRAL.get(ins.one_of(*_TO_INTEGRAL) or "")
    register_bits = code.function.bits(ins.operands[0], BITS[to])

    def convert(values: Array) -> Array:
        if origin == "bf16":
            values = from_bf16(values)
        if to == "tf32":
            return to_tf32(values, "rna" in ins.modifiers)
        if to not in FLOATS:
            if origin in FLOATS:
                values = float_to_int((integral or np.trunc)(values), NUMPY[to])
            else:
                values = values.astype(NUMPY[to])
            return raw(values.astype(RAW[register_bits]) if register_bits > BITS[to] else values)
        if integral is not None and origin in FLOATS:
            values = integral(values)
        if narrow is None:
            values = values.astype(NUMPY[to])
        if "sat" in ins.modifiers:
            values = np.fmin(np.fmax(values, values.dtype.type(0)), values.dtype.type(1))
        return values if narrow is None else narrow(values)

    return convert


def _rounding_to_half(kind: str, toward_zero: bool) -> Callable[[Array], Array] | None:
    if kind.startswith("bf16"):
        return to_bf16_toward_zero if toward_zero else to_bf16
    if kind.startswith("f16"):
        return to_f16_toward_zero if toward_zero else to_f16
    return None


def _to_half_pair(ins: Instruction, code: Decoder) -> Step:
    """Convert two float32 to a pair of 16-bit floats; the first operand is the upper half."""
    narrow = _rounding_to_half(ins.modifiers[-2], "rz" in ins.modifiers)
    assert narrow is not None

    def pack(high: Array, low: Array) -> Array:
        return (narrow(high).astype(np.uint32) << np.uint32(16)) | narrow(low).astype(np.uint32)

    return code.elementwise(ins.operands[0], pack, *code.sources(ins.operands[1:3], "f32"))


def _to_fp8_pair(ins: Instruction, code: Decoder) -> Step:
    kind, origin = ins.modifiers[-2][:4], ins.modifiers[-1]
    if origin == "f32":

        def pack(high: Array, low: Array) -> Array:
            return (to_fp8(high, kind).astype(np.uint16) << np.uint16(8)) | to_fp8(low, kind)

        return code.elementwise(ins.operands[0], pack, *code.sources(ins.operands[1:3], "f32"))
    source = code.source(ins.operands[1])

    def value(group: Group) -> Array:
        return to_fp8(from_f16(group.dense(source(group)).view(np.uint16)), kind).view(np.uint16)

    return code.assign(ins.operands[0], value)


def _from_fp8_pair(ins: Instruction, code: Decoder) -> Step:
    table, source = FP8[ins.modifiers[-1][:4]], code.source(ins.operands[1], "b16")

    def value(group: Group) -> Array:
        return to_f16(table[group.dense(source(group)).view(np.uint8)]).view(np.uint32)

    return code.assign(ins.operands[0], value)

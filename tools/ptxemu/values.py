"""Values of registers: PTX types as numpy types, and the floating-point formats that numpy lacks.

A register is an array of raw unsigned bits, one element per lane, or a 0-d array if all lanes agree.
Instructions view the bits as the type they name, compute, and view the result as raw bits again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array: TypeAlias = NDArray[Any]
Mask: TypeAlias = Array | None  # the active lanes; None means all

RAW: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}  # by bits
NUMPY: dict[str, Any] = {
    "pred": np.bool_,
    **{f"{kind}{bits}": RAW[bits] for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}").type for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}").type for bits in (16, 32, 64)},
}
BITS = {
    **{name: np.dtype(kind).itemsize * 8 for name, kind in NUMPY.items()},
    **{"pred": 1, "bf16": 16, "tf32": 32, "e4m3x2": 16, "e5m2x2": 16},
    **{"f16x2": 32, "bf16x2": 32, "f32x2": 64},
}
FLOATS = ("f16", "bf16", "f32", "f64")


def constant(value: int, bits: int) -> Array:
    """Return a number as raw bits, the same in all lanes."""
    return np.array(value & ((1 << bits) - 1), RAW[bits])


def raw(values: Array) -> Array:
    """Return the bits of computed values."""
    bits = values.dtype.itemsize * 8
    return values if values.dtype.kind in "bu" else values.view(RAW[bits])


# ---- 16-bit floats


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: Array) -> Array:
    """Round float32 to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def to_bf16_toward_zero(values: Array) -> Array:
    return (np.asarray(values, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def from_f16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


def to_f16(values: Array) -> Array:
    return np.asarray(values, np.float32).astype(np.float16).view(np.uint16)


def to_f16_toward_zero(values: Array) -> Array:
    values = np.asarray(values, np.float32)
    nearest = values.astype(np.float16)
    too_far = np.abs(nearest.astype(np.float32)) > np.abs(values)
    return np.where(too_far, np.nextafter(nearest, np.float16(0)), nearest).view(np.uint16)


# ---- 8-bit floats and tf32


def fp8_values(exponent_bits: int, mantissa_bits: int, infinities: bool) -> Array:
    """Return all 256 values of an 8-bit float, by bit pattern."""
    pattern = np.arange(256)
    exponent = (pattern >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = pattern & (2**mantissa_bits - 1)
    bias = 2 ** (exponent_bits - 1) - 1
    subnormal = mantissa * 2.0 ** (1 - bias - mantissa_bits)
    normal = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent.astype(float) - bias)
    size = np.where(exponent == 0, subnormal, normal)
    if infinities:
        size = np.where(exponent < 2**exponent_bits - 1, size, np.where(mantissa == 0, np.inf, np.nan))
    else:  # one NaN pattern only
        size[(pattern & 127) == 127] = np.nan
    return np.where(pattern >> 7, -size, size).astype(np.float32)


FP8 = {"e4m3": fp8_values(4, 3, infinities=False), "e5m2": fp8_values(5, 2, infinities=True)}


def to_fp8(values: Array, kind: str) -> Array:
    """Round to the nearest 8-bit float, ties to even, saturating at the largest finite value."""
    positive = FP8[kind][:128]
    positive = positive[np.isfinite(positive)]  # ascending: the bit pattern is the index
    middles = (positive[1:].astype(np.float64) + positive[:-1]) / 2
    size = np.abs(values)
    below = np.searchsorted(middles, size, "left")
    tie = (below < len(middles)) & (middles[np.minimum(below, len(middles) - 1)] == size) & (below % 2 == 1)
    pattern = np.where(np.isnan(values), 127, np.minimum(below + tie, len(positive) - 1)).astype(np.uint8)
    return pattern | (np.signbit(values).astype(np.uint8) << np.uint8(7))


def to_tf32(values: Array, ties_away: bool) -> Array:
    """Round float32 to 10 bits of mantissa; the result is still 32 bits wide."""
    bits = np.asarray(values).view(np.uint32)
    half = np.uint32(0x1000) if ties_away else np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return np.where(np.isfinite(values), (bits + half) & np.uint32(0xFFFFE000), bits)


# Operands of tensor-core instructions: how they are stored, and their values in float32. An instruction's
# products of 8-bit integers are exact in float32 too.
OPERANDS: dict[str, tuple[DTypeLike, Callable[[Array], Array]]] = {
    "f16": (np.uint16, from_f16),
    "bf16": (np.uint16, from_bf16),
    "tf32": (np.uint32, lambda bits: (bits & np.uint32(0xFFFFE000)).view(np.float32)),
    "s8": (np.uint8, lambda bits: bits.view(np.int8).astype(np.float32)),
    "u8": (np.uint8, lambda bits: bits.astype(np.float32)),
    "e4m3": (np.uint8, lambda bits: FP8["e4m3"][bits]),
    "e5m2": (np.uint8, lambda bits: FP8["e5m2"][bits]),
}


def operand_bytes(kind: str) -> int:
    return np.dtype(OPERANDS[kind][0]).itemsize


def accumulate(products: Array, old: Array, kind: str) -> Array:
    """Add float32 sums of products to the old accumulators; return raw values."""
    if kind == "s32":
        return (products.astype(np.int32) + old.view(np.int32)).view(np.uint32)
    return (products + old.view(np.float32)).view(np.uint32)


# ---- rounding


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c in float32: the product is exact in float64, the sum is rounded there and again."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def fma_down(a: Array, b: Array, c: Array) -> Array:
    """Return the same, rounded towards minus infinity."""
    exact = a.astype(np.float64) * b + c
    nearest = exact.astype(np.float32)
    return np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def float_to_int(values: Array, kind: Any) -> Array:
    """Convert integral floats to integers: out of range saturates, NaN gives 0."""
    limits = np.iinfo(kind)
    wide = np.asarray(values, np.float64)
    inside = (wide > limits.min) & (wide < limits.max)
    clipped = np.where(wide >= limits.max, kind(limits.max), kind(limits.min))
    clipped = np.where(np.isnan(wide), kind(0), clipped)
    return np.where(inside, np.where(inside, wide, 0).astype(kind), clipped)

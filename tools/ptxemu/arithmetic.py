"""Integer, floating-point, logic, comparison, selection and move instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Decoder, Step, Unsupported, instruction, refuse
from .parse import Instruction
from .state import Group
from .values import BITS, FLOATS, NUMPY, RAW, Array, Mask, fma, fma_down, from_bf16, from_f16, to_bf16, to_f16

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "fma": lambda a, b, c: a * b + c,
    "min": np.fmin,
    "max": np.fmax,
    "neg": lambda a: -a,
    "abs": np.abs,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: a.dtype.type(1) / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: a.dtype.type(1) / np.sqrt(a),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "copysign": lambda a, b: np.copysign(b, a),
}
_LOGIC: dict[str, Callable[..., Any]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
}


# ---- add, multiply, minimum, ...


@instruction("add", "sub", "mul", "mad", "fma", "min", "max", "neg", "abs", "ex2", "tanh")
def _arithmetic(ins: Instruction, code: Decoder) -> Step:
    kind = ins.type
    if kind == "f32x2":
        return _packed(ins, code, np.float32, 2)
    if kind in ("f16", "bf16") and "f32" in ins.modifiers[:-1]:
        return _mixed(ins, code)
    if kind in ("bf16", "f16x2", "bf16x2") or (kind == "f16" and ins.name == "fma"):
        return _half(ins, code)
    if kind in FLOATS:
        return _float(ins, code)
    return _integer(ins, code)


def _float(ins: Instruction, code: Decoder) -> Step:
    name, kind = ins.name, ins.type
    function = _FUNCTIONS.get(name) or _OPERATIONS[name]
    if name in ("fma", "mad") and kind == "f32":
        function = fma_down if "rm" in ins.modifiers else fma
    elif name in ("min", "max") and "NaN" in ins.modifiers:
        function = {"min": np.minimum, "max": np.maximum}[name]
    if name in ("min", "max") and len(ins.operands) == 4:
        two = function
        function = lambda a, b, c: two(two(a, b), c)  # noqa: E731
    if "sat" in ins.modifiers:
        function = _saturated(function)
    return code.elementwise(ins.operands[0], function, *code.sources(ins.operands[1:], kind))


def _saturated(function: Callable[..., Any]) -> Callable[..., Any]:
    def clipped(*values: Array) -> Array:
        result = function(*values)
        return np.fmin(np.fmax(result, result.dtype.type(0)), result.dtype.type(1))

    return clipped


def _fused(name: str) -> Callable[..., Any]:
    return fma if name == "fma" else _OPERATIONS[name]


def _packed(ins: Instruction, code: Decoder, kind: Any, count: int) -> Step:
    """Compute on several numbers in one register."""
    function = _fused(ins.name)
    sources = code.sources(ins.operands[1:], "b64")

    def value(group: Group) -> Array:
        parts = [group.dense(source(group)).view(kind).reshape(-1, count) for source in sources]
        return np.ascontiguousarray(function(*parts)).view(np.uint64).reshape(-1)

    return code.assign(ins.operands[0], value)


def _mixed(ins: Instruction, code: Decoder) -> Step:
    """Compute on 16-bit operands and a last one of float32."""
    widen = from_bf16 if ins.type == "bf16" else from_f16
    narrow, wide = code.sources(ins.operands[1:-1], "b16"), code.source(ins.operands[-1], "f32")
    function = _fused(ins.name)

    def value(group: Group) -> Array:
        result: Array = function(*(widen(np.asarray(source(group))) for source in narrow), wide(group))
        return result

    return code.assign(ins.operands[0], value)


def _half(ins: Instruction, code: Decoder) -> Step:
    """Compute on 16-bit floats, one or two in a register, in float32, and round once."""
    widen, narrow = (from_bf16, to_bf16) if ins.type.startswith("bf") else (from_f16, to_f16)
    bits = BITS[ins.type]
    function = _FUNCTIONS.get(ins.name) or _OPERATIONS[ins.name]
    sources = code.sources(ins.operands[1:], f"b{bits}")

    def value(group: Group) -> Array:
        parts = (widen(group.dense(source(group)).view(np.uint16)) for source in sources)
        return np.ascontiguousarray(narrow(function(*parts))).view(RAW[bits])

    return code.assign(ins.operands[0], value)


def _integer(ins: Instruction, code: Decoder) -> Step:
    name, kind, bits = ins.name, ins.type, BITS[ins.type]
    target, operands = ins.operands[0], ins.operands[1:]
    if name in ("mul", "mad") and "wide" in ins.modifiers:
        wide = f"{kind[0]}{2 * bits}"
        factors = _widened(NUMPY[wide])
        added = [code.source(operands[2], wide)] if name == "mad" else []
        return code.elementwise(target, factors, *code.sources(operands[:2], kind), *added)
    if name in ("mul", "mad") and "hi" in ins.modifiers:
        added = [code.source(operands[2], f"b{bits}")] if name == "mad" else []
        high = _high_64 if bits == 64 else _high_32
        return code.elementwise(target, high(kind[0] == "s"), *code.sources(operands[:2], f"b{bits}"), *added)
    if name == "neg":
        return code.elementwise(target, lambda a: ~a + a.dtype.type(1), code.source(operands[0], kind))
    function = {"min": np.minimum, "max": np.maximum}.get(name, _OPERATIONS[name])
    return code.elementwise(target, function, *code.sources(operands, kind))


def _widened(kind: Any) -> Callable[..., Array]:
    def product(a: Array, b: Array, c: Array | None = None) -> Array:
        wide = a.astype(kind) * b.astype(kind)
        return wide if c is None else wide + c

    return product


def _high_32(signed: bool) -> Callable[..., Array]:
    narrow, wide = (np.int32, np.int64) if signed else (np.uint32, np.uint64)

    def high(a: Array, b: Array, c: Array | None = None) -> Array:
        product = a.view(narrow).astype(wide) * b.view(narrow).astype(wide)
        top = (product >> wide(32)).astype(narrow).view(np.uint32)
        return top if c is None else top + c

    return high


def _high_64(signed: bool) -> Callable[..., Array]:
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)

    def high(a: Array, b: Array, c: Array | None = None) -> Array:
        middle = (a >> half) * (b & low) + (((a & low) * (b & low)) >> half)
        cross = (a & low) * (b >> half) + (middle & low)
        top = (a >> half) * (b >> half) + (middle >> half) + (cross >> half)
        if signed:
            zero = np.uint64(0)
            top = top - np.where(a >> np.uint64(63), b, zero) - np.where(b >> np.uint64(63), a, zero)
        return np.asarray(top if c is None else top + c)

    return high


@instruction("lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "copysign")
def _function(ins: Instruction, code: Decoder) -> Step:
    return _float(ins, code)


@instruction("div", "rem")
def _divide(ins: Instruction, code: Decoder) -> Step:
    sources = code.sources(ins.operands[1:], ins.type)
    if ins.type in FLOATS:
        if ins.name == "rem":
            refuse(ins)
        return code.elementwise(ins.operands[0], lambda a, b: a / b, *sources)
    function = _quotient if ins.name == "div" else (lambda a, b: a - _quotient(a, b) * b)
    return code.elementwise(ins.operands[0], function, *sources)


def _quotient(a: Array, b: Array) -> Array:
    """Divide integers towards zero; division by zero, which is undefined, divides by one."""
    b = np.where(b == 0, 1, b).astype(a.dtype)
    return (a - np.fmod(a, b)) // b


# ---- bits


@instruction("and", "or", "xor", "not")
def _logic(ins: Instruction, code: Decoder) -> Step:
    return code.elementwise(
        ins.operands[0],
        _LOGIC[ins.name],
        *code.sources(ins.operands[1:], "pred" if ins.type == "pred" else ins.type),
    )


@instruction("shl", "shr")
def _shift(ins: Instruction, code: Decoder) -> Step:
    bits = BITS[ins.type]

    def left(a: Array, n: Array) -> Array:
        return np.where(n < bits, a << np.minimum(n, bits - 1).astype(a.dtype), a.dtype.type(0))

    def right(a: Array, n: Array) -> Array:
        shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
        return shifted if a.dtype.kind == "i" else np.where(n < bits, shifted, a.dtype.type(0))

    sources = code.source(ins.operands[1], ins.type), code.source(ins.operands[2], "b32")
    return code.elementwise(ins.operands[0], left if ins.name == "shl" else right, *sources)


@instruction("popc", "clz", "brev", "bfind")
def _count_bits(ins: Instruction, code: Decoder) -> Step:
    bits = BITS[ins.type]

    def leading(a: Array) -> Array:
        exponent = np.frexp(a.astype(np.longdouble))[1]  # 0 for 0
        return (bits - exponent).astype(np.uint32)

    def reversed_bits(a: Array) -> Array:
        a = np.asarray(a)
        unpacked = np.unpackbits(np.ascontiguousarray(a).reshape(-1, 1).view(np.uint8), axis=1)
        return np.packbits(unpacked[:, ::-1], axis=1).view(a.dtype).reshape(a.shape)

    functions: dict[str, Callable[[Array], Array]] = {
        "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
        "clz": leading,
        "bfind": lambda a: np.uint32(bits - 1) - leading(a),
        "brev": reversed_bits,
    }
    return code.elementwise(ins.operands[0], functions[ins.name], code.source(ins.operands[1], f"b{bits}"))


@instruction("bfe")
def _extract_field(ins: Instruction, code: Decoder) -> Step:
    bits, signed = BITS[ins.type], ins.type[0] == "s"

    def extract(a: Array, position: Array, length: Array) -> Array:
        kind = a.dtype.type
        length = length.astype(kind)
        ones = (kind(1) << length) - kind(1)
        field = (a >> position.astype(kind)) & ones
        if signed:
            negative = (field >> (length - kind(1))) & kind(1)
            field = np.where(negative != 0, field | ~ones, field)
        return field

    sources = code.source(ins.operands[1], f"b{bits}"), *code.sources(ins.operands[2:])
    return code.elementwise(ins.operands[0], extract, *sources)


@instruction("bfi")
def _insert_field(ins: Instruction, code: Decoder) -> Step:
    a, b, position, length = code.sources(ins.operands[1:], "b32")

    def insert(group: Group) -> Array:
        n, at = length(group).astype(np.uint64), position(group)
        ones = ((np.uint64(1) << n) - np.uint64(1)).astype(np.uint32) << at
        return (b(group) & ~ones) | ((a(group) << at) & ones)

    return code.assign(ins.operands[0], insert)


@instruction("prmt")
def _permute_bytes(ins: Instruction, code: Decoder) -> Step:
    def permute(a: Array, b: Array, selectors: Array) -> Array:
        both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
        result: Array = np.zeros((), np.uint32)
        for i in range(4):
            selector = (selectors >> np.uint32(4 * i)) & np.uint32(15)
            shift = (selector & np.uint32(7)).astype(np.uint64) * np.uint64(8)
            byte = ((both >> shift) & np.uint64(255)).astype(np.uint32)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            byte = np.where(selector & np.uint32(8), sign, byte)
            result = result | (byte << np.uint32(8 * i))
        return result

    return code.elementwise(ins.operands[0], permute, *code.sources(ins.operands[1:]))


@instruction("lop3")
def _three_input_logic(ins: Instruction, code: Decoder) -> Step:
    table = int(ins.operands[4], 0)

    def logic(a: Array, b: Array, c: Array) -> Array:
        result = a & np.uint32(0)
        for i in range(8):
            if table >> i & 1:
                result = result | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
        return result

    return code.elementwise(ins.operands[0], logic, *code.sources(ins.operands[1:4]))


@instruction("shf")
def _funnel_shift(ins: Instruction, code: Decoder) -> Step:
    left, clamp = ins.modifiers[0] == "l", "clamp" in ins.modifiers

    def shift(low: Array, high: Array, n: Array) -> Array:
        both = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
        n = (np.minimum(n, np.uint32(32)) if clamp else n & np.uint32(31)).astype(np.uint64)
        return ((both << n) >> np.uint64(32) if left else both >> n).astype(np.uint32)

    return code.elementwise(ins.operands[0], shift, *code.sources(ins.operands[1:]))


# ---- compare, select, move

_COMPARE: dict[str, Callable[[Array, Array], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@instruction("setp")
def _compare(ins: Instruction, code: Decoder) -> Step:
    how, kind = ins.modifiers[0], ins.type
    targets = ins.operands[0].split("|")
    a, b = code.sources(ins.operands[1:3], kind)
    combine = _LOGIC[ins.one_of("and", "or", "xor") or "and"]
    other = code.predicate(ins.operands[3]) if len(ins.operands) > 3 else None
    compare = _float_comparison(how) if kind in FLOATS else _COMPARE[_UNSIGNED.get(how, how)]

    def values(group: Group, mask: Mask) -> list[Array]:
        x, y = a(group), b(group)
        found = compare(from_bf16(x), from_bf16(y)) if kind == "bf16" else compare(x, y)
        results = [found, ~found] if len(targets) > 1 else [found]
        return results if other is None else [combine(result, other(group)) for result in results]

    return code.assign_all(targets, values)


def _float_comparison(how: str) -> Callable[[Array, Array], Any]:
    """Return a comparison: false on NaN if it is ordered, true if its name ends in u."""
    if how in ("nan", "num"):
        unordered = how == "nan"
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == unordered
    if how in _COMPARE:
        compare = _COMPARE[how]
        if how == "ne":  # numpy's != is true on NaN
            return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
        return compare
    compare = _COMPARE[how[:2]]
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


@instruction("selp")
def _select(ins: Instruction, code: Decoder) -> Step:
    _, yes, no, condition = ins.operands
    kind = f"b{BITS[ins.type]}"
    sources = code.predicate(condition), code.source(yes, kind), code.source(no, kind)
    return code.elementwise(ins.operands[0], np.where, *sources)


@instruction("mov")
def _move(ins: Instruction, code: Decoder) -> Step:
    target, origin = ins.operands
    if target.startswith("{"):
        return _unpack(code, target, origin, BITS[ins.type])
    if origin.startswith("{"):
        return _pack(code, target, origin, BITS[ins.type])
    return code.elementwise(
        target, lambda a: a, code.source(origin, "pred" if ins.type == "pred" else f"b{BITS[ins.type]}")
    )


def _unpack(code: Decoder, target: str, origin: str, bits: int) -> Step:
    targets, source = code.vector(target), code.source(origin, f"b{bits}")
    part = RAW[bits // len(targets)]

    def values(group: Group, mask: Mask) -> list[Array]:
        parts = group.dense(source(group)).view(part).reshape(-1, len(targets))
        return [np.ascontiguousarray(parts[:, i]) for i in range(len(targets))]

    return code.assign_all(targets, values)


def _pack(code: Decoder, target: str, origin: str, bits: int) -> Step:
    texts = code.vector(origin)
    sources = code.sources(texts, f"b{bits // len(texts)}")

    def value(group: Group) -> Array:
        parts = np.stack([group.wide(source(group)) for source in sources], 1)
        return np.ascontiguousarray(parts).view(RAW[bits]).reshape(-1)

    return code.assign(target, value)


@instruction("cvta", "createpolicy")
def _address_space(ins: Instruction, code: Decoder) -> Step:
    """Copy an address, which is the same in every space, or a cache policy, which does nothing."""
    origin = "0" if ins.name == "createpolicy" else ins.operands[1]
    return code.elementwise(ins.operands[0], lambda a: a, code.source(origin, "b64"))


@instruction("mapa")
def _in_cluster(ins: Instruction, code: Decoder) -> Step:
    """Copy a shared address into the CTA of a rank of the cluster: here always this one."""
    address, rank = code.source(ins.operands[1], f"b{BITS[ins.type]}"), code.source(ins.operands[2])
    register = code.register(ins.operands[0])

    def step(group: Group, mask: Mask) -> None:
        ranks = group.wide(rank(group))[group.active(mask)]
        if ranks.any():
            raise Unsupported(f"{ins}: wanted rank 0 in a cluster of one CTA, got {int(ranks.max())}")
        group.write(register, address(group), mask)

    return step

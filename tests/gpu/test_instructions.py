"""Each elementwise or warp-level instruction against numpy."""

import numpy as np
import pytest
from cases.handwritten_ptx import DTYPES, THREADS, evaluate, launch


def numbers(kind, seed):
    """Return ordinary and extreme values of a type."""
    rng, dtype = np.random.default_rng(seed), DTYPES[kind]
    if np.dtype(dtype).kind == "f":
        special = np.array([0, -0.0, 1, -1, 0.5, -2.5, 1.5, np.inf, -np.inf, np.nan, 1e4, -1e-7], dtype)
        values = (rng.standard_normal(THREADS) * 10).astype(dtype)
    else:
        limits = np.iinfo(dtype)
        special = np.array([0, 1, 2, 31, limits.max, limits.min, limits.max - 1], dtype)
        values = rng.integers(limits.min, limits.max, THREADS, dtype, endpoint=True)
    at = rng.choice(THREADS, len(special), replace=False)
    values[at] = special
    return values


def bits_of(x):
    return x.view(np.uint32 if x.dtype.itemsize == 4 else np.uint64)


def wide(x, kind=np.int64):
    return x.astype(kind)


def each(function):
    """Apply a function of Python integers to arrays."""
    return lambda *arrays: np.array([function(*map(int, row)) for row in zip(*arrays, strict=True)], object)


def quotient(a, b):
    """Divide towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def fused(a, b, c):
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


def permuted(a, b, s):
    both, out = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")], []
    for i in range(4):
        chosen = s >> 4 * i & 15
        out.append((255 if both[chosen & 7] & 128 else 0) if chosen & 8 else both[chosen & 7])
    return int.from_bytes(bytes(out), "little")


def brain(x):
    """Round float32 to bfloat16, kept as float32, by definition: nearest, ties to even."""
    low, high = x.view(np.uint32) & 0xFFFF0000, (x.view(np.uint32) & 0xFFFF0000) + np.uint32(0x10000)
    down, up = low.view(np.float32).astype(np.float64), high.view(np.float32).astype(np.float64)
    nearer_up = np.abs(up - x) < np.abs(x - down)
    tie = (np.abs(up - x) == np.abs(x - down)) & ((low >> 16) & 1 == 1)
    return np.where(nearer_up | tie, high, low).astype(np.uint32).view(np.float32)


# code, types of the operands, type of the result, its definition
ELEMENTWISE = [
    ("add.s32 {d}, {a}, {b};", "s32 s32", "s32", lambda a, b: a + b),
    ("sub.s64 {d}, {a}, {b};", "s64 s64", "s64", lambda a, b: a - b),
    ("mul.lo.s32 {d}, {a}, {b};", "s32 s32", "s32", lambda a, b: a * b),
    ("mad.lo.s32 {d}, {a}, {b}, {c};", "s32 s32 s32", "s32", lambda a, b, c: a * b + c),
    ("mul.wide.s32 {d}, {a}, {b};", "s32 s32", "s64", lambda a, b: wide(a) * b),
    ("mul.wide.u32 {d}, {a}, {b};", "u32 u32", "u64", lambda a, b: wide(a, np.uint64) * b),
    ("mad.wide.s32 {d}, {a}, {b}, {c};", "s32 s32 s64", "s64", lambda a, b, c: wide(a) * b + c),
    ("mul.hi.s32 {d}, {a}, {b};", "s32 s32", "s32", lambda a, b: (wide(a) * b) >> 32),
    ("mul.hi.u32 {d}, {a}, {b};", "u32 u32", "u32", lambda a, b: (wide(a, np.uint64) * b) >> np.uint64(32)),
    ("mul.hi.s64 {d}, {a}, {b};", "s64 s64", "s64", each(lambda a, b: (a * b) >> 64)),
    ("mul.hi.u64 {d}, {a}, {b};", "u64 u64", "u64", each(lambda a, b: (a * b) >> 64)),
    ("or.b32 {b}, {b}, 1; div.s32 {d}, {a}, {b};", "s32 s32", "s32", each(lambda a, b: quotient(a, b | 1))),
    ("or.b32 {b}, {b}, 1; rem.s32 {d}, {a}, {b};", "s32 s32", "s32",
     each(lambda a, b: a - quotient(a, b | 1) * (b | 1))),
    ("div.u32 {d}, {a}, 7;", "u32", "u32", lambda a: a // 7),
    ("min.s32 {d}, {a}, {b};", "s32 s32", "s32", np.minimum),
    ("max.u32 {d}, {a}, {b};", "u32 u32", "u32", np.maximum),
    ("neg.s32 {d}, {a};", "s32", "s32", lambda a: -a),
    ("abs.s32 {d}, {a};", "s32", "s32", np.abs),
    ("and.b32 {d}, {a}, {b};", "b32 b32", "b32", lambda a, b: a & b),
    ("or.b64 {d}, {a}, {b};", "b64 b64", "b64", lambda a, b: a | b),
    ("xor.b16 {d}, {a}, {b};", "b16 b16", "b16", lambda a, b: a ^ b),
    ("not.b32 {d}, {a};", "b32", "b32", lambda a: ~a),
    ("and.b32 {d}, {b}, 63; shl.b32 {d}, {a}, {d};", "b32 b32", "b32",
     each(lambda a, b: a << (b & 63) if b & 63 < 32 else 0)),
    ("and.b32 {d}, {b}, 63; shr.u32 {d}, {a}, {d};", "u32 b32", "u32", each(lambda a, b: a >> (b & 63))),
    ("and.b32 {d}, {b}, 63; shr.s32 {d}, {a}, {d};", "s32 b32", "s32", each(lambda a, b: a >> (b & 63))),
    ("popc.b32 {d}, {a};", "b32", "u32", each(lambda a: a.bit_count())),
    ("clz.b32 {d}, {a};", "b32", "u32", each(lambda a: 32 - a.bit_length())),
    ("clz.b64 {d}, {a};", "b64", "u32", each(lambda a: 64 - a.bit_length())),
    ("bfind.u32 {d}, {a};", "u32", "s32", each(lambda a: a.bit_length() - 1)),
    ("brev.b32 {d}, {a};", "b32", "b32", each(lambda a: int(f"{a:032b}"[::-1], 2))),
    ("bfe.u32 {d}, {a}, 5, 9;", "u32", "u32", lambda a: a >> 5 & 511),
    ("bfe.s32 {d}, {a}, 5, 9;", "s32", "s32", lambda a: a << 18 >> 23),
    ("bfi.b32 {d}, {a}, {b}, 4, 6;", "b32 b32", "b32", lambda a, b: (b & ~np.uint32(0x3F0)) | (a & 63) << 4),
    ("prmt.b32 {d}, {a}, {b}, {c};", "b32 b32 b32", "b32", each(permuted)),
    ("lop3.b32 {d}, {a}, {b}, {c}, 0xe2;", "b32 b32 b32", "b32", lambda a, b, c: (a & b) | (~b & c)),
    ("shf.l.wrap.b32 {d}, {a}, {b}, 7;", "b32 b32", "b32", lambda a, b: b << 7 | a >> 25),
    ("shf.r.clamp.b32 {d}, {a}, {b}, 40;", "b32 b32", "b32", lambda a, b: b),
    ("setp.lt.s32 %p1, {a}, {b}; selp.b32 {d}, 5, 6, %p1;", "s32 s32", "s32",
     lambda a, b: np.where(a < b, 5, 6)),
    ("setp.hi.u32 %p1, {a}, {b}; selp.b32 {d}, 5, 6, %p1;", "u32 u32", "s32",
     lambda a, b: np.where(a > b, 5, 6)),
    ("setp.ne.f32 %p1, {a}, {a}; selp.b32 {d}, 5, 6, %p1;", "f32", "s32", lambda a: np.full(a.shape, 6)),
    ("setp.neu.f32 %p1, {a}, {a}; selp.b32 {d}, 5, 6, %p1;", "f32", "s32",
     lambda a: np.where(np.isnan(a), 5, 6)),
    ("setp.gt.and.f32 %p1|%p2, {a}, 0f00000000, !%p3; selp.b32 {d}, 5, 6, %p2;", "f32", "s32",
     lambda a: np.where(~(a > 0), 5, 6)),
    ("setp.num.f32 %p1, {a}, {b}; selp.f32 {d}, {a}, {b}, %p1;", "f32 f32", "f32",
     lambda a, b: np.where(np.isnan(a) | np.isnan(b), b, a)),
    ("add.f32 {d}, {a}, {b};", "f32 f32", "f32", lambda a, b: a + b),
    ("mul.f32 {d}, {a}, {b};", "f32 f32", "f32", lambda a, b: a * b),
    ("fma.rn.f32 {d}, {a}, {b}, {c};", "f32 f32 f32", "f32", fused),
    ("div.full.f32 {d}, {a}, {b};", "f32 f32", "f32", lambda a, b: a / b),
    ("min.f32 {d}, {a}, {b};", "f32 f32", "f32", np.fmin),
    ("max.NaN.f32 {d}, {a}, {b};", "f32 f32", "f32", np.maximum),
    ("add.sat.f32 {d}, {a}, {b};", "f32 f32", "f32", lambda a, b: np.fmin(np.fmax(a + b, 0), 1)),
    ("ex2.approx.ftz.f32 {d}, {a};", "f32", "f32", np.exp2),
    ("lg2.approx.ftz.f32 {d}, {a};", "f32", "f32", np.log2),
    ("rcp.approx.ftz.f32 {d}, {a};", "f32", "f32", lambda a: 1 / a),
    ("rsqrt.approx.ftz.f32 {d}, {a};", "f32", "f32", lambda a: 1 / np.sqrt(a)),
    ("tanh.approx.f32 {d}, {a};", "f32", "f32", np.tanh),
    ("fma.rn.f16 {d}, {a}, {b}, {c};", "f16 f16 f16", "f16",
     lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float16)),
    ("fma.rn.f32x2 {d}, {a}, {b}, {a};", "b64 b64", "b64",
     lambda a, b: fused(a.view(np.float32), b.view(np.float32), a.view(np.float32)).view(np.uint64)),
    ("add.f16x2 {d}, {a}, {b};", "b32 b32", "b32",
     lambda a, b: (a.view(np.float16) + b.view(np.float16)).view(np.uint32)),
    ("cvt.rn.f32.s32 {d}, {a};", "s32", "f32", lambda a: a.astype(np.float32)),
    ("cvt.rzi.s32.f32 {d}, {a};", "f32", "s32",
     lambda a: np.clip(np.nan_to_num(np.trunc(a.astype(np.float64))), -(2**31), 2**31 - 1)),
    ("cvt.rni.ftz.f32.f32 {d}, {a};", "f32", "f32", np.rint),
    ("cvt.rmi.f32.f32 {d}, {a};", "f32", "f32", np.floor),
    ("cvt.rn.f16.f32 {d}, {a};", "f32", "f16", lambda a: a.astype(np.float16)),
    ("cvt.f32.f16 {d}, {a};", "f16", "f32", lambda a: a.astype(np.float32)),
    ("cvt.s64.s32 {d}, {a};", "s32", "s64", wide),
    ("cvt.u64.u32 {d}, {a};", "u32", "u64", lambda a: wide(a, np.uint64)),
    ("cvt.u16.u32 {d}, {a};", "u32", "u16", lambda a: a.astype(np.uint16)),
    ("cvt.s16.s8 {d}, {a};", "s8", "s16", lambda a: a.astype(np.int16)),
    ("cvt.rn.f16x2.f32 {d}, {a}, {b};", "f32 f32", "b32",
     lambda a, b: np.stack([b, a], 1).astype(np.float16).view(np.uint32)[:, 0]),
    ("cvt.rn.bf16.f32 %h8, {a}; cvt.f32.bf16 {d}, %h8;", "f32", "f32",
     lambda a: np.where(np.isfinite(a), brain(np.where(np.isfinite(a), a, 0)), a)),
    ("cvt.rna.tf32.f32 {d}, {a};", "f32", "b32",
     lambda a: np.where(np.isfinite(a), bits_of(a) + np.uint32(4096) & np.uint32(0xFFFFE000), bits_of(a))),
    ("mov.b32 {{%h1, %h2}}, {a}; mov.b32 {d}, {{%h2, %h1}};", "b32", "b32", lambda a: a << 16 | a >> 16),
    ("mov.b64 {{%r7, %r8}}, {a}; mov.b64 {d}, {{%r8, %r7}};", "b64", "b64",
     lambda a: a << np.uint64(32) | a >> np.uint64(32)),
    ("copysign.f32 {d}, {a}, {b};", "f32 f32", "f32", lambda a, b: np.copysign(b, a)),
    ("setp.lt.s32 %p1, {a}, 0; @%p1 neg.s32 {a}, {a}; @!%p1 add.s32 {a}, {a}, 1; mov.b32 {d}, {a};",
     "s32", "s32", lambda a: np.where(a < 0, -a, a + 1)),
    ("setp.lt.s32 %p1, {a}, 0; @%p1 bra low; mov.b32 {d}, 1; bra.uni end;"
     "low: mov.b32 {d}, 2; end: add.s32 {d}, {d}, 1;",
     "s32", "s32", lambda a: np.where(a < 0, 3, 2)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "kinds", "result", "function"), ELEMENTWISE, ids=lambda x: x if isinstance(x, str) else ""
)
def test_elementwise(code, kinds, result, function):
    kinds = kinds.split()
    inputs = [numbers(kind, seed) for seed, kind in enumerate(kinds)]
    with np.errstate(all="ignore"):
        mask = (1 << 8 * np.dtype(DTYPES[result]).itemsize) - 1
        wanted = function(*inputs)
        if wanted.dtype == object or np.dtype(DTYPES[result]).kind != "f":
            unsigned = np.array([int(x) & mask for x in wanted], DTYPES[result.replace("s", "u")])
            wanted = unsigned.view(DTYPES[result])
        else:
            wanted = wanted.astype(DTYPES[result])
    np.testing.assert_array_equal(evaluate(code, kinds, inputs, result), wanted)


# -- lanes -----------------------------------------------------------------------------------------

LANE = np.arange(THREADS) % 32
WARP = np.arange(THREADS) // 32 * 32
ACROSS = [
    ("shfl.sync.bfly.b32 {d}, {a}, 5, 31, -1;", lambda a: a[WARP + (LANE ^ 5)]),
    ("shfl.sync.idx.b32 {d}, {a}, 7, 31, -1;", lambda a: a[WARP + 7]),
    ("shfl.sync.idx.b32 {d}, {a}, 3, 6175, -1;", lambda a: a[WARP + LANE // 8 * 8 + 3]),  # segments of 8
    ("shfl.sync.up.b32 {d}, {a}, 3, 0, -1;", lambda a: a[WARP + np.where(LANE >= 3, LANE - 3, LANE)]),
    ("shfl.sync.down.b32 {d}|%p1, {a}, 3, 31, -1; @!%p1 mov.b32 {d}, 0;",
     lambda a: np.where(LANE < 29, a[np.minimum(WARP + LANE + 3, THREADS - 1)], 0)),
    ("setp.gt.u32 %p1, {a}, 99; vote.sync.ballot.b32 {d}, %p1, -1;",
     lambda a: np.repeat([sum(1 << i for i in range(32) if w[i] > 99) for w in a.reshape(2, 32)], 32)),
    ("setp.gt.u32 %p1, {a}, 99; vote.sync.any.pred %p2, %p1, -1; selp.b32 {d}, 1, 0, %p2;",
     lambda a: np.repeat((a.reshape(2, 32) > 99).any(1), 32)),
    ("and.b32 {a}, {a}, 3; match.any.sync.b32 {d}, {a}, -1;",
     lambda a: [sum(1 << j for j in range(32) if (a[w + j] ^ a[i]) & 3 == 0) for i, w in enumerate(WARP)]),
    ("redux.sync.add.u32 {d}, {a}, -1;", lambda a: np.repeat(a.reshape(2, 32).sum(1, dtype=np.uint32), 32)),
    ("redux.sync.max.s32 {d}, {a}, -1;", lambda a: np.repeat(a.view(np.int32).reshape(2, 32).max(1), 32)),
    ("elect.sync _|%p1, -1; selp.b32 {d}, 1, 0, %p1;", lambda a: LANE == 0),
    ("setp.gt.u32 %p1, {a}, 99; bar.red.popc.u32 {d}, 0, %p1;", lambda a: np.full(THREADS, (a > 99).sum())),
    ("st.shared.b32 [smem], {a}; mov.b32 {d}, %laneid;", lambda a: LANE),
    ("movmatrix.sync.aligned.m8n8.trans.b16 {d}, {a};",
     lambda a: a.view(np.uint16).reshape(2, 8, 8).transpose(0, 2, 1).ravel().view(np.uint32)),
]  # fmt: skip


# Lanes 2, 10, ... take a longer way, whose code stands behind the instruction; -1 is in a register.
DETOUR = "mov.b32 %r9, -1; and.b32 %r8, %r299, 7; setp.eq.u32 %p9, %r8, 2; @%p9 bra away; back: {code}"
DETOUR_END = "bra.uni end; away: add.u32 %r8, %r8, 1; bra.uni back; end:"
DIVERGED = [(DETOUR.format(code=code.replace(", -1;", ", %r9;")), f) for code, f in ACROSS if ".sync" in code]


@pytest.mark.parametrize(
    ("code", "function"), [*ACROSS, *DIVERGED], ids=lambda x: x if isinstance(x, str) else ""
)
def test_between_lanes(code, function):
    a = numbers("u32", 3)
    a[:40] %= 200
    code = code.replace("{a}", "%r1").replace("{d}", "%r2")
    body = (
        f"mad.lo.u64 %l1, %l59, 4, %l50; ld.global.b32 %r1, [%l1]; {code}"
        "mad.lo.u64 %l1, %l59, 4, %l51; st.global.b32 [%l1], %r2;"
    )
    if "back:" in code:
        body += DETOUR_END
    arrays, _ = launch(body, [a, np.zeros(THREADS, np.uint32)], shared=64)
    wanted = np.array([int(x) & 0xFFFFFFFF for x in function(a)], np.uint32)
    np.testing.assert_array_equal(arrays[1], wanted)

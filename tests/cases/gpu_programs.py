"""Small Triton programs with the operations of attention: products, copies, reductions, masks, atomics."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def matmul_kernel(
    A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):
    """Compute C = A B with masked borders; the loop is pipelined by cp.async."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    kind = tl.int32 if C.dtype.element_ty == tl.int32 else tl.float32
    total = tl.zeros([BM, BN], kind)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(A + m[:, None] * K + k, (m < M)[:, None] & (k < K), 0.0)
        b = tl.load(B + k[:, None] * N + n, (k < K)[:, None] & (n < N), 0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=kind)
    tl.store(C + m[:, None] * N + n, total.to(C.dtype.element_ty), (m < M)[:, None] & (n < N))


def matmul(a, b, out_dtype=torch.float32, precision="tf32", block=(64, 64, 32), **options):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=out_dtype)
    BM, BN, BK = block
    grid = triton.cdiv(M, BM), triton.cdiv(N, BN)
    options = {"num_warps": 4, "num_stages": 3, **options}
    matmul_kernel[grid](a, b, c, M, N, K, BM=BM, BN=BN, BK=BK, PRECISION=precision, **options)
    return c


@triton.jit
def described_matmul_kernel(
    a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPECIALIZE: tl.constexpr
):
    """Compute C = A B^T with tensor descriptors, by TMA where the GPU has it."""
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=SPECIALIZE):
        total = tl.dot(a.load([m, k]), b.load([n, k]).T, total)
    c.store([m, n], total.to(tl.float16))


def described_matmul(a, b, specialize=False):
    (M, K), N = a.shape, b.shape[0]
    c = torch.empty(M, N, dtype=torch.float16)
    described = [TensorDescriptor.from_tensor(x, [128, w]) for x, w in ((a, 64), (b, 64), (c, 128))]
    grid = triton.cdiv(M, 128), triton.cdiv(N, 128)
    described_matmul_kernel[grid](
        *described, K, BM=128, BN=128, BK=64, SPECIALIZE=specialize, num_warps=4, num_stages=2
    )
    return c


@triton.jit
def softmax_kernel(X, Y, columns, scale, WIDTH: tl.constexpr):
    """Compute one row per program; with several warps the sums go through shared memory."""
    i = tl.arange(0, WIDTH)
    x = tl.load(X + tl.program_id(0) * columns + i, i < columns, -float("inf")) * scale * 0.125
    x = tl.exp(x - tl.max(x, 0))
    tl.store(Y + tl.program_id(0) * columns + i, x / tl.sum(x, 0), i < columns)


def softmax(x, scale=1.0, warps=4):
    y = torch.empty_like(x)
    softmax_kernel[(len(x),)](
        x, y, x.shape[1], scale, WIDTH=triton.next_power_of_2(x.shape[1]), num_warps=warps
    )
    return y


@triton.jit
def sort_kernel(X, SORTED, SUMS, LARGEST, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)
    x = tl.load(X + i)
    tl.store(SORTED + i, tl.sort(x))
    tl.store(SUMS + i, tl.cumsum(x, 0))
    tl.store(LARGEST + i, tl.argmax(x, 0) + (x * 1000).to(tl.int32) // 7)


@triton.jit
def scatter_kernel(X, AT, SUMS, LAST, n, WIDTH: tl.constexpr):
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    at = tl.load(AT + i, i < n, 0)
    tl.atomic_add(SUMS + at, tl.load(X + i, i < n, 0), i < n, sem="relaxed")
    tl.atomic_max(LAST + at, i, i < n)


@triton.jit
def locked_kernel(lock, x):
    """Make CTAs wait for each other."""
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(x, tl.load(x) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def copy_kernel(X, Y, WIDTH: tl.constexpr):
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(Y + i, tl.load(X + i))


@triton.jit
def clash_kernel(Y, WIDTH: tl.constexpr):
    """Make all CTAs write the same place."""
    tl.store(Y + tl.arange(0, WIDTH), tl.zeros([WIDTH], tl.float32) + tl.program_id(0))


@triton.jit
def checked_kernel(X, n, WIDTH: tl.constexpr):
    tl.device_assert(tl.load(X + tl.arange(0, WIDTH)) < n, "too big")


@triton.jit
def tuples_kernel(pointers, numbers, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)
    x = tl.load(pointers[0] + i).to(tl.float8e4nv)
    tl.store(pointers[1] + i, x.to(tl.float32) * numbers[0] + numbers[1])


@triton.autotune([triton.Config({"WIDTH": w}) for w in (128, 512)], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["WIDTH"] == 0})
@triton.jit
def tuned_kernel(X, Y, n, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(X + i) if EVEN else tl.load(X + i, i < n)
    tl.store(Y + i, x * 3, i < n)

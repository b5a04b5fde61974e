"""The models' assumptions about each GPU."""

from typing import NamedTuple

REGISTERS = 65536  # per SM
TENSOR_COLUMNS = 512  # of tensor memory, per SM
RESERVED = 1024  # bytes of shared memory that the driver keeps for each block


class Arch(NamedTuple):
    """One GPU of an architecture: rates are per SM and clock, sizes are per SM.

    ``tensor`` counts dense 16-bit multiply-adds with float32 sums: published peak / SMs / boost clock / 2.
    ``fma``, ``alu`` and ``xu`` are lanes as in the vendor's table of arithmetic throughput.
    """

    gpu: str
    sms: int
    mhz: int
    tensor: int
    fma: int
    warps: int
    ctas: int
    smem: int
    alu: int = 64
    xu: int = 16
    smem_bytes: int = 128  # through shared memory and L1
    tmem_bytes: int = 512  # tensor memory: assumed, 32 lanes of 4 bytes in each sub-partition

    @property
    def smem_cta(self) -> int:
        """Return the bytes of shared memory that one block may have."""
        return self.smem - RESERVED


ARCH = {
    80: Arch("A100", 108, 1410, tensor=1024, fma=64, warps=64, ctas=32, smem=164 << 10),
    86: Arch("RTX 3090", 82, 1695, tensor=256, fma=128, warps=48, ctas=16, smem=100 << 10),
    89: Arch("L40S", 142, 2520, tensor=512, fma=128, warps=48, ctas=24, smem=100 << 10),
    90: Arch("H100", 132, 1830, tensor=2048, fma=128, warps=64, ctas=32, smem=228 << 10),
    100: Arch("B200", 148, 1850, tensor=4096, fma=128, warps=64, ctas=32, smem=228 << 10),
    120: Arch("RTX 5090", 170, 2407, tensor=256, fma=128, warps=48, ctas=24, smem=100 << 10),
}


class Occupancy(NamedTuple):
    """The number of blocks that an SM holds at once, and what limits it."""

    ctas: int
    limiter: str


def occupancy(cc: int, regs: int, threads: int, smem: int, tmem: int = 0) -> Occupancy:
    """Compute how many blocks of a kernel fit on an SM.

    Args:
        cc: compute capability x 10.
        regs: registers per thread.
        threads: threads per block.
        smem: bytes of shared memory per block.
        tmem: columns of tensor memory per block.
    """
    arch = ARCH[cc]
    warps = -(-threads // 32)
    regs_of_warp = -(-regs * 32 // 256) * 256
    by = {
        "registers": REGISTERS // regs_of_warp // warps if regs_of_warp else arch.ctas,
        "warps": arch.warps // warps,
        "blocks": arch.ctas,
        "shared memory": arch.smem // (smem + RESERVED) if smem <= arch.smem_cta else 0,
    }
    if tmem:
        by["tensor memory"] = TENSOR_COLUMNS // tmem
    limiter = min(by, key=by.__getitem__)
    return Occupancy(by[limiter], limiter)

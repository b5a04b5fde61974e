"""The Triton kernels that this process has compiled: their tiles, and what the driver says about them."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

_MODULES = {  # of attnbias.kernels.tiles: the kernel, by pass
    "forward": ("forward", "forward_kernel"),
    "backward_query": ("backward_query", "backward_query_kernel"),
    "backward_key": ("backward_key", "backward_key_kernel"),
}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Built(NamedTuple):
    """One compiled kernel over tiles."""

    which: str  # pass
    config: str  # 128x64 w4 s3
    loads: str  # TMA or pointers
    dtype: str
    d: int
    e: int
    tile: int  # of the lists
    registers: int  # per thread; -1 if it was never loaded
    spills: int
    shared: int  # bytes

    def __str__(self) -> str:
        counts = f", {self.registers} registers, {self.spills} spilled" if self.registers >= 0 else ""
        return f"{self.which} {self.config} {self.loads}{counts}, {self.shared >> 10} KB shared"


def built() -> list[Built]:
    """List the kernels over tiles that were compiled here, in this order; empty under the interpreter."""
    found = []
    for which, (module, name) in _MODULES.items():
        # Whoever ran a kernel has imported its module; asking must not import triton.
        kernel = getattr(sys.modules.get(f"attnbias.kernels.tiles.{module}"), name, None)
        for caches in getattr(kernel, "device_caches", {}).values():
            found += [_read(which, each) for each in caches[0].values()]
    return [each for each in found if each is not None]


def describe(dtype: torch.dtype, d: int, e: int, tile: int) -> str:
    """Name the newest configuration of each pass for some sizes; "" if none was compiled."""
    newest = {
        each.which: f"{each.config} {each.loads}"
        for each in built()
        if (each.dtype, each.d, each.e, each.tile) == (_SHORT.get(dtype), d, e, tile)
    }
    return ", ".join(f"{which} {words}" for which, words in newest.items())


def _read(which: str, kernel: Any) -> Built | None:
    """Read a compiled kernel; None if Triton keeps it in a form that is not known here."""
    try:
        spec = next(x for x in kernel.src.constants.values() if hasattr(x, "row_strides"))
        metadata, signature = kernel.metadata, str(kernel.src.signature)
        kind = next(short for short in _SHORT.values() if f"*{short}" in signature)
        registers = getattr(kernel, "n_regs", None)
        return Built(
            which,
            f"{spec.rows}x{spec.cols} w{metadata.num_warps} s{metadata.num_stages}",
            "TMA" if spec.tma else "pointers",
            kind,
            spec.d,
            spec.e,
            spec.tile,
            -1 if registers is None else registers,
            getattr(kernel, "n_spills", None) or 0,
            metadata.shared,
        )
    except (AttributeError, StopIteration, TypeError):
        return None

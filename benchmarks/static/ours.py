"""Compile our kernels for any capability as the adapter would launch them, without a launch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

import attnbias as ab
from attnbias.backends.call import Call, Inputs, Needs
from attnbias.kernels.launch import config as configs
from attnbias.kernels.launch.config import Pass, Target, candidates

from .arch import ARCH, REGISTERS
from .figures import LOOPS, Figures, Key, Table, loops_of
from .sass import Compiled, analyse

BATCH, HEADS, TOKENS = 2, 2, 512
KERNELS: dict[str, Pass] = {
    "forward_kernel": "forward",
    "backward_query_kernel": "backward_query",
    "backward_key_kernel": "backward_key",
}


class Recorder:
    """A Triton driver for a GPU that is only described: it compiles and keeps kernels, and runs none."""

    def __init__(self, cc: int) -> None:
        self.cc = cc
        self.launched: list[Compiled] = []
        self.utils = self

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return the function that Triton calls for each launch of a kernel."""

        files = get_cache_manager(metadata.hash).get_group(f"{source.name[:150]}.json") or {}
        ptx = next((path for file, path in files.items() if file.endswith(".ptx")), "")

        def launch(gx: int, gy: int, gz: int, stream: int, cubin: bytes, *rest: Any) -> None:
            driver.active.launched.append(Compiled.from_parts(metadata, cubin, metadata.target.arch, ptx))

        return launch

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Return module, function, registers, spills and threads; the function is the cubin."""
        return self, cubin, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the GPU's limits, so that a configuration that does not fit is refused."""
        arch = ARCH[self.cc]
        return {
            "max_shared_mem": arch.smem_cta,
            "multiprocessor_count": arch.sms,
            "max_num_regs": REGISTERS,
            "warpSize": 32,
        }

    def get_current_target(self) -> GPUTarget:
        """Return the target of the compiler."""
        return GPUTarget("cuda", self.cc, 32)

    def get_current_device(self) -> int:
        """Return one number per capability: Triton caches compiled kernels by it."""
        return self.cc

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the only stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the tensors."""
        return torch.device("cpu")


@contextmanager
def recording(cc: int) -> Iterator[list[Compiled]]:
    """Compile and keep the kernels that are launched inside the block.

    Args:
        cc: compute capability x 10.
    """
    before = driver._active  # not .active: it would look for a GPU
    recorder = Recorder(cc)
    driver.set_active(recorder)
    try:
        yield recorder.launched
    finally:
        driver._active = before


def build(cc: int, d: int, tile: int, dtype: torch.dtype = torch.bfloat16) -> dict[Pass, Compiled]:
    """Compile the kernels of every pass, as one training step of causal attention launches them.

    Args:
        cc: compute capability x 10.
        d: head size.
        tile: tile of the lists, 64 or 128.
        dtype: of the inputs.
    """
    from attnbias.backends import triton as adapter

    layout = ab.Layout.build(ab.Causal(), TOKENS, TOKENS, form="tiles", tile=tile)
    q, k, v, grad = (torch.empty(BATCH, HEADS, TOKENS, d, dtype=dtype) for _ in range(4))
    call = Call(Inputs(q, k, v), layout, d**-0.5)
    with recording(cc) as launched:
        out, lse = adapter.forward(call)
        adapter.backward(call, out, lse, grad, None, Needs(True, True, True))
    return {KERNELS[kernel.name]: kernel for kernel in launched if kernel.name in KERNELS}


def measure(cc: int, sizes: Sequence[int], tiles: Sequence[int]) -> Table:
    """Count every loop of every pass, 16-bit.

    Args:
        cc: compute capability x 10.
        sizes: head sizes.
        tiles: tiles of the lists.
    """
    target = Target(cc, tuple(map(int, triton.__version__.split(".")[:2])))
    table: Table = {}
    with as_shipped():
        for d, tile in itertools.product(sizes, tiles):
            for which, kernel in build(cc, d, tile).items():
                config = candidates(target, which, torch.bfloat16, d, d, tile)[0]
                report = analyse(kernel)
                loops = loops_of(report, which, d, config.rows * config.cols)
                for name in LOOPS:
                    table[Key(cc, d, tile, which, name)] = Figures.of(report, loops[name], str(config))
    return table


@contextmanager
def as_shipped() -> Iterator[None]:
    """Ignore configurations that were tuned on this machine."""
    candidates.cache_clear()
    with mock.patch.object(configs, "tuned", dict):
        yield
    candidates.cache_clear()

"""A Triton driver whose device is the emulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Any, ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import _allocation
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver as drivers

from .coverage import Coverage
from .kernel import Kernel, Report
from .memory import Elements, Memory, OutOfBounds
from .races import RaceError
from .tma import TensorMap

# By compute capability: most shared memory of a CTA (bytes), multiprocessors of a typical part.
DEVICES = {
    75: (65536, 40),
    80: (166912, 108),
    86: (101376, 72),
    87: (166912, 16),
    89: (101376, 142),
    90: (232448, 132),
    100: (232448, 148),
    103: (232448, 148),
    110: (232448, 20),
    120: (101376, 170),
    121: (101376, 48),
}
BOUNDS = ("storage", "view", "exact")


@dataclass
class LaunchRecord:
    """One launch of a kernel and its report."""

    kernel: Kernel
    grid: tuple[int, int, int]
    warps: int
    shared: int  # bytes per CTA
    report: Report
    seconds: float

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def macs(self) -> int:
        """Return the multiply-adds of tensor-core instructions."""
        return self.report.counters.macs

    @property
    def bytes(self) -> Counter[str]:
        """Return the bytes moved to or from global memory, by kind of instruction."""
        return self.report.counters.bytes

    @property
    def instructions(self) -> Counter[str]:
        """Return the instructions run, by opcode, counted once per warp."""
        return self.kernel.executed(self.report.counters)

    def __str__(self) -> str:
        return self.kernel.describe(self.report.counters)


class emulated_gpu:
    """Run Triton kernels on CPU tensors, as a device of a given compute capability would.

    Inside the ``with`` block this object is Triton's driver: kernels are specialised, compiled and cached as
    usual, and their PTX is executed in the memory of the tensors. Host code must ask Triton's driver, not
    ``torch.cuda``, for the device.

    Args:
        cc: compute capability x 10, such as 80, 90, 100 or 120.
        late: deliver the bytes of cp.async only when they are waited for.
        racecheck: raise RaceError where two CTAs, or two warps without a barrier between, touch the same
            memory and one writes.
        bounds: memory that a kernel may touch: "storage" (its tensors' whole storages), "view" (from the
            first to the last element of each) or "exact" (only the elements).
        ptxas: False skips ptxas: faster, but nothing checks that it accepts the kernel.
        conflicts: count shared-memory bank conflicts, which is slow.
        batch: CTAs that run at the same time; those that wait for each other must fit in one batch.
        rewrite: changes the PTX before it runs, to test that a fault is found.
        coverage: where to record the blocks that ran.

    Attributes:
        launches: a record of each launch.
    """

    def __init__(
        self,
        cc: int,
        *,
        late: bool = False,
        racecheck: bool = False,
        bounds: str = "storage",
        ptxas: bool = True,
        conflicts: bool = False,
        batch: int | None = None,
        rewrite: Callable[[str], str] | None = None,
        coverage: Coverage | None = None,
    ) -> None:
        if cc not in DEVICES:
            raise ValueError(f"cc: wanted one of {sorted(DEVICES)}, got {cc}")
        if bounds not in BOUNDS:
            raise ValueError(f"bounds: wanted one of {BOUNDS}, got {bounds!r}")
        self.cc, self.bounds, self.ptxas, self.batch = cc, bounds, ptxas, batch
        self.late, self.racecheck, self.conflicts = late, racecheck, conflicts
        self.rewrite, self.coverage = rewrite, coverage
        self.launches: list[LaunchRecord] = []
        self._allowed: list[Any] = []
        self._before: list[tuple[Any, Any]] = []
        self.utils = self  # Triton calls some of the methods below on it

    def __enter__(self) -> emulated_gpu:
        runtime = triton.knobs.runtime
        # Not ``drivers.active``, which would look for a real GPU.
        self._before.append((drivers._active, runtime.add_stages_inspection_hook))
        drivers.set_active(self)
        if not self.ptxas:
            runtime.add_stages_inspection_hook = _without_ptxas
        return self

    def __exit__(self, *error: object) -> None:
        drivers._active, triton.knobs.runtime.add_stages_inspection_hook = self._before.pop()

    def allow(self, *tensors: Any) -> None:
        """Let kernels touch tensors of which they get only the addresses."""
        self._allowed += tensors

    def memory(self) -> Memory:
        memory = Memory()
        for tensor in self._allowed:
            _map(memory, tensor, "storage")
        return memory

    # ---- the interface of a Triton driver

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.cc, 32)

    def get_current_device(self) -> int:
        """Return a number per capability, with ptxas and without: Triton caches compiled kernels by it."""
        return 1000 + 2 * self.cc + self.ptxas

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return divmod(self.cc, 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """Return a stand-in that times nothing, so that @triton.autotune picks its first configuration."""
        count = iter(range(1, 1 << 60))

        def benchmark(
            run: object, *args: object, quantiles: Sequence[float] = (0.5,), **options: object
        ) -> list[float]:
            return [float(next(count))] * len(quantiles)

        return benchmark

    def get_empty_cache_for_benchmark(self) -> None:
        pass

    def clear_cache(self, cache: object) -> None:
        pass

    def allocate_default_profile_scratch(self, size: int, alignment: int, stream: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int8)

    def get_device_properties(self, device: int | None = None) -> dict[str, int]:
        shared, multiprocessors = DEVICES[self.cc]
        sizes = {"max_shared_mem": shared, "multiprocessor_count": multiprocessors}
        clocks = {"sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1}
        return {**sizes, "max_num_regs": 65536, "warpSize": 32, **clocks}

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[object, int, int, int, int]:
        # Module, function, registers, spills, most threads. While the module is None, Triton loads the kernel
        # again, perhaps from a cache that has moved since.
        return name, 0, 0, 0, 1024

    def unload_module(self, module: object) -> None:
        pass

    launcher_cls: ClassVar[type]


def _without_ptxas(
    backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None
) -> tuple[str, str] | None:
    if stages is None:
        return "without ptxas", "without ptxas"  # part of the key of Triton's cache
    stages["cubin"] = lambda source, metadata: b"not assembled"
    return None


@lru_cache(1024)
def _kernel(ptx: str, name: str) -> Kernel:
    return Kernel(ptx, name)


class _Launcher:
    """The function that Triton calls to launch a compiled kernel; it makes one per kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature, self.metadata = tuple(source.signature.values()), metadata
        self.descriptors = getattr(metadata, "tensordesc_meta", None) or []
        files = get_cache_manager(metadata.hash).get_group(f"{source.name[:150]}.json") or {}
        path = next((path for file, path in files.items() if file.endswith(".ptx")), None)
        if path is None:
            raise RuntimeError(f"{metadata.name}: no PTX in Triton's cache; unset TRITON_STORE_BINARY_ONLY")
        with open(path) as file:
            self.ptx = file.read()

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: object,
        packed_metadata: object,
        launch_metadata: object,
        enter_hook: Callable[[object], None] | None,
        exit_hook: Callable[[object], None] | None,
        *args: Any,
    ) -> None:
        gpu, metadata = drivers.active, self.metadata
        if not isinstance(gpu, emulated_gpu) or gpu.cc != metadata.target.arch:
            needs = f"emulated_gpu({metadata.target.arch})"
            raise RuntimeError(f"{metadata.name} was compiled for {needs}, but launched outside it")
        if getattr(metadata, "num_ctas", 1) != 1:
            raise NotImplementedError("num_ctas: clusters of CTAs (num_ctas > 1) are not supported")
        if enter_hook is not None:
            enter_hook(launch_metadata)
        kernel = _kernel(gpu.rewrite(self.ptx) if gpu.rewrite else self.ptx, metadata.name)
        memory = gpu.memory()
        arguments = list(self._arguments(gpu, memory, args))
        arguments += [self._scratch(gpu, memory, kind, x * y * z, stream) for kind in ("global", "profile")]
        started = perf_counter()
        batch = x * y * z if metadata.launch_cooperative_grid else gpu.batch
        try:
            report = kernel.launch(
                (x, y, z),
                arguments,
                memory,
                shared=metadata.shared,
                batch=batch,
                late=gpu.late,
                racecheck=gpu.racecheck,
                conflicts=gpu.conflicts,
            )
        except OutOfBounds as error:
            raise OutOfBounds(f"{metadata.name}: {error}") from error
        seconds, warps = perf_counter() - started, kernel.function.threads // 32
        gpu.launches.append(LaunchRecord(kernel, (x, y, z), warps, metadata.shared, report, seconds))
        if gpu.coverage is not None:
            name = f"sm_{gpu.cc} {metadata.name}"
            gpu.coverage.add(f"{name} {metadata.hash}", name, kernel, report.counters.blocks)
        if report.races:
            found = "; ".join(f"{words} ({count} words)" for words, count in report.races.items())
            raise RaceError(f"{metadata.name}: {found}")
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _scratch(self, gpu: emulated_gpu, memory: Memory, kind: str, ctas: int, stream: int) -> int:
        """Return scratch memory from Triton's allocators; without one, raise as on a GPU."""
        size = getattr(self.metadata, f"{kind}_scratch_size", 0) or 0
        if not size or not ctas:
            return 0
        allocate = {"global": _allocation._allocator, "profile": _allocation._profile_allocator}[kind].get()
        if kind == "profile" and isinstance(allocate, _allocation.NullAllocator):
            allocate = gpu.allocate_default_profile_scratch
        buffer = allocate(size * ctas, getattr(self.metadata, f"{kind}_scratch_align"), stream)
        _map(memory, buffer, "storage")
        return int(buffer.data_ptr())

    def _arguments(self, gpu: emulated_gpu, memory: Memory, args: Sequence[Any]) -> Iterator[Any]:
        """Yield the PTX parameters of the arguments, and map their memory."""
        descriptors = iter(self.descriptors)
        for kind, argument in zip(self.signature, args, strict=False):
            yield from self._flatten(kind, argument, descriptors, gpu, memory)

    def _flatten(
        self, kind: Any, argument: Any, descriptors: Iterator[Any], gpu: emulated_gpu, memory: Memory
    ) -> Iterator[Any]:
        if isinstance(kind, tuple | list):
            for k, a in zip(kind, argument, strict=True):
                yield from self._flatten(k, a, descriptors, gpu, memory)
        elif kind == "constexpr":
            return
        elif kind.startswith("tensordesc"):
            _map(memory, argument.base, gpu.bounds)
            yield from _descriptor(argument, next(descriptors, None))
        elif kind[0] == "*":
            if hasattr(argument, "data_ptr"):
                _map(memory, argument, gpu.bounds)
                yield argument.data_ptr()
            else:
                yield int(argument or 0)
        elif kind in ("fp16", "bf16"):  # passed as bits
            dtype = torch.float16 if kind == "fp16" else torch.bfloat16
            yield int(torch.tensor(argument, dtype=dtype).view(torch.int16)) & 0xFFFF
        else:
            yield float(argument) if kind[0] == "f" else int(argument)


emulated_gpu.launcher_cls = _Launcher


def _descriptor(tensor: Any, meta: Any) -> Iterator[Any]:
    """Yield the parameters of a TensorDescriptor, as the compiled kernel takes them."""
    sizes = [*tensor.shape, *tensor.strides]
    nan = tensor.padding == "nan"
    if meta is None:  # no TMA on this target: plain numbers
        rounding = [tensor.round_f32_to_tf32] if hasattr(tensor, "round_f32_to_tf32") else []  # since 3.7
        yield from [tensor.base.data_ptr(), *sizes, nan, *rounding, *sizes]
        return
    if meta.get("is_im2col") or meta["fp4_padded"]:
        raise NotImplementedError("im2col and fp4 tensor descriptors are not supported")
    yield TensorMap(
        tensor.base.data_ptr(),
        tuple(tensor.shape),
        tuple(tensor.strides),
        tuple(meta["block_size"]),
        meta["elem_size"],
        meta["swizzle"],
        nan,
        tensor.base.dtype == torch.float32,
    )
    yield from sizes


def _map(memory: Memory, tensor: Any, bounds: str) -> None:
    if not hasattr(tensor, "untyped_storage"):  # triton.reinterpret wraps its tensor
        tensor = tensor.base
    if tensor.device.type != "cpu":
        raise ValueError(f"emulated_gpu: wanted CPU tensors, got one on {tensor.device}")
    if bounds == "storage":
        storage = tensor.untyped_storage()
        memory.map(storage.data_ptr(), storage.nbytes(), storage)
    elif tensor.numel():
        item, steps = tensor.element_size(), tensor.stride()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, steps, strict=True))
        strides = tuple(step * item for step in steps)
        elements = Elements(tuple(tensor.shape), strides, item) if bounds == "exact" else None
        memory.map(tensor.data_ptr(), (last + 1) * item, tensor, elements)

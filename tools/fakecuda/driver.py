"""Triton's own CUDA driver and launcher, on a libcuda that runs nothing."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver as drivers

# By compute capability: most shared memory of a CTA (bytes), multiprocessors of a typical part.
DEVICES = {
    80: (166912, 108),
    86: (101376, 72),
    89: (101376, 142),
    90: (232448, 132),
    100: (232448, 148),
    120: (101376, 170),
}
_COMPILERS = ("cc", "gcc", "clang")
_MOST, _BYTES, _KEPT = 96, 128, 64  # as in libcuda.c
_PTX_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
# Bytes of what the launcher packs, by the numbers of its extractors (driver.c of Triton 3.7 and later).
_PACKED = {1: 8, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 2, 12: 4, 13: 8, 14: 128}


class Launch(NamedTuple):
    """One launch, as the driver was given it."""

    name: str
    kernel: int  # number of the loaded kernel: two of one name are compiled differently
    grid: tuple[int, int, int]
    threads: int
    shared: int  # bytes
    stream: int
    values: list[bytes]  # of each parameter

    def numbers(self) -> list[int]:
        """Return the parameters as unsigned numbers; of a TMA descriptor the address."""
        return [int.from_bytes(value[:8], "little") for value in self.values]


class _Function(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 512), ("count", ctypes.c_int), ("sizes", ctypes.c_int * _MOST))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_ulonglong),
        ("values", (ctypes.c_ubyte * _BYTES) * _MOST),
    )


def why_not() -> str:
    """Say why the fake cannot be used here; "" if it can."""
    if torch.cuda.is_available():
        return "a real libcuda is in this process"
    if not any(map(shutil.which, _COMPILERS)):
        return "no C compiler"
    return ""


@functools.cache
def _library() -> tuple[ctypes.CDLL, Path]:
    """Build and load the fake; return it and its folder, which lives as long as the process."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)))
    folder = Path(tempfile.mkdtemp(prefix="fakecuda"))
    command = [compiler, "-shared", "-fPIC", "-O1", f"-I{nvidia.include_dirs[0]}"]
    command += ["-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", str(Path(__file__).with_name("libcuda.c"))]
    subprocess.run(command, cwd=folder, check=True)
    # Triton's launcher asks for libcuda.so.1, and gets the one of that name that is loaded.
    return ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL), folder


class fake_gpu:
    """Launch Triton kernels on CPU tensors through Triton's real CUDA launcher; nothing is executed.

    Inside the ``with`` block this object is Triton's driver. Kernels are compiled, cached and bound as
    on a GPU, and the driver's functions check what they are given: grids, threads, shared memory, the sizes
    of parameters, the limits of TMA descriptors. So the host's work can be timed, and launches counted.

    Args:
        cc: compute capability x 10.
        number: of the device, to have several.
        ptxas: assemble the kernels; without it they compile faster, and nothing here needs them.

    Example:
        >>> with fake_gpu(80) as gpu:  # doctest: +SKIP
        ...     kernel[grid](x, y, n)
        >>> gpu.launches[-1].grid  # doctest: +SKIP
        (4, 1, 1)
    """

    def __init__(self, cc: int, number: int = 0, *, ptxas: bool = False) -> None:
        if cc not in DEVICES:
            raise ValueError(f"cc: wanted one of {sorted(DEVICES)}, got {cc}")
        if reason := why_not():
            raise RuntimeError(f"fake_gpu: {reason}")
        self.cc, self.number, self.ptxas, self.stream = cc, number, ptxas, 0
        self._library, folder = _library()
        self._counts = {
            name: ctypes.c_ulonglong.in_dll(self._library, f"fake_{name}")
            for name in ("launches", "descriptors", "loads")
        }
        self._from: dict[str, int] = {}
        self._before: list[tuple[Any, Any]] = []
        with triton.knobs.nvidia.scope():
            triton.knobs.nvidia.libcuda_path = str(folder)
            self.utils = nvidia.CudaUtils()
        self.launcher_cls = _Launcher

    def __enter__(self) -> fake_gpu:
        shared, multiprocessors = DEVICES[self.cc]
        ctypes.c_int.in_dll(self._library, "fake_shared").value = shared
        ctypes.c_int.in_dll(self._library, "fake_multiprocessors").value = multiprocessors
        runtime = triton.knobs.runtime
        # Not ``drivers.active``, which would look for a real GPU.
        self._before.append((drivers._active, runtime.add_stages_inspection_hook))
        drivers.set_active(self)
        if not self.ptxas:
            runtime.add_stages_inspection_hook = _without_ptxas
        self.reset()
        return self

    def __exit__(self, *error: object) -> None:
        drivers._active, triton.knobs.runtime.add_stages_inspection_hook = self._before.pop()

    def reset(self) -> None:
        """Count from here on."""
        self._from = {name: count.value for name, count in self._counts.items()}

    def count(self, what: str = "launches") -> int:
        """Return how many "launches", "descriptors" or "loads" of kernels there were since ``reset``."""
        return self._counts[what].value - self._from[what]

    @property
    def launches(self) -> list[Launch]:
        """The launches since ``reset``, at most the last 64."""
        functions = (_Function * 1024).in_dll(self._library, "fake_functions")
        kept = (_Launch * _KEPT).in_dll(self._library, "fake_kept")
        stop = self._counts["launches"].value
        found = []
        for i in range(max(self._from["launches"], stop - _KEPT), stop):
            launch = kept[i % _KEPT]
            function = functions[launch.function]
            values = [bytes(launch.values[n])[: function.sizes[n]] for n in range(function.count)]
            numbers = launch.threads, launch.shared, launch.stream
            grid = launch.grid[0], launch.grid[1], launch.grid[2]
            found.append(Launch(function.name.decode(), launch.function, grid, *numbers, values))
        return found

    def declare(self, name: str, sizes: list[int]) -> None:
        """Say what the parameters of the next kernel that is loaded by this name are."""
        if self._library.fake_declare(name.encode(), len(sizes), (ctypes.c_int * len(sizes))(*sizes)) < 0:
            raise RuntimeError(f"{name}: the fake libcuda has no room for it, {len(sizes)} parameters")

    # ---- the interface of a Triton driver

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.cc, 32)

    def get_current_device(self) -> int:
        """Return a number per capability, with ptxas and without: Triton caches compiled kernels by it."""
        return 10000 + 100 * self.number + self.cc + 10000 * self.ptxas

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return self.stream

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return divmod(self.cc, 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, kind: str) -> Any:
        return nvidia.ty_to_cpp(kind)


def _without_ptxas(
    backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None
) -> tuple[str, str] | None:
    if stages is None:
        return "without ptxas", "without ptxas"  # part of the key of Triton's cache
    stages["cubin"] = lambda source, metadata: b"not assembled"
    return None


class _Launcher(nvidia.CudaLauncher):  # type: ignore[misc]  # Triton has no types
    """Triton's launcher, after a comparison of what it packs with what the kernel's PTX declares."""

    def __init__(self, source: Any, metadata: Any) -> None:
        super().__init__(source, metadata)
        files = get_cache_manager(metadata.hash).get_group(f"{source.name[:150]}.json") or {}
        path = next(path for file, path in files.items() if file.endswith(".ptx"))
        declared = _parameter_sizes(Path(path).read_text())
        # Triton 3.6 writes a launcher in C for each kernel, whose compiler checks the types.
        if hasattr(self, "kernel_signature"):
            packed = [_PACKED[number] for number in self.kernel_signature] + [8, 8]  # and two scratch buffers
            if packed != declared:
                raise RuntimeError(f"{metadata.name}: the launcher packs {packed}, the PTX has {declared}")
        drivers.active.declare(metadata.name, declared)


def _parameter_sizes(ptx: str) -> list[int]:
    """Return the bytes of each parameter of the entry."""
    entry = ptx[ptx.index(".entry") :]
    head = entry[: entry.index(")") + 1]
    found = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s[^,)]*?(?:\[(\d+)\])?\s*[,\n)]", head)
    return [int(count) if count else _PTX_BYTES[bits] for bits, count in found]

"""An emulator of NVIDIA GPUs for compiled kernels: executes PTX with numpy, on the CPU.

A Triton program runs on it unchanged, through the compiler's ordinary path, on CPU tensors::

    with emulated_gpu(cc=90, racecheck=True) as gpu:
        kernel[grid](x, y, n)
    gpu.launches[-1].macs

It executes the PTX that a GPU's driver would assemble, checks every access for bounds and alignment, reports
missing barriers, missing waits and races, and counts blocks, bytes and multiply-adds. README.md describes
each module, what is checked, what is not, and how to add an instruction.
"""

from .converge import AbsentLanes
from .coverage import Coverage
from .decode import Unsupported
from .driver import LaunchRecord, emulated_gpu
from .kernel import Kernel, Report
from .memory import Memory, OutOfBounds
from .races import RaceError
from .schedule import Deadlock
from .tma import TensorMap

__all__ = [
    "AbsentLanes",
    "Coverage",
    "Deadlock",
    "Kernel",
    "LaunchRecord",
    "Memory",
    "OutOfBounds",
    "RaceError",
    "Report",
    "TensorMap",
    "Unsupported",
    "emulated_gpu",
]

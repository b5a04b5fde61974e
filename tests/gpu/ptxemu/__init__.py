"""An emulator of NVIDIA GPUs for compiled kernels: executes PTX with numpy, on the CPU.

A Triton program runs on it unchanged, through the compiler's ordinary path, on CPU tensors::

    with emulated_gpu(cc=90, racecheck=True) as gpu:
        kernel[grid](x, y, n)
    gpu.launches[-1].macs

What is executed is the very PTX that a GPU's driver would assemble: tensor-core instructions (mma.sync,
wgmma, tcgen05), asynchronous copies (cp.async, TMA), barriers, warp specialisation. Every access is checked
for bounds and alignment; missing barriers and waits, and races between CTAs are reported; blocks, bytes and
multiply-adds are counted.

Where to find things: ``parse`` reads the text; ``decode`` turns instructions into steps, with one module
for each family (``arithmetic``, ``convert``, ``access``, ``atomics``, ``warp``, ``mma``, ``cp_async``,
``wgmma``, ``mbarrier``, ``tma``, ``tcgen05``); ``kernel`` makes blocks of them; ``schedule`` runs the blocks
on the groups of CTAs in ``state``; ``memory`` and ``races`` watch what they touch; ``driver`` is what Triton
sees.

Limits. **Nothing has been compared with a real GPU**: this follows the PTX manual as its authors read it.
**ptxas is not covered**: it makes machine code of the PTX, and nothing here looks at that, nor at time. Sums
of tensor-core products are rounded as numpy rounds float32 products, approximate functions (ex2.approx, ...)
as numpy's exact ones. An asynchronous copy or product takes effect when it is issued (a cp.async at its wait,
with ``late``). No clusters of CTAs, no device functions, no float64 products, no fp4. Races in tensor memory,
between lanes of one warp, or through global memory within a CTA are not looked for; nor are missing proxy
fences.
"""

from .coverage import Coverage
from .decode import Unsupported
from .driver import LaunchRecord, emulated_gpu
from .kernel import Kernel, Report
from .memory import Memory, OutOfBounds
from .races import RaceError
from .schedule import Deadlock
from .tma import TensorMap

__all__ = [
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

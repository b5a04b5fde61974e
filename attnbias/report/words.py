"""What is missing for a run on a GPU, in one sentence that says what to do."""

from __future__ import annotations

import torch

from ..kernels.launch.config import OLDEST, OLDEST_TRITON

MINIMUM = ".".join(map(str, OLDEST_TRITON))


def why_no_gpu(device: torch.device) -> str:
    """Say why kernels cannot run on a CUDA device; "" if they can.

    Looks at torch's build, the driver, the card and Triton, in this order, and at the first that is missing.
    """
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA; install a CUDA build, as pytorch.org describes"
        )
    try:
        count = torch.cuda.device_count()
        if count:
            torch.cuda.init()
    except Exception as error:  # torch raises RuntimeError or AssertionError, by version
        return _driver_words(str(error))
    if not count:
        return "no NVIDIA GPU or driver was found; if there is a GPU, check that nvidia-smi lists it"
    index = device.index or 0
    if index >= count:
        return f"{device} is not there; torch sees {count} CUDA device{'s' if count > 1 else ''}"
    major, minor = torch.cuda.get_device_capability(index)
    if 10 * major + minor < OLDEST:
        wanted = f"{OLDEST // 10}.{OLDEST % 10}"
        return f"the GPU has compute capability {major}.{minor}; the kernels need {wanted} (A100) or newer"
    return why_no_triton()


def _driver_words(error: str) -> str:
    first = error.strip().splitlines()[0] if error.strip() else "no reason given"
    if "driver" in error.lower() and "old" in error.lower():
        cuda = torch.version.cuda
        return f"the NVIDIA driver is too old for CUDA {cuda}; update it, or install a torch that fits it"
    return f"CUDA does not start ({first}); check that nvidia-smi lists the GPU"


def why_no_triton() -> str:
    """Say why Triton cannot compile the kernels; "" if it can."""
    try:
        import triton
    except ImportError:
        return f"triton is not installed; run: pip install 'triton>={MINIMUM}'"
    found = tuple(int(x) for x in triton.__version__.split(".")[:2])
    if found < OLDEST_TRITON:
        return (
            f"triton {triton.__version__} is too old; the kernels need {MINIMUM}, which torch 2.10 comes with"
        )
    return ""

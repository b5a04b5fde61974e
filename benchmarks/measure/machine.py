"""The machine, without its name: GPU, driver, versions, clocks, and which backend a default call takes.

``attnbias bench`` and ``attnbias report`` record the same.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from attnbias import __version__, relations
from attnbias.kernels.launch.config import VARIABLE, tuned
from attnbias.op.explain import explain

from .clocks import clocks, modes

PACKAGES = (
    *("numpy", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend"),
    *("flash-attn", "flash-attn-3", "flash-attn-4", "xformers", "natten", "flashinfer-python"),
    *("torch-geometric", "transformers"),
)
VARIABLES = (VARIABLE, "ATTNBIAS_BACKEND", "CUDA_LAUNCH_BLOCKING", "TRITON_INTERPRET", "NVIDIA_TF32_OVERRIDE")


def describe(device: torch.device) -> dict[str, Any]:
    """Describe the machine; what cannot be found is left out."""
    found: dict[str, Any] = {
        "device": model(device),
        "kind": device.type,
        "system": platform.system(),
        "architecture": platform.machine(),
        "is_wsl": "microsoft" in platform.release().lower(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "attnbias": __version__,
        "torch": torch.__version__,
        "torch_git": getattr(torch.version, "git_version", None),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "packages": versions(),
        "ptxas": ptxas_version(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "tuned": {name: str(config) for name, config in tuned().items()},
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }
    if device.type == "cuda" and torch.cuda.is_available():
        found |= _gpu(device)
    found["defaults"] = {
        str(x): _default(x, device) for x in (relations.Causal(), relations.Window(before=99))
    }
    return found


def model(device: torch.device) -> str:
    """Return the name of the GPU or processor, never that of the host."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device)) if torch.cuda.is_available() else "no GPU"
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    names = {
        "multiprocessors": "multi_processor_count",
        "memory": "total_memory",
        "l2": "L2_cache_size",
        "shared_per_block": "shared_memory_per_block_optin",
        "shared_per_multiprocessor": "shared_memory_per_multiprocessor",
        "registers": "regs_per_multiprocessor",
    }
    found: dict[str, Any] = {name: getattr(properties, field, None) for name, field in names.items()}
    found["capability"] = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    found["devices"] = torch.cuda.device_count()
    found["modes"] = modes(device)
    found["clocks"] = clocks(device)
    return found


def versions() -> dict[str, str]:
    """Return the versions of the packages that are there."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def ptxas_version() -> str | None:
    """Return the version of the assembler that Triton uses; None without Triton."""
    try:
        import triton

        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        done = subprocess.run(
            [str(tool), "--version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (ImportError, OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\S+?),", done.stdout)
    return found[1] if found else None


def _default(relation: relations.Relation, device: torch.device) -> dict[str, Any]:
    """Say which backend a call without a named one takes, and why not the others."""
    try:
        x = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16, device=device)
        found = explain(x, x, x, relation)
    except Exception as error:  # the versions above are still worth having
        return {"error": f"{type(error).__name__}: {error}"}
    return {"backend": found.backend, "why": found.why, "others": found.others}

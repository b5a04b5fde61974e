"""The machine, without its name: GPU, driver, versions, clocks, and which backend a default call takes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import __version__, relations
from ..kernels.launch.config import VARIABLE, tuned
from ..op.explain import explain
from .runner import Outcome, Run, Step

PACKAGES = (
    *("numpy", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend"),
    *("flash-attn", "flash-attn-3", "flash-attn-4", "xformers", "natten", "flashinfer-python"),
    *("torch-geometric", "transformers"),
)
VARIABLES = (VARIABLE, "ATTNBIAS_BACKEND", "CUDA_LAUNCH_BLOCKING", "TRITON_INTERPRET", "NVIDIA_TF32_OVERRIDE")
_ASKED = (  # of nvidia-smi
    *("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit"),
    *("temperature.gpu", "ecc.mode.current", "mig.mode.current", "clocks_throttle_reasons.active"),
)


def steps(run: Run) -> Iterator[Step]:
    """Yield the one step."""

    def look() -> Outcome:
        found = describe(run.device)
        return Outcome(data=found, words=title(found))

    yield Step("machine: versions and clocks", look)


def describe(device: torch.device) -> dict[str, Any]:
    """Describe the machine; what cannot be found is left out."""
    found: dict[str, Any] = {
        "device": model(device),
        "kind": device.type,
        "system": platform.system(),
        "processor": platform.machine(),
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


def title(found: dict[str, Any]) -> str:
    """Put the most telling parts in a line."""
    parts = [found["device"]]
    if "capability" in found:
        parts.append(f"{found['capability']}, {found['multiprocessors']} SMs, {found['memory'] >> 30} GiB")
        parts.append(f"driver {found['clocks'].get('driver_version', 'unknown')}")
    parts.append(f"torch {found['torch']}")
    parts.append(f"triton {found['packages'].get('triton', 'not installed')}")
    return ", ".join(map(str, parts))


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
    found["clocks"] = clocks(device)
    return found


def clocks(device: torch.device) -> dict[str, str]:
    """Ask nvidia-smi for clocks, power, temperature and modes; empty if it does not answer."""
    command = shutil.which("nvidia-smi")
    if device.type != "cuda" or command is None:
        return {}
    given = [command, f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        done = subprocess.run(given, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_ASKED, (x.strip() for x in done.stdout.strip().split(",")), strict=False))


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


def file_name(device: torch.device) -> str:
    """Name the file after the GPU or processor.

    Example:
        >>> file_name(torch.device("cpu")).endswith(".json.gz")
        True
    """
    words = re.sub(r"[^A-Za-z0-9]+", "-", model(device)).strip("-").lower() or sys.platform
    return f"{words}.json.gz"

"""``attnbias info``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .. import __version__
from ..backends import cpu
from ..testing import checklist

OPTIONAL = {
    "triton": "the backend for GPUs",
    "nvidia-cudnn-frontend": "backend cudnn, NVIDIA's kernels for Hopper and Blackwell",
    "matplotlib": "plots, show --png",
    "igraph": "theory: symmetry groups",
    "rich": "tables and progress bars of bench",
    "safetensors": "Layout.save and load",
    "scipy": "node orders; a peer in bench",
    "torch_geometric": "integrations.pyg; a peer in bench",
    "transformers": "integrations.huggingface",
}


def info(given: argparse.Namespace) -> int:
    """Print versions, devices, and what each backend needs."""
    found = _find()
    if given.json:
        print(json.dumps(found))
        return 0
    host = found["cpu"]
    print(f"attnbias {found['attnbias']}, torch {found['torch']}, Python {found['python']}")
    print(f"cpu: {host['machine']}, {host['cores']} cores, {host['threads']} threads")
    print(f"     torch at {host['torch']}; {host['kernels']}")
    for name, device in found["devices"].items():
        if name != "cpu":
            print(f"{name}: {device['name']}, {device['sm']}, {device['gib']} GiB")
    for name, device in found["devices"].items():
        for backend, why in device["backends"].items():
            print(f"{name} {backend}: {why or 'can run'}")
    for package, number in found["packages"].items():
        print(f"{package} {number or 'is not installed'}: {OPTIONAL[package]}")
    return 0


def _find() -> dict[str, Any]:
    devices: dict[str, dict[str, Any]] = {"cpu": {}}
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        devices[f"cuda:{number}"] = {
            "name": torch.cuda.get_device_name(number),
            "sm": f"sm_{major}{minor}",
            "gib": torch.cuda.get_device_properties(number).total_memory >> 30,
        }
    for name, device in devices.items():
        device["backends"] = checklist.backends_of(name)
    return {
        "attnbias": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cpu": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.backends.cpu.get_cpu_capability(),
            "kernels": cpu.missing() or f"kernels at {cpu.isa()} (of {', '.join(cpu.isas())})",
        },
        "devices": devices,
        "packages": {package: _version(package) for package in OPTIONAL},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""Why a peer cannot run a case: no package, no GPU, an old one, another dtype."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from ..cases.tokens import Case


class CannotRunError(Exception):
    """A peer cannot compute a case."""


def is_on_gpu(case: Case) -> bool:
    """Return whether the case's tensors are CUDA tensors."""
    return case.device.startswith("cuda")


def capability(case: Case) -> tuple[int, int]:
    """Return the compute capability of the case's GPU."""
    return torch.cuda.get_device_capability(case.device)


def check_device(case: Case, *, least: int = 80, below: int = 1000) -> None:
    """Refuse a case that is not in half precision on a GPU whose sm is in [least, below).

    Raises:
        CannotRunError: with the reason.
    """
    if not is_on_gpu(case):
        raise CannotRunError("runs only on CUDA devices")
    if case.dtype == torch.float32:
        raise CannotRunError("takes only half precision")
    major, minor = capability(case)
    if not least <= 10 * major + minor < below:
        wanted = f"sm_{least} or newer" if below == 1000 else f"sm_{least} to sm_{below - 1}"
        raise CannotRunError(f"runs only on {wanted}, this is sm_{major}{minor}")


def load(case: Case, package: str, *, least: int = 80, below: int = 1000) -> Any:
    """Import a package that has kernels for GPUs whose sm is in [least, below).

    Raises:
        CannotRunError: if it is not there, or has no kernel for the case's device and dtype.
    """
    try:
        found = import_module(package)
    except ImportError:
        raise CannotRunError("is not installed") from None
    check_device(case, least=least, below=below)
    return found

"""Checks of arguments that all of the package may use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_flag(name: str, value: Any) -> bool:
    """Return Python's True or False; raise TypeError for anything else, for even 'no' counts as true."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: wanted True or False, got {value!r}")


def check_dense(name: str, x: object) -> None:
    """Raise TypeError unless it is a tensor, neither sparse nor nested."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(x).__name__} {x!r}")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name}: wanted a dense tensor, got {'a nested one' if x.is_nested else x.layout}")


def as_indices(name: str, value: Any, ranks: Sequence[int]) -> Tensor:
    """Return a private int64 copy of integers in a tensor, an array, nested lists or a list of tensors."""
    tensor = _as_tensor(name, value)
    if tensor.numel() == 0 and not isinstance(value, Tensor | np.ndarray):
        tensor = tensor.long()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name}: wanted integers, got {tensor.dtype}")
    if tensor.dim() not in ranks:
        wanted = " or ".join(str(rank) for rank in ranks)
        raise ValueError(f"{name}: wanted {wanted} dimensions, got shape {list(tensor.shape)}")
    with torch.inference_mode(False):  # what is kept is used in training, too
        return tensor.detach().to(torch.int64, copy=True)


def _as_tensor(name: str, value: Any) -> Tensor:
    several = isinstance(value, list | tuple) and len(value) and all(isinstance(x, Tensor) for x in value)
    try:
        if several:  # such as sources and targets
            return torch.stack(list(value))
        # Copied, for torch takes no negative strides; on the host, whatever torch's default device is.
        array = np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(array, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        wanted = "integers in a tensor, an array or lists of equal length"
        raise TypeError(f"{name}: wanted {wanted}, got {type(value).__name__}") from None
    check_dense(name, tensor)
    return tensor


def as_count(name: str, value: Any, least: int = 0) -> int:
    """Return a Python integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: wanted an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: wanted at least {least}, got {value}")
    if value >= 1 << 31:
        raise ValueError(f"{name}: wanted less than 2^31, got {value}")
    return int(value)


def device_of(name: str | None) -> str:
    """Return the name of a device that is there; without a name, a GPU if torch sees one.

    Raises:
        ValueError: if torch does not know or see the device.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: wanted cpu, cuda or cuda:1, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: wanted cpu or cuda, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device: {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return name

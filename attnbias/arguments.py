"""Checks of arguments that all of the package may use."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOST_SHOWN = 80  # characters of a wrong argument


def as_flag(name: str, value: Any) -> bool:
    """Return Python's True or False; raise TypeError for anything else, for even 'no' counts as true."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: wanted True or False, got {value!r}")


def check_dense(name: str, x: object) -> None:
    """Raise TypeError unless it is a tensor, neither sparse nor nested."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {words_of(x)}")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name}: wanted a dense tensor, got {'a nested one' if x.is_nested else x.layout}")


def words_of(x: object) -> str:
    """Name what was given, in one line.

    Example:
        >>> words_of([1, 2])
        'list [1, 2]'
        >>> words_of(np.zeros((4, 8)))
        'a NumPy array [4, 8]; torch.from_numpy makes a tensor of it'
    """
    if isinstance(x, Tensor):
        return f"a tensor {'of nested ones' if x.is_nested else list(x.shape)}"
    if isinstance(x, np.ndarray):
        return f"a NumPy array {list(x.shape)}; torch.from_numpy makes a tensor of it"
    text = " ".join(repr(x).split())
    return f"{type(x).__name__} {text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}...'}"


def warn_caller(text: str) -> None:
    """Warn at the line that called the library."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals["__name__"].partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(text, stacklevel=level)


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a mistyped one is most like, or None.

    Example:
        >>> closest("causal", ["Window", "Causal"])
        'Causal'
    """
    from difflib import get_close_matches

    names = {each.lower(): each for each in known}
    return next((names[each] for each in get_close_matches(name.lower(), names, 1)), None)


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

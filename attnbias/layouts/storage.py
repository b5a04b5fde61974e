"""Layouts in safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from .header import VERSION
from .record import Record
from .validate import validate


def save(layout: Record, path: str | Path) -> None:
    """Write the two tensors of a layout to a safetensors file."""
    _safetensors().save_file(
        {"buffer": layout.buffer.cpu().contiguous(), "where": layout.where.contiguous()},
        str(path),
        metadata={"format": "attnbias.Layout", "version": str(VERSION)},
    )


def load(path: str | Path) -> tuple[Tensor, Tensor]:
    """Read and check the two tensors of a layout; raise ValueError when the file does not hold one."""
    safetensors = _safetensors()
    if not Path(path).is_file():
        raise FileNotFoundError(f"path: no such file: {path}")
    try:
        tensors = safetensors.load_file(str(path))
    except Exception as error:  # the reader's errors have no common class of their own
        raise ValueError(f"path: {path} is not a safetensors file: {error}") from None
    if set(tensors) != {"buffer", "where"}:
        raise ValueError(f"path: {path} holds {sorted(tensors)}, a layout holds buffer and where")
    try:
        validate(Record(tensors["buffer"], tensors["where"]))
    except ValueError as error:
        raise ValueError(f"path: {path} is damaged: {error}") from None
    return tensors["buffer"], tensors["where"]


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("saving layouts needs safetensors: pip install 'attnbias[save]'") from None
    return safetensors.torch

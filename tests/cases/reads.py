"""Counting what the host reads from tensors, to show on a CPU that nothing would wait for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

SIZED = {"aten::nonzero", "aten::_unique2", "aten::unique_dim", "aten::repeat_interleave"}


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors, sizes of results included; each read waits."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0  # read one by one
        self.lists = 0  # read at once

    def __enter__(self) -> Self:
        self.tolist = Tensor.tolist

        def count(tensor: Tensor) -> Any:
            self.lists += 1
            return self.tolist(tensor)

        Tensor.tolist = count  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        Tensor.tolist = self.tolist  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        masks = args[1] if name in ("aten::index", "aten::index_put_") else ()
        is_masked = any(x is not None and x.dtype == torch.bool for x in masks)
        self.numbers += name in SIZED or name == "aten::_local_scalar_dense" or is_masked
        return func(*args, **(kwargs or {}))


def refuse_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every copy of a tensor to the host an error."""

    def refuse(*_: object) -> Any:
        raise AssertionError("a tensor went to the host")

    for name in ("cpu", "numpy", "__array__"):
        monkeypatch.setattr(Tensor, name, refuse)

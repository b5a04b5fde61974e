"""Layouts that did not fit their capacity, or were made of bad data: told without waiting for a device.

A device that lays out with a capacity keeps what went wrong in a few numbers and sends them to the host,
which looks at what has arrived before it goes on. A CUDA graph that is replayed sends them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .outline import Fault
    from .outlined import Capacity


class _Message(NamedTuple):
    """Numbers: tiles and partial tiles wanted, tiles and partial tiles that fit, and a fault; 0 = nothing."""

    there: Tensor  # int64 [5], on the device
    here: Tensor  # int64 [5], on the host


_messages: dict[torch.device, _Message] = {}
_faults: list[str] = []  # texts, by number; the first is 1


def report(wanted: Tensor, capacity: Capacity, faults: Sequence[Fault]) -> None:
    """Tell the host if more tiles are wanted [2] than fit, or a fault is there.

    Raises:
        ValueError: at once where the numbers are on the host; else :func:`raise_overflow` raises later.
    """
    message = _message_of(wanted.device)
    fits = torch.stack([torch.full_like(wanted[0], room) for room in capacity])
    number = torch.zeros_like(wanted[0])
    for fault in faults:
        if fault.text not in _faults:
            _faults.append(fault.text)
        number = torch.where(fault.is_there, _faults.index(fault.text) + 1, number)
    is_wrong = (wanted > fits).any() | (number > 0)
    news = torch.cat((wanted, fits, number.reshape(1)))
    message.there.copy_(torch.where(is_wrong, news, message.there))
    message.here.copy_(message.there, non_blocking=True)
    if arrives_at_once(wanted.device):
        raise_overflow()


def arrives_at_once(device: torch.device) -> bool:
    """Return whether the host has a device's numbers without waiting for them."""
    return device.type == "cpu"


def _message_of(device: torch.device) -> _Message:
    if device not in _messages:
        is_cuda = device.type == "cuda"
        if is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "capacity: wanted a layout with a capacity made on this device before a CUDA graph is "
                "captured, got none"
            )
        there = torch.zeros(5, dtype=torch.int64, device=device)
        here = torch.zeros(5, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        _messages[device] = _Message(there, here)
    return _messages[device]


def raise_overflow() -> None:
    """Raise ValueError, once, if a layout did not fit or was made of bad data; nothing is waited for."""
    for message in _messages.values():
        tiles, partial, most_tiles, most_partial, fault = message.here.tolist()
        if not (tiles or fault):
            continue
        message.there.zero_()
        message.here.zero_()
        if fault:
            raise ValueError(_faults[fault - 1])
        raise ValueError(
            f"capacity: wanted room for {tiles} tiles, {partial} of them partial, got {most_tiles} and "
            f"{most_partial}; the layout was left empty"
        )

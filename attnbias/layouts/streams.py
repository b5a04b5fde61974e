"""Keep a GPU's tensors safe for streams and CUDA graphs other than those that made them.

A stream does not wait for another one, and a graph holds addresses, not tensors. So whoever takes a tensor
from a cache waits for the stream that made it. What a graph is captured with is held for good: a cache would
drop it, and the graph would read what is there next.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_held: dict[int, Tensor] = {}  # by address in Python


class Made(NamedTuple):
    """Where and when a tensor was made."""

    stream: torch.cuda.Stream
    done: torch.cuda.Event


def note_making(device: torch.device) -> Made | None:
    """Note that a tensor was made just now; None where there are no streams."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    return Made(stream, stream.record_event())


def take(kept: Tensor, made: Made | None) -> None:
    """Make a tensor from a cache safe for what the current stream is given next."""
    if made is None:
        return
    if torch.cuda.is_current_stream_capturing():
        _held[id(kept)] = kept  # whoever captures has waited for all streams
        return
    stream = torch.cuda.current_stream(kept.device)
    if stream != made.stream:
        stream.wait_event(made.done)
        kept.record_stream(stream)  # dropped, its memory is not given away before this stream is done


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def with_index(device: torch.device) -> torch.device:
    """Return the device, "cuda" as the current one: its tensors say "cuda:0"."""
    if device.type == "cuda" and str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device

"""The time of a layout that every step makes anew, as packed documents need: where it is used, uncached."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from attnbias import relations
from attnbias.layouts.layout import Layout

BEST_OF = 3


def layouts_anew(device: torch.device, tokens: int) -> dict[str, Any]:
    """Return the milliseconds of making layouts where they will be used, from tensors that are there."""
    ids = torch.arange(tokens, device=device) * 37 // tokens
    index = (torch.arange(tokens)[:, None] + torch.arange(8) * 11).remainder(tokens).to(device)
    made: dict[str, Callable[[], relations.Relation]] = {
        "causal": relations.Causal,
        "window": lambda: relations.Window(before=1023),
        "documents": lambda: relations.Documents(ids) & relations.Causal(),
        "neighbours": lambda: relations.Neighbors(index),
    }
    found = {}
    for name, make in made.items():
        best = float("inf")
        for _ in range(BEST_OF):
            _wait(device)
            start = time.perf_counter()
            Layout.build(make(), tokens, tokens, device=device)
            _wait(device)
            best = min(best, time.perf_counter() - start)
        found[name] = round(best * 1e3, 3)
    return {"tokens": tokens, "milliseconds": found}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

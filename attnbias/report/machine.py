"""The first step of a report: the machine, without its name, and the words for it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..benchmarks.measure.machine import describe, model
from .runner import Outcome, Run, Step


def steps(run: Run) -> Iterator[Step]:
    """Yield the one step."""

    def look() -> Outcome:
        found = describe(run.device)
        return Outcome(data=found, words=title(found))

    yield Step("machine: versions and clocks", look)


def title(found: dict[str, Any]) -> str:
    """Put the most telling parts in a line."""
    parts = [found["device"]]
    if "capability" in found:
        parts.append(f"{found['capability']}, {found['multiprocessors']} SMs, {found['memory'] >> 30} GiB")
        parts.append(f"driver {(found['modes'] or {}).get('driver') or 'unknown'}")
    parts.append(f"torch {found['torch']}")
    parts.append(f"triton {found['packages'].get('triton', 'not installed')}")
    return ", ".join(map(str, parts))


def file_name(device: torch.device) -> str:
    """Name the file after the GPU or processor.

    Example:
        >>> file_name(torch.device("cpu")).endswith(".json.gz")
        True
    """
    words = re.sub(r"[^A-Za-z0-9]+", "-", model(device)).strip("-").lower() or sys.platform
    return f"{words}.json.gz"

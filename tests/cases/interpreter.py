"""Tests of Triton kernels in Triton's interpreter.

Triton decides at import whether it interprets, so such tests run in a process of their own, which one test of
the file starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_interpreted")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")

if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    # The interpreter patches triton.language at each call of a function, nested ones too, and leaves it so
    # after those. To patch once saves half of the time.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)


def run_interpreted(file: str, *arguments: str) -> None:
    """Run a test file once more, interpreted; ``arguments`` go to pytest."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *arguments,
        file,
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in run.stdout


@pytest.fixture
def poison_all() -> Iterator[None]:
    """Fill every uninitialised allocation with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)

"""Memory that the library takes without filling is NaN (or huge) in tests, so that reading it shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# `python -m pytest` puts the project's folder on the path, where transformers would take kernels/ for the
# package of that name.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.parent]

try:
    import attnbias  # noqa: F401
except ImportError as error:  # the mapping of kernels/ needs an install
    raise pytest.UsageError(f"{error}: run `pip install -e .` first") from None


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill fresh floating-point buffers with NaN."""
    for name in ("empty", "empty_like", "empty_strided"):
        plain = getattr(torch, name)

        def filled(*args, _plain=plain, **kwargs):
            made = _plain(*args, **kwargs)
            if made.is_floating_point() and not torch.compiler.is_compiling() and made.device.type != "meta":
                made.detach().fill_(torch.nan)  # checkpoint makes a leaf in torch 2.10
            return made

        monkeypatch.setattr(torch, name, filled)

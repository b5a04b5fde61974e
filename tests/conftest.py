"""Fixtures for every test: one cache of compiled kernels, and fresh memory full of NaN."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# `python -m pytest` puts the project's folder on the path, where transformers would mistake kernels/ for the
# package of that name.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.parent]

try:
    import attnbias  # noqa: F401
except ImportError as error:  # the mapping of kernels/ needs an install
    raise pytest.UsageError(f"{error}: run `pip install -e .` first") from None


@pytest.fixture(scope="session", autouse=True)
def compiled(pytestconfig):
    """Keep kernels that Triton compiles between tests, workers and runs."""
    cache = getattr(pytestconfig, "cache", None)  # absent with -p no:cacheprovider
    with pytest.MonkeyPatch.context() as patch:
        if cache is not None:
            patch.setenv("TRITON_CACHE_DIR", str(cache.mkdir("triton")))
        yield


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill fresh floating-point buffers with NaN."""
    for name in ("empty", "empty_like", "empty_strided"):
        plain = getattr(torch, name)

        def filled(*args, _plain=plain, **kwargs):
            made = _plain(*args, **kwargs)
            if made.is_floating_point() and not torch.compiler.is_compiling() and made.device.type != "meta":
                made.detach().fill_(torch.nan)  # in torch 2.10, checkpoint makes a leaf
            return made

        monkeypatch.setattr(torch, name, filled)

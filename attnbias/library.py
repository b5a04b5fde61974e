"""Where the C++ library of csrc/ is, and how it is opened: a plain shared library, called through ctypes."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path


def library_path() -> Path:
    """Where the library is; ATTNBIAS_CPU_LIBRARY names another one, for tests of a sanitized build."""
    named = os.environ.get("ATTNBIAS_CPU_LIBRARY")
    return Path(named) if named else Path(__file__).parent / "libattnbias.so"


@cache
def open_library() -> ctypes.CDLL | str:
    """Open the library, or say in words why that cannot be done."""
    path = library_path()
    if not path.exists():
        return "library: attnbias was installed without its C++ library (no compiler was found)"
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        return f"library: {error}"

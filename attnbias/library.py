"""Where the C++ library of csrc/ is, and how it is opened: a plain shared library, called through ctypes."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

REMEDY = "install g++, then pip install --force-reinstall --no-cache-dir ."


def library_path() -> Path:
    """Where the library is; ATTNBIAS_CPU_LIBRARY names another one, for tests of a sanitized build."""
    named = os.environ.get("ATTNBIAS_CPU_LIBRARY")
    return Path(named) if named else Path(__file__).parent / "libattnbias.so"


def _why_missing(path: Path) -> str:
    """Return the first line of what setup.py wrote when the compiler failed, in brackets."""
    try:
        return f" ({path.with_suffix('.error').read_text().splitlines()[0]})"
    except OSError:
        return ""


@cache
def open_library() -> ctypes.CDLL | str:
    """Open the library, or say in words why that cannot be done."""
    path = library_path()
    if not path.exists():
        return f"library: attnbias was built without its C++ library{_why_missing(path)}; {REMEDY}"
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        return f"library: {error}"

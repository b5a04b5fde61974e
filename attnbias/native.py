"""Open the C++ library of csrc/: a plain shared library, called through ctypes."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

ABI_VERSION = 7  # of csrc/attnbias.h
REMEDY = "install g++, then pip install --force-reinstall --no-cache-dir ."


def library_path() -> Path:
    """Return the path of the library; ATTNBIAS_CPU_LIBRARY names another one, such as a sanitized build."""
    named = os.environ.get("ATTNBIAS_CPU_LIBRARY")
    return Path(named) if named else Path(__file__).with_name("libattnbias.so")


def _why_missing(path: Path) -> str:
    """Return the first line of setup.py's note on a failed compilation, in brackets."""
    try:
        return f" ({path.with_suffix('.error').read_text().splitlines()[0]})"
    except OSError:
        return ""


@cache
def open_library() -> ctypes.CDLL | str:
    """Open the library, or return the reason why it cannot be opened."""
    path = library_path()
    if not path.exists():
        return f"library: attnbias was built without its C++ library{_why_missing(path)}; {REMEDY}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"library: {error}"
    version = library.ab_abi_version()
    if version != ABI_VERSION:  # its functions would read other structs than Python packs
        return f"library: {path.name} has interface {version}, wanted {ABI_VERSION}; {REMEDY}"
    return library

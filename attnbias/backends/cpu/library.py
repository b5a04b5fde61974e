"""The functions of the shared library that compute attention, and the instruction set they run on."""

from __future__ import annotations

import ctypes
from functools import cache

from ...native import open_library


@cache
def load() -> ctypes.CDLL | str:
    """Load the library, or return the reason why it cannot be loaded.

    ``ab_forward`` and ``ab_backward`` take a call as the bytes of its struct.
    """
    found = open_library()
    if isinstance(found, str):
        return found
    for function in (found.ab_forward, found.ab_backward, found.ab_force_isa):
        function.argtypes = (ctypes.c_char_p,)
    for function in (found.ab_forward, found.ab_backward, found.ab_call_bytes):
        function.restype = ctypes.c_int64
    found.ab_isa.restype = found.ab_isas.restype = ctypes.c_char_p
    return found


def missing() -> str | None:
    """Return the reason why there is no library, or None if there is one."""
    found = load()
    return found if isinstance(found, str) else None


def library() -> ctypes.CDLL:
    """Return the library.

    Raises:
        OSError: if it is missing.
    """
    found = load()
    if isinstance(found, str):
        raise OSError(found)
    return found


def isa() -> str:
    """Return the name of the instruction set in use."""
    return str(library().ab_isa().decode())


def isas() -> list[str]:
    """Return the names of the instruction sets that this machine can run, best first."""
    return str(library().ab_isas().decode()).split()


def force_isa(wanted: str | None) -> None:
    """Use one instruction set from now on, or the best again with None; for tests."""
    if library().ab_force_isa((wanted or "").encode()):
        raise ValueError(f"isa: wanted one of {', '.join(isas())}, got {wanted!r}")

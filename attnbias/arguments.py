"""Checks of arguments that all of the package may use."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_flag(name: str, value: Any) -> bool:
    """Return Python's True or False; raise TypeError for anything else, for even 'no' counts as true."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: wanted True or False, got {value!r}")

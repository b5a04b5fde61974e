"""How far a command is, on standard error."""

from __future__ import annotations

import math
import shutil
import sys
import time


class Watch:
    """Shows one line that changes on a terminal; elsewhere, such as in a log, a line every ten seconds."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self.wait = 0.1 if self.is_terminal else 10.0  # seconds
        if sys.stderr is None:  # closed before Python began; print would then write to standard output
            self.wait = math.inf
        self.shown = time.monotonic()

    def __call__(self, text: str) -> None:
        """Say it, unless something was said a moment ago."""
        if time.monotonic() - self.shown < self.wait:
            return
        self.shown = time.monotonic()
        if self.is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{text[:width]:{width}}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Make room on the terminal for what is printed next."""
        if self.is_terminal:
            print(f"\r{'':{shutil.get_terminal_size().columns - 1}}\r", end="", file=sys.stderr, flush=True)

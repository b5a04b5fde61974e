"""Progress of the examples: a bar on a terminal if rich is installed, otherwise a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

EVERY = 10.0  # seconds between lines without a bar


class Bar:
    """Show the steps of a run, and a text that changes.

    Example:
        with Bar("training", 100) as bar:
            for step in range(100):
                bar.advance(f"loss {loss:.3f}")
    """

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done = title, total, 0
        self._started = self._shown = time.monotonic()
        self._rich: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if not sys.stdout.isatty():  # into a file rich writes nothing until the end
            return self
        try:
            from rich import progress
        except ImportError:
            return self
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[words]}"),
        )
        self._rich = progress.Progress(*columns)
        self._rich.start()
        self._task = self._rich.add_task(self.title, total=self.total, words="")
        return self

    def advance(self, words: str = "", steps: int = 1) -> None:
        """Count steps and show the text."""
        self.done += steps
        now = time.monotonic()
        if self._rich is not None:
            self._rich.update(self._task, advance=steps, words=words)
        elif now - self._shown > EVERY and self.done < self.total:
            self._shown = now
            left = (now - self._started) * (self.total - self.done) / self.done
            print(f"  {self.title}: {self.done} of {self.total}, {words}, {left:.0f} s left", flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._rich is not None:
            self._rich.stop()

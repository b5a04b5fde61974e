"""Progress of the examples: a bar if rich is installed, otherwise a line now and then."""

from __future__ import annotations

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
        self._shown = time.monotonic()
        self._rich: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        try:
            from rich import progress
        except ImportError:
            return self
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[words]}"),
        )
        self._rich = progress.Progress(*columns)
        self._rich.start()
        self._task = self._rich.add_task(self.title, total=self.total, words="")
        return self

    def advance(self, words: str = "", steps: int = 1) -> None:
        """Count steps and show the text."""
        self.done += steps
        if self._rich is not None:
            self._rich.update(self._task, advance=steps, words=words)
        elif time.monotonic() - self._shown > EVERY or self.done >= self.total:
            self._shown = time.monotonic()
            print(f"{self.title} {self.done}/{self.total} {words}", flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._rich is not None:
            self._rich.stop()

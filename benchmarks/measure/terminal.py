"""Tables and progress; without rich they are plain text."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from .timing import Spread

Step = Callable[[str], None]


def machine() -> str:
    """Describe the machine in one line."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}; CPU time of one thread: median (20 % to 80 %)"
    )


def progress(text: str) -> None:
    """Write to standard error what is being measured; a terminal shows one line that changes."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
    elif text:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def steps(total: int) -> Iterator[Step]:
    """Show the progress of a run: a bar with rich on a terminal, else one line per step.

    Yields:
        a function to call with the name of the next step.
    """
    if not (find_spec("rich") and sys.stderr.isatty()):
        done = 0

        def say(text: str) -> None:
            nonlocal done
            done += 1
            progress(f"{done}/{total} {text}")

        yield say
        progress("")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def advance(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, advance=1 if begun else 0)
            begun = True

        yield advance


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table whose first column is text and whose others are numbers."""
    if not find_spec("rich"):
        print(f"\n{plain(title, header, rows)}")
        return
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title, title_justify="left")
    for column, name in enumerate(header):
        drawn.add_column(name, justify="right" if column else "left")
    for row in rows:
        drawn.add_row(*row)
    # Without a terminal, rich assumes 80 columns and would break the rows.
    Console(width=None if sys.stdout.isatty() else 180).print(drawn)


def plain(title: str, header: list[str], rows: list[list[str]]) -> str:
    """Lay the table out with spaces; cells of several lines lose their breaks."""
    rows = [[cell.replace("\n", ", ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [title]
    for row in [header, ["-" * width for width in widths], *rows]:
        first, *rest = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]))
    return "\n".join(lines)


def _unit(seconds: float) -> tuple[str, float]:
    if seconds < 1e-3:
        return "us", 1e-6
    return ("ms", 1e-3) if seconds < 1 else ("s", 1.0)


def time(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    unit, size = _unit(seconds)
    return f"{number(seconds / size)} {unit}"


def times(spread: Spread) -> str:
    """Write a time with its spread, in the unit that suits its median."""
    unit, size = _unit(spread.median)
    middle, low, high = (number(value / size) for value in spread)
    return f"{middle} ({low} to {high}) {unit}"


def ratio(spread: Spread) -> str:
    """Write a ratio with its spread."""
    middle, low, high = map(number, spread)
    return f"{middle}x ({low} to {high})"


def number(value: float) -> str:
    """Write at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size(count: float) -> str:
    """Write bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{number(count)} {unit}"
        count /= 1024
    return f"{number(count)} GiB"

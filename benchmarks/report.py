"""Tables, progress and plots; without rich the tables are plain text."""

import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from .timing import Point, Spread


def machine() -> str:
    """Say in one line what the figures were measured on."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}; CPU time of one thread: median (20 % to 80 %)"
    )


def progress(text: str) -> None:
    """Say on standard error what is being measured; a terminal shows one line that changes."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
    elif text:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


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
    # Away from a terminal rich assumes 80 columns and would break the rows.
    Console(width=None if sys.stdout.isatty() else 120).print(drawn)


def plain(title: str, header: list[str], rows: list[list[str]]) -> str:
    """Lay the table out with spaces."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [title]
    for row in [header, ["-" * width for width in widths], *rows]:
        first, *rest = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]))
    return "\n".join(lines)


def times(spread: Spread) -> str:
    """Write a time with its spread, in the unit that suits its median."""
    unit, size = "us", 1e-6
    if spread.median >= 1e-3:
        unit, size = ("ms", 1e-3) if spread.median < 1 else ("s", 1.0)
    middle, low, high = (number(value / size) for value in spread)
    return f"{middle} ({low} to {high}) {unit}"


def ratio(spread: Spread) -> str:
    """Write a ratio with its spread."""
    middle, low, high = map(number, spread)
    return f"{middle}x ({low} to {high})"


def number(value: float) -> str:
    """Write at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plot_growth(curves: dict[str, list[Point]], path: Path) -> None:
    """Draw time and bytes over tokens on logarithmic axes; the dashed line is linear growth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, points in curves.items():
        tokens = [point.tokens for point in points]
        left.plot(tokens, [point.time.median for point in points], marker="o", label=name)
        right.plot(tokens, [point.bytes for point in points], marker="o", label=name)
    for axes, label in ((left, "CPU seconds"), (right, "bytes")):
        low = axes.dataLim.ymin
        linear = [low, low * tokens[-1] / tokens[0]]
        axes.plot([tokens[0], tokens[-1]], linear, color="grey", linestyle="--", label="linear")
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="tokens", ylabel=f"{label} of a layout")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)

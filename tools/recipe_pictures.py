"""Run the code of docs/recipes.md and draw what it prints: ``python tools/recipe_pictures.py``.

An entry of the page is a heading, a picture ``![...](pictures/recipes/NAME.svg)`` and one block of code. The
block prints pictures of ``#`` and ``.``; they are drawn side by side, queries down and keys across.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent.parent / "docs"
CELL, GAP = 4, 16  # pixels: a pair, between two pictures
ENTRY = re.compile(r"^## (.+?)$(.*?)^!\[.*?\]\((pictures/\S+\.svg)\)$(.*?)```python\n(.*?)```", re.M | re.S)


class Entry(NamedTuple):
    """One recipe of the page."""

    title: str
    picture: Path
    code: str


def entries(page: Path = DOCS / "recipes.md") -> list[Entry]:
    """Return the entries of the page in order."""
    found = ENTRY.findall(page.read_text())
    return [Entry(title, page.parent / picture, code) for title, _, picture, _, code in found]


def run(code: str) -> str:
    """Run a block of code by itself, and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    return printed.getvalue()


def grids_of(printed: str) -> list[list[str]]:
    """Return the pictures in a text, as lists of lines."""
    grids: list[list[str]] = [[]]
    for line in printed.splitlines():
        if re.fullmatch(r"[#.]+", line):
            grids[-1].append(line)
        elif grids[-1]:
            grids.append([])
    return [grid for grid in grids if grid]


def rectangles(grid: list[str]) -> Iterator[tuple[int, int, int, int]]:
    """Cover the marked cells by rectangles (x, y, width, height): equal runs of lines one below another."""
    open_runs: dict[tuple[int, int], int] = {}  # (x, width): first line
    for y, line in enumerate([*grid, ""]):
        runs = {(run.start(), run.end() - run.start()) for run in re.finditer("#+", line)}
        for (x, width), first in sorted(open_runs.items()):
            if (x, width) not in runs:
                yield x, first, width, y - first
                del open_runs[x, width]
        for each in sorted(runs):
            open_runs.setdefault(each, y)


def draw(grids: list[list[str]]) -> str:
    """Draw pictures side by side as an SVG, one unit to a pair."""
    gap = GAP // CELL
    width = sum(len(grid[0]) for grid in grids) + gap * (len(grids) - 1)
    height = max(map(len, grids))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width * CELL}" height="{height * CELL}" shape-rendering="crispEdges">'
    ]
    left = 0
    for grid in grids:
        lines.append(f'<path fill="#e8edf3" d="M{left} 0h{len(grid[0])}v{len(grid)}h-{len(grid[0])}z"/>')
        boxes = "".join(f"M{left + x} {y}h{w}v{h}h-{w}z" for x, y, w, h in rectangles(grid))
        lines.append(f'<path fill="#1f5fa8" d="{boxes}"/>')
        left += len(grid[0]) + gap
    return "\n".join([*lines, "</svg>\n"])


def main() -> None:
    """Write every picture."""
    for entry in entries():
        entry.picture.parent.mkdir(parents=True, exist_ok=True)
        entry.picture.write_text(draw(grids_of(run(entry.code))))


if __name__ == "__main__":
    main()

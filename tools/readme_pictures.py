"""Draw the pictures of README.md, for light and for dark pages: ``python tools/readme_pictures.py``.

``relations-*.svg`` is a strip of relations, ``speed-*.svg`` a chart of rows of docs/benchmarks.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from recipe_pictures import rectangles

import attnbias as ab

DOCS = Path(__file__).parent.parent / "docs"
FONT = "font-family=\"-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""


class Colours(NamedTuple):
    """Of one theme."""

    text: str
    empty: str
    cell: str


THEMES = {"light": Colours("#24292f", "#e8edf3", "#1f5fa8"), "dark": Colours("#c9d1d9", "#252c38", "#6cb0f5")}

TOKENS, PIXELS, GAP = 32, 3, 18
STRIP = {
    "causal": ab.Causal(),
    "window": ab.Window(before=7),
    "documents": ab.Documents.from_lengths([9, 4, 12, 7]) & ab.Causal(),
    "prefix": ab.Prefix(9) | ab.Causal(),
    "window | global": ab.Window(3, 3) | ab.Global([0, 16]),
    "tree of drafts": ab.Tree([-1, 0, 1, 2, 3, 4, 5, *(6 + i // 5 for i in range(25))]),
    "grid": ab.Neighborhood([4, 8], 1),
    "graph": ab.knn_graph([[(i * 61) % 89, (i * 37) % 97] for i in range(TOKENS)], 4),
}

CASES = {  # case of the table: label
    "causal@2048": "causal, 2,048",
    "window@4096": "window, 4,096",
    "documents@8192": "documents, 8,192",
    "grid@48x48": "grid, 48 x 48",
    "knn@4096": "neighbours, 4,096",
    "airfoil 4x32": "graph (airfoil)",
}
FORWARD = re.compile(r"(.+?) \*\*(\S+)\*\* \((\S+) to (\S+)\)")


class Row(NamedTuple):
    """A case of the table: its time and its fastest peer, forward."""

    label: str
    time: str
    peer: str
    ratio: str
    low: str
    high: str


def read_rows() -> list[Row]:
    """Read the rows of ``CASES`` from the first table of docs/benchmarks.md."""
    found = {}
    for line in (DOCS / "benchmarks.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in CASES and cells[0] not in found:
            fastest = FORWARD.match(cells[3])
            assert fastest is not None, line
            found[cells[0]] = Row(CASES[cells[0]], cells[1], *fastest.groups())
    return [found[case] for case in CASES]


def text(x: float, y: float, words: str, colour: str, *, size: int = 12, anchor: str = "start") -> str:
    """Return a line of text."""
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} {FONT} fill="{colour}">{words}</text>'


def svg(width: float, height: float, title: str, parts: list[str]) -> str:
    """Return a whole picture."""
    sizes = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {sizes} role="img">'
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>\n"])


def draw_strip(colours: Colours) -> str:
    """Draw the relations side by side, queries down and keys across."""
    side = TOKENS * PIXELS
    parts = []
    for number, (name, relation) in enumerate(STRIP.items()):
        grid = relation.picture(TOKENS, TOKENS).split()
        path = "".join(f"M{x} {y}h{w}v{h}h-{w}z" for x, y, w, h in rectangles(grid))
        left = number * (side + GAP)
        parts.append(
            f'<g transform="translate({left} 0) scale({PIXELS})" shape-rendering="crispEdges">'
            f'<path fill="{colours.empty}" d="M0 0h{TOKENS}v{TOKENS}h-{TOKENS}z"/>'
            f'<path fill="{colours.cell}" d="{path}"/></g>'
        )
        parts.append(text(left + side / 2, side + 17, name, colours.text, anchor="middle"))
    return svg(
        len(STRIP) * (side + GAP) - GAP, side + 24, "Relations: which query attends to which key", parts
    )


def draw_speed(colours: Colours) -> str:
    """Draw a bar for each row: the fastest peer's time over ours, with its spread."""
    left, scale, step = 132, 52, 26
    rows = read_rows()
    height = len(rows) * step + 34
    parts = [text(0, 14, "time of the fastest peer with the same result, over ours (forward)", colours.text)]
    one = left + scale
    for number, row in enumerate(rows):
        top, end = 26 + number * step, left + scale * float(row.ratio)
        middle = top + 9
        low, high = (left + scale * float(x) for x in (row.low, row.high))
        parts += [
            text(left - 8, middle + 4, row.label, colours.text, anchor="end"),
            f'<rect x="{left}" y="{top}" width="{end - left:g}" height="18" fill="{colours.cell}"/>',
            f'<path stroke="{colours.text}" d="M{low:g} {middle}H{high:g}'
            f'M{low:g} {middle - 3}v6M{high:g} {middle - 3}v6"/>',
            text(high + 8, middle + 4, f"{row.ratio}x {row.peer}", colours.text),
        ]
    parts.append(f'<path stroke="{colours.text}" stroke-dasharray="2 3" d="M{one} 22V{height - 10}"/>')
    return svg(720, height, "Speed on one CPU thread", parts)


def draw_all() -> dict[Path, str]:
    """Return every picture with its file."""
    return {
        DOCS / "pictures" / f"{name}-{theme}.svg": draw(colours)
        for name, draw in (("relations", draw_strip), ("speed", draw_speed))
        for theme, colours in THEMES.items()
    }


if __name__ == "__main__":
    for path, picture in draw_all().items():
        path.write_text(picture)

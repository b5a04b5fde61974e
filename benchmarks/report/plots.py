"""Plots of a run, as PNG files and as SVG text for the page; they need matplotlib."""

from __future__ import annotations

import io
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..measure.race import OURS
from ..measure.record import Results, SweepPoint, is_timed, quickest
from ..measure.sweep import EDGES, MASKED, TILES, crossover
from ..measure.timing import Point
from ..peers.registry import DENSE
from .tables import by_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The light colours of page.css, whose variables take their place on the page. Blue and amber are told apart
# with every kind of colour blindness; hatches, markers and dashes tell the same without colour.
PALETTE = {
    "ink": "#1c2433",
    "soft": "#5b6675",
    "line": "#e4e8ee",
    "blue": "#0072b2",
    "amber": "#c97800",
    "card": "#ffffff",
}
INK, SOFT, LINE, BLUE, AMBER, CARD = PALETTE.values()
LOOKS: dict[bool, dict[str, Any]] = {  # of bars, by whether they are with backward; hatches take edgecolor
    False: {"facecolor": BLUE, "edgecolor": CARD, "linewidth": 0},
    True: {"facecolor": AMBER, "edgecolor": CARD, "linewidth": 0, "hatch": "///"},
}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "figure.facecolor": CARD,
    "axes.facecolor": CARD,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.grid": True,
    "grid.color": LINE,
    "legend.frameon": False,
    "hatch.linewidth": 1.5,
}


def draw_all(results: Results) -> dict[str, Figure]:
    """Draw every plot that the results allow; return them by name."""
    figures = {}
    if any(quickest(entry) for entry in results["entries"]):
        figures["speed"] = _styled(_speed, results)
    if results["lengths"]:
        figures["length"] = _styled(_length, results)
    if results["sweep"]:
        figures["density"] = _styled(_density, results)
    return figures


def save_png(figures: dict[str, Figure], folder: Path, stem: str) -> list[Path]:
    """Write each figure next to the results."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{stem}-{name}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths


def as_svg(figure: Figure) -> str:
    """Return the figure as an SVG element for HTML: text as text, colours as variables of page.css."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "attnbias"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    for name, colour in PALETTE.items():
        text = text.replace(colour, f"var(--{name})")
    return text[text.index("<svg") :]


def _styled(draw: Any, results: Results) -> Figure:
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        figure: Figure = draw(results)
    return figure


def _new(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _speed(results: Results) -> Figure:
    """Plot the speed-up over the quickest peer with the same result."""
    from matplotlib.patches import Patch

    rows: dict[str, dict[bool, tuple[str, list[float]]]] = {}
    for entry in results["entries"]:
        if not is_timed(entry):
            continue
        found = quickest(entry)
        if found:
            rows.setdefault(entry["case"], {})[entry["backward"]] = found
    figure = _new(8, 0.42 * len(rows) + 1.6)
    axes = figure.subplots()
    for place, passes in enumerate(rows.values()):
        for backward, (peer, (middle, low, high)) in passes.items():
            y = place + (0.2 if backward else -0.2)
            whiskers = [[middle - low], [high - middle]]
            axes.barh(y, middle - 1, 0.36, left=1, xerr=whiskers, ecolor=INK, **LOOKS[backward])
            text = axes.annotate(
                f"{middle:.3g}x vs {peer}",
                (max(high, middle, 1), y),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
            text.set_in_layout(False)  # there is room for it on the right
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.axvline(1, color=INK, linewidth=1)
    most = max(x[1][2] for passes in rows.values() for x in passes.values())
    axes.set(xscale="log", xlim=(0.7, most * 4), xlabel="times faster than the quickest peer")
    axes.set_xticks(
        ticks := [t for t in (1, 2, 5, 10, 20, 50, 100) if t < most * 3], [f"{t}x" for t in ticks]
    )
    axes.minorticks_off()
    axes.grid(visible=False, axis="y")
    handles = [Patch(**look) for look in LOOKS.values()]
    figure.legend(handles, ["forward", "forward and backward"], loc="outside upper left", ncols=2)
    return figure


def _length(results: Results) -> Figure:
    """Plot time against length on logarithmic axes."""
    curves: dict[str, list[tuple[int, list[float]]]] = {}
    for point in results["lengths"]:
        curves.setdefault(point["what"], []).append((point["tokens"], point["seconds"]))
    figure = _new(7, 4)
    axes = figure.subplots()
    for (name, points), marker in zip(sorted(curves.items()), cycle("oDs^v"), strict=False):
        ours = name.startswith(OURS)
        colour, line = (BLUE, "-") if ours else (AMBER, "--")
        tokens = [n for n, _ in points]
        middles = [1e3 * x[0] for _, x in points]
        axes.plot(tokens, middles, marker + line, color=colour, label=name, ms=5)
        axes.fill_between(
            tokens, [1e3 * x[1] for _, x in points], [1e3 * x[2] for _, x in points], color=colour, alpha=0.15
        )
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="tokens", ylabel="milliseconds, forward")
    every = sorted({n for points in curves.values() for n, _ in points})
    axes.set_xticks(every, [f"{n:,}" for n in every])
    axes.legend()
    return figure


def _density(results: Results) -> Figure:
    """Plot the speed-up against density, one panel per structure and pass."""
    panels = by_curve(results["sweep"])
    figure = _new(5 * min(len(panels), 2), 3.6 * -(-len(panels) // 2))
    grid = figure.subplots(-(-len(panels) // 2), min(len(panels), 2), squeeze=False, sharey=True).reshape(-1)
    for axes, (name, points) in zip(grid, panels.items(), strict=False):
        _panel(axes, name, sorted(points, key=lambda point: point["density"]))
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    ratios = [each for point in results["sweep"] for each in _ratios_drawn(point)]
    grid[0].set_ylim(min(0.5, *ratios) / 1.6, max(2, *ratios) * 1.3)  # all share it
    for axes in grid[:: min(len(panels), 2)]:
        axes.set_ylabel("times faster than SDPA")
    handles: dict[str, Any] = {}
    for axes in grid:
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def _ratios_drawn(point: SweepPoint) -> list[float]:
    """Return the heights of a point on every curve of its panel."""
    ratios = {name: ratio[0] for name, ratio in point["ratios"].items()}
    masked = ratios[MASKED]
    return [masked, ratios[DENSE], masked / ratios[TILES], masked / ratios[EDGES]]


def _panel(axes: Any, name: str, points: list[SweepPoint]) -> None:
    density = [100 * point["density"] for point in points]
    for peer, colour, line, label in (
        (MASKED, BLUE, "-", "against SDPA with a mask"),
        (DENSE, AMBER, "--", "against SDPA on all pairs"),
    ):
        axes.plot(density, [point["ratios"][peer][0] for point in points], line, color=colour, label=label)
    for form, marker in ((EDGES, "o"), ("both", "D"), (TILES, "s")):
        chosen = [
            (x, p["ratios"][MASKED][0]) for x, p in zip(density, points, strict=True) if p["chosen"] == form
        ]
        if chosen:
            label = f"the layout chose {form}"
            axes.plot(*zip(*chosen, strict=True), marker, color=INK, ms=5, label=label, linestyle="")
    for form, style in ((TILES, ":"), (EDGES, "-.")):
        forced = [p["ratios"][MASKED][0] / p["ratios"][form][0] for p in points]
        axes.plot(density, forced, style, color=SOFT, linewidth=1, label=f"{form} forced")
    axes.axhline(1, color=INK, linewidth=1)
    found = crossover(points)
    words = f"all pairs quicker from {found:.0%}" if found else "quicker than all pairs at every density"
    axes.text(0.02, 0.03, words, transform=axes.transAxes, fontsize=9)
    if found:
        axes.axvline(100 * found, color=INK, linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", title=name, xlabel="related pairs, % of all")
    axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.set_yticks(ticks := [1, 2, 5, 10, 20, 50, 100, 200], [f"{t}x" for t in ticks])
    axes.minorticks_off()


def plot_growth(curves: dict[str, list[Point]], path: Path) -> None:
    """Draw time and bytes over tokens on logarithmic axes; the dashed line is linear growth."""
    figure = _new(10, 4)
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

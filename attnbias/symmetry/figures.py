"""Figures 1 to 4 of the paper in one picture: each relation as a graph, and as the matrix of its pairs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..relations import Bipartite, Causal, Full, Relation, Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TOKENS = 6
_DARK, _LIGHT = "#1f5a99", "#f3f3f3"
FIGURES: dict[str, Relation] = {
    "Fig. 1, self-attention: complete": Full(),
    "Fig. 2, encoder-decoder: bipartite": Bipartite(_TOKENS // 2),
    "Fig. 3, masked: a total order": Causal(),
    "Fig. 4, strided: p = 2 previous": Window(before=2),
}


def draw(path: str | Path) -> None:
    """Draw the figures into a file, whose suffix says the format.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "--figure: wanted matplotlib (pip install matplotlib), which is not installed"
        ) from None
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2, len(FIGURES))
    for (title, relation), graph, matrix in zip(FIGURES.items(), *axes, strict=True):
        graph.set_title(title)
        _draw_graph(graph, relation)
        pairs = relation.dense(_TOKENS, _TOKENS).numpy()
        matrix.imshow(pairs, cmap=ListedColormap([_LIGHT, _DARK]), vmin=0, vmax=1)
        names = _names(relation)
        matrix.set_xticks(range(_TOKENS), names)
        matrix.set_yticks(range(_TOKENS), names)
        matrix.set_xlabel("key")
        matrix.set_ylabel("query")
    figure.supxlabel("Arrows run from key to query; a ring around a token is its loop.", size="medium")
    figure.savefig(path, dpi=150)


def _names(relation: Relation) -> list[str]:
    """Name the tokens: inputs x and outputs y of encoder-decoder attention, else x."""
    inputs = relation.split if isinstance(relation, Bipartite) else _TOKENS
    return [f"x{i + 1}" if i < inputs else f"y{i - inputs + 1}" for i in range(_TOKENS)]


def _draw_graph(axes: Axes, relation: Relation) -> None:
    """Draw an arrow from each key to the query that asks for it; a ring around a token is its loop."""
    turns = [2 * math.pi * i / _TOKENS for i in range(_TOKENS)]
    if isinstance(relation, Bipartite):
        places = [(i // (_TOKENS // 2) * 2.0 - 1, 1.0 - i % (_TOKENS // 2)) for i in range(_TOKENS)]
    else:
        places = [(math.sin(turn), math.cos(turn)) for turn in turns]
    for query, key in relation.dense(_TOKENS, _TOKENS).nonzero().tolist():
        if query == key:
            axes.plot(*places[query], "o", markersize=30, markerfacecolor="none", color=_DARK)
        else:
            style = {"arrowstyle": "-|>", "color": _DARK, "shrinkA": 14, "shrinkB": 14, "linewidth": 0.8}
            axes.annotate("", xy=places[query], xytext=places[key], arrowprops=style)
    for place, name in zip(places, _names(relation), strict=True):
        axes.text(*place, name, ha="center", va="center")
    axes.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal")
    axes.axis("off")

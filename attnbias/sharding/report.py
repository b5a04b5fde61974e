"""What a plan costs: rows, pairs and bytes by rank, beside other ways, as a table and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..sets.intervals import Ints
from ..sets.predicate import Predicate
from .counts import (
    Shape,
    Traffic,
    executed_of,
    gather_bytes,
    heads_bytes,
    keys_bytes,
    least_bytes,
    pairs_of,
    ring_bytes,
)
from .plan import Plan

_WAYS = {"keys": keys_bytes, "heads": heads_bytes, "all-gather": gather_bytes, "ring": ring_bytes}
_MOST_RANKS, _COLUMNS = 16, 64  # of a picture in text
_UNITS = ("B", "kB", "MB", "GB", "TB")


class Way(NamedTuple):
    """One way to exchange: what this plan does, or what others do."""

    name: str
    traffic: Traffic
    share: float  # of the all-gather's bytes, forward, mean over ranks


@dataclass(frozen=True, repr=False)
class Report:
    """Rows, pairs and bytes of a sharded relation; printed as a table."""

    relation: str
    split: str
    lengths: tuple[int, int]
    shape: Shape
    rows: Ints  # [ranks], queries
    fetched: Ints  # [ranks], keys from other ranks: of a graph, the nodes of its halo
    pairs: Ints  # [ranks], related; of a predicate, tested
    executed: NDArray[np.float64]  # [ranks], computed by kernels: whole tiles, and edges by their cost
    ways: tuple[Way, ...]
    least: float  # bytes that a rank must receive on average, however tokens are split
    is_tested: bool  # whether pairs are tested one by one, so that needs are an upper bound

    @property
    def balance(self) -> float:
        """Work of the busiest rank over the mean."""
        total = float(self.executed.sum())
        return float(self.executed.max()) * len(self.executed) / total if total else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "relation": self.relation,
            "split": self.split,
            "lengths": list(self.lengths),
            "ranks": len(self.rows),
            "shape": self.shape._asdict(),
            "balance": self.balance,
            "least_bytes": self.least,
            "rows": self.rows.tolist(),
            "fetched": self.fetched.tolist(),
            "pairs": self.pairs.tolist(),
            "executed": self.executed.tolist(),
            "ways": {
                way.name: {
                    "share": way.share,
                    "forward": way.traffic.forward.tolist(),
                    "backward": way.traffic.backward.tolist(),
                }
                for way in self.ways
            },
        }

    def __str__(self) -> str:
        shape, (q_len, k_len) = self.shape, self.lengths
        lengths = f"{q_len:,}" if q_len == k_len else f"{q_len:,} x {k_len:,}"
        rows = [
            f"{self.relation}: {lengths} tokens on {len(self.rows)} ranks, split {self.split!r}",
            f"batch {shape.batch}, heads {shape.heads}/{shape.key_heads}, D {shape.size}, "
            f"E {shape.value_size}, {shape.width} bytes a number; "
            "bytes are those that a rank receives, in a layer and pass",
            "",
            f"{'':10} {'mean':>10} {'max':>10} {'max/mean':>9}",
            _numbers("rows", self.rows),
            _numbers("fetched", self.fetched),
            _numbers("pairs", self.pairs),
            _numbers("executed", self.executed),
            "",
            f"{'':10} {'forward':>10} {'max':>10} {'backward':>10} {'max':>10} {'of all-gather':>14}",
            *map(_bytes_of, self.ways),
            f"{'least':10} {_text(self.least):>10}",
        ]
        if self.is_tested:
            rows.append("pairs are tested one by one: all that may be related are counted and fetched")
        return "\n".join(rows)

    __repr__ = __str__  # what a notebook shows


def _numbers(name: str, x: NDArray[Any]) -> str:
    mean = float(x.mean())
    return f"{name:10} {mean:10.4g} {float(x.max()):10.4g} {float(x.max()) / mean if mean else 1.0:9.3f}"


def _bytes_of(way: Way) -> str:
    forward, backward = way.traffic
    numbers = [text for x in (forward, backward) for text in (_text(float(x.mean())), _text(float(x.max())))]
    share = f"{way.share:.3f}" if way.share >= 0.1 or not way.share else f"1/{1 / way.share:.0f}"
    return " ".join([f"{way.name:10}", *(f"{text:>10}" for text in numbers), f"{share:>14}"])


def _text(count: float) -> str:
    unit = 0
    while count >= 1000 and unit + 1 < len(_UNITS):
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"


def make_report(plan: Plan, shape: Shape) -> Report:
    """Count what a plan costs for tensors of a shape."""
    traffic = {name: count(plan, shape) for name, count in _WAYS.items()}
    whole = float(traffic["all-gather"].forward.mean())
    return Report(
        relation=repr(plan.relation),
        split=plan.queries.name,
        lengths=(plan.place.q_len, plan.place.k_len),
        shape=shape,
        rows=plan.queries.counts,
        fetched=plan.received.sum(1),
        pairs=pairs_of(plan),
        executed=executed_of(plan),
        ways=tuple(
            Way(name, each, float(each.forward.mean()) / whole if whole else 0.0)
            for name, each in traffic.items()
        ),
        least=least_bytes(plan, shape),
        is_tested=isinstance(plan.bound.solid, Predicate),
    )


def draw(plan: Plan, path: str | Path | None = None) -> str:
    """Draw what ranks hold and fetch along the keys: 'o' own, '#' fetched, '.' neither; also as a picture.

    Args:
        plan: what to draw; at most 16 ranks appear in the text, evenly picked.
        path: a file for a picture of all ranks.
    """
    count = min(plan.ranks, _MOST_RANKS)
    picked = [rank * (plan.ranks - 1) // max(count - 1, 1) for rank in range(count)]
    own, got = _cells(plan, _COLUMNS)
    if path is not None:
        _save(plan, Path(path))
    width = len(str(plan.ranks - 1))
    marks = np.where(own, "o", np.where(got, "#", "."))
    return "\n".join(f"{rank:{width}} {''.join(marks[rank])}" for rank in picked)


def _cells(plan: Plan, columns: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return where each rank holds, and where it fetches, most of some key: [ranks, columns] each."""
    ranks, k_len = plan.ranks, plan.keys.length
    columns = max(1, min(columns, k_len))
    column = np.arange(k_len) * columns // max(k_len, 1)
    held = np.zeros((ranks, columns), np.int64)
    np.add.at(held, (plan.keys.owner, column), 1)
    got = np.zeros((ranks, columns), bool)
    for rank in range(ranks):
        keys = plan.needed(rank)
        got[rank, column[keys[plan.keys.owner[keys] != rank]]] = True
    own = held * ranks > np.bincount(column, minlength=columns)  # more than an even share of the column
    return own | ((held > 0) & ~got), got


def _save(plan: Plan, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("drawing needs matplotlib: pip install 'attnbias[plot]'") from None
    own, got = _cells(plan, 512)
    kinds = np.where(own, 2, np.where(got, 1, 0))
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    colours = ListedColormap(["#f3f3f3", "#8fb8de", "#1f5a99"])
    extent = (0, plan.keys.length, plan.ranks - 0.5, -0.5)
    left.imshow(kinds, cmap=colours, vmin=0, vmax=2, aspect="auto", extent=extent, interpolation="nearest")
    left.set_xlabel("key (dark: held, light: fetched)")
    left.set_ylabel("rank")
    executed = executed_of(plan)
    right.barh(
        np.arange(plan.ranks), executed / max(float(executed.mean()), 1e-30), color="#1f5a99", height=1
    )
    right.set_xlabel("work / mean")
    figure.suptitle(f"{plan.relation!r} on {plan.ranks} ranks, split {plan.queries.name!r}")
    figure.savefig(path, dpi=150)

"""Forecasts of hourly series: does attention find what a linear forecast leaves?

Ridge regression on the last two weeks forecasts the next day; a model forecasts what that leaves. As in
PatchTST, each column is a series of its own, and a token is a patch of hours. The models have plain
attention, multi-level scores (MLR attention) or a sliding window. If one is not better than ridge regression,
nothing was found that attention could help with, and the script compares nothing.

    python examples/time_series.py --csv ETTh1.csv          # the stored results: 3 minutes on one core
    python examples/time_series.py --csv ETTh1.csv --hours 17420 --name time_series_ETTh1_all    # stored, too
    python examples/time_series.py                          # a series that is made up
    python examples/time_series.py --csv ETTh1.csv --device cuda --steps 2000

ETTh1 is at github.com/zhouhaoyi/ETDataset. The first 60 % of the hours are to train on, the next 20 % to
choose the ridge's strength and the moment to stop, the last 20 % to test on: with 14,400 hours the 12, 4 and
4 months of other work. Each column has variance 1 over the first part. On all 17,420 hours, which were tried
first, four models of six were no better than ridge regression. There is no --paper: Kuang et al. (2025) call
their results on ETT "promising" and publish no script for them.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from decoder import (
    Decoder,
    ReadIn,
    Results,
    Run,
    make_parser,
    parse,
    plain,
    plot,
    sines,
    spread,
    train,
)
from torch import Tensor, nn

import attnbias as ab
from attnbias.nn import MLRAttention

METHODS = ("plain", "multi-level", "window")
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)  # of the ridge, per example
SHORT = 96  # hours that another ridge reads
STRIDE = 11  # hours between forecasts that are measured; prime to the day, so that they begin at any hour


def read(path: Path | None, hours: int) -> Tensor:
    """Read the first rows of a file's columns of numbers, or make some, [columns, hours]."""
    if path is not None:
        with path.open() as file:
            rows = list(csv.DictReader(file))
        return torch.tensor([[float(row[key]) for row in rows] for key in list(rows[0])[1:]])[:, :hours]
    rng, time = torch.Generator().manual_seed(0), torch.arange(hours)
    wander = torch.randn(3, hours, generator=rng).cumsum(1) / 20
    noise = torch.randn(3, hours, generator=rng) / 4
    return torch.sin(time * math.tau / 24) + 0.5 * torch.sin(time * math.tau / 168) + wander + noise


def ridge(inputs: Tensor, wanted: Tensor, strength: float) -> Tensor:
    """Return the W that minimises the mean of |inputs W - wanted|^2 plus strength |W|^2."""
    square = inputs.T @ inputs / len(inputs)
    eye = torch.eye(len(square), dtype=inputs.dtype)
    return torch.linalg.solve(square + strength * eye, inputs.T @ wanted / len(inputs))


class Series:
    """A series of several columns, its parts, and the linear forecast at every hour.

    Args:
        values: [columns, hours].
        context: hours that a forecast reads.
        ahead: hours of a forecast.
    """

    def __init__(self, values: Tensor, context: int, ahead: int) -> None:
        hours = values.shape[1]
        self.context, self.ahead = context, ahead
        self.splits = (hours * 3 // 5, hours * 4 // 5, hours)
        known = values[:, : self.splits[0]]
        self.values = (values - known.mean(1, keepdim=True)) / known.std(1, keepdim=True)
        self.linear = self._forecast(context)

    def at(self, part: int, stride: int = STRIDE) -> Tensor:
        """Return last hours that are seen of the forecasts within a part: 0 train, 1 validation, 2 test."""
        first = max(2 * self.context, self.splits[part - 1]) if part else 2 * self.context
        return torch.arange(first, self.splits[part] - self.ahead, stride)

    def wanted(self, hours: Tensor) -> Tensor:
        """Return what follows each hour, [columns, hours, ahead], less the value at the hour."""
        after = self.values[:, hours[..., None] + 1 + torch.arange(self.ahead)]
        return after - self.values[:, hours][..., None]

    def _seen(self, hours: Tensor, span: int) -> Tensor:
        before = self.values[:, hours[..., None] + 1 - span + torch.arange(span)]
        return before - self.values[:, hours][..., None]

    def _forecast(self, span: int) -> Tensor:
        """Fit a ridge for all columns, and return its forecasts [columns, hours, ahead] less the value."""
        fit, check = self.at(0, 3), self.at(1)
        inputs, wanted = (x.flatten(0, 1).double() for x in (self._seen(fit, span), self.wanted(fit)))
        weights = {strength: ridge(inputs, wanted, strength).float() for strength in STRENGTHS}
        errors = {
            strength: float((self._seen(check, span) @ weight - self.wanted(check)).square().mean())
            for strength, weight in weights.items()
        }
        windows = self.values.unfold(1, span, 1)  # a window ends at hour span - 1 and later ones
        forecasts = (windows - windows[..., -1:]) @ weights[min(errors, key=errors.__getitem__)]
        return nn.functional.pad(forecasts, (0, 0, span - 1, 0))

    def baselines(self) -> dict[str, float]:
        """Return errors without a model on the test part; persistence repeats the last value."""
        hours = self.at(2)
        wanted = self.wanted(hours)
        days = -(-self.ahead // 24)
        day = self._seen(hours, 24).repeat(1, 1, days)[..., : self.ahead]
        errors = {
            "persistence": wanted,
            "the value a day ago": wanted - day,
            "ridge regression": wanted - self.linear[:, hours],
        }
        if self.context > SHORT:  # may be better, since it has less to fit
            errors[f"ridge regression on {SHORT} hours"] = wanted - self._forecast(SHORT)[:, hours]
        return {name: round(float(error.square().mean()), 4) for name, error in errors.items()}


def best_ridge(baselines: dict[str, float]) -> float:
    return min(error for name, error in baselines.items() if name.startswith("ridge"))


def make_attention(method: str, width: int, heads: int, window: int) -> nn.Module:
    """Make one layer of a method."""
    if method == "multi-level":
        size = width // heads
        return MLRAttention(width, heads, [size // 2, size // 4, size // 8, size - 7 * size // 8])
    near = ab.Causal() & ab.Window(before=window - 1)
    return plain(width, heads, near if method == "window" else ab.Causal())


def run(method: str, seed: int, args: argparse.Namespace, series: Series) -> Run:
    """Train; return the test error at the check with the least validation error."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    patch, tokens = args.patch, args.context // args.patch
    ends = torch.arange(1 - tokens, 1) * patch  # last hours of the patches, from the last one seen
    model = Decoder(
        ReadIn(patch + 1, args.width, 0.3),
        args.width,
        args.layers,
        args.ahead,
        sines(tokens, args.width, 0.3),
        lambda _: make_attention(method, args.width, args.heads, args.window),
    ).to(args.device)

    def patches(hours: Tensor, columns: Tensor) -> Tensor:
        """Return each patch less its last value, and that value, [rows, tokens, patch + 1]."""
        at = (hours[:, None] + ends)[..., None] + torch.arange(1 - patch, 1)
        found = series.values[columns[:, None, None], at]
        last = found[..., -1:]
        return torch.cat([found - last, last], -1).to(args.device)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        hours = series.at(0, 1)[torch.randint(len(series.at(0, 1)), (args.batch,), generator=rng)]
        columns = torch.randint(len(series.values), (args.batch,), generator=rng)
        each = (hours[:, None] + ends).flatten(), columns.repeat_interleave(tokens)
        after = series.values[each[1][:, None], each[0][:, None] + 1 + torch.arange(args.ahead)]
        left = after - series.values[each[1], each[0]][:, None] - series.linear[each[1], each[0]]
        return (model(patches(hours, columns)).flatten(0, 1) - left.to(args.device)).square().mean()

    def error_on(model: nn.Module, part: int) -> float:
        hours, count = series.at(part), len(series.values)
        left = (series.wanted(hours) - series.linear[:, hours]).flatten(0, 1).split(256)
        rows = torch.arange(count).repeat_interleave(len(hours)).split(256)
        lots = zip(hours.repeat(count).split(256), rows, left, strict=True)
        total = [
            float((model(patches(h, c))[:, -1].cpu() - rest).square().mean(1).sum()) for h, c, rest in lots
        ]
        return sum(total) / (count * len(hours))

    tests: list[float] = []

    def check(model: nn.Module) -> float:
        tests.append(round(error_on(model, 2), 4))
        return error_on(model, 1)

    name = f"{method}, seed {seed}"
    rates = {"lr": args.lr, "warmup": max(1, args.steps // 10), "cooldown": args.steps // 2}
    found = train(model, loss_of, args, **rates, name=name, check=check)
    best = min(range(len(tests)), key=lambda i: found["curve"][i][2])
    print(
        f"{name}: test error {tests[best]} after {found['curve'][best][0]} steps, {found['seconds']} s",
        flush=True,
    )
    return {"error": tests[best], "test_curve": tests} | found


def compare(runs: Sequence[Run], baselines: dict[str, float]) -> dict[str, Any]:
    """Return a verdict in words; and the errors by method, if every model is better than ridge regression."""
    bar = best_ridge(baselines)
    behind = sum(run["error"] >= bar for run in runs)
    if behind:
        words = f"{behind} of {len(runs)} models are no better than ridge regression ({bar})."
        return {"verdict": f"{words} Nothing is compared.", "compared": {}}
    rows = {}
    for method in dict.fromkeys(run["method"] for run in runs):
        mean, half = spread([run["error"] for run in runs if run["method"] == method])
        rows[method] = {"error": round(mean, 4), "half_range": round(half, 4)}
    words = f"All {len(runs)} models are better than ridge regression ({bar})"
    return {"verdict": f"{words}, so their errors can be compared.", "compared": rows}


def main() -> None:
    parser = make_parser(__doc__, "time_series")
    add = parser.add_argument
    add("--csv", type=Path, help="a file with a column of dates and columns of numbers, one row per hour")
    add("--hours", type=int, default=14_400, help="hours of the series to use")
    add("--methods", choices=METHODS, nargs="+", default=METHODS, help="kinds of attention to train")
    add("--context", type=int, default=336, help="hours that a forecast reads")
    add("--patch", type=int, default=12, help="hours of a token")
    add("--ahead", type=int, default=24, help="hours to forecast")
    add("--width", type=int, default=64, help="features per token")
    add("--heads", type=int, default=2, help="attention heads")
    add("--layers", type=int, default=2, help="blocks of a model")
    add("--window", type=int, default=8, help="tokens in a window")
    add("--steps", type=int, default=800, help="training steps of a model")
    add("--batch", type=int, default=32, help="rows of a batch")
    add(
        "--lr",
        type=float,
        default=2e-4,
        help="learning rate of embeddings; matrices learn at lr * 768 / fan-in",
    )
    add("--seeds", type=int, default=2, help="runs of each model")
    args = parse(parser)
    if args.csv is not None and args.name == "time_series":
        args.name = f"time_series_{args.csv.stem}"
    series = Series(read(args.csv, args.hours), args.context, args.ahead)
    baselines = series.baselines()
    print("without a model: " + ", ".join(f"{name} {error}" for name, error in baselines.items()), flush=True)
    results = Results(args.name, args, ("methods", "seeds"), baselines)
    runs = []
    for seed in range(args.seeds):
        for method in args.methods:
            key = {"method": method, "seed": seed}
            runs.append(results.once(key, lambda key=key: run(**key, args=args, series=series)))
    found = compare(runs, baselines)
    results.save(**found)
    print(found["verdict"])
    for method, row in found["compared"].items():
        print(f"{method}: {row['error']} +- {row['half_range']}")
    lines = {}
    for method in args.methods:
        curves = zip(
            *(zip(r["curve"], r["test_curve"], strict=True) for r in runs if r["method"] == method),
            strict=True,
        )
        lines[method] = [(each[0][0][0], *spread([test for _, test in each])) for each in curves]
    axes = ("training steps", f"mean squared error, {args.ahead} hours ahead")
    print(
        plot(
            args.name,
            "what a linear forecast leaves",
            axes,
            lines,
            {"ridge regression": best_ridge(baselines)},
        )
    )


if __name__ == "__main__":
    main()

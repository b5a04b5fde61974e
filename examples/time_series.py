"""Forecasting a series from a long context: plain attention, multi-level scores, a sliding window.

Each position of a causal model forecasts the next hours from all earlier ones. The error is that of the last
position, on the last fifth of the series. Without --csv the series is synthetic: daily and weekly cycles, a
trend that wanders, and noise. Kuang et al. (2025) call their results on ETT "promising" and give no figures.

    python examples/time_series.py --csv ETTh1.csv --column OT
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path

import torch
from decoder import Decoder, plain, plot, save, spread, train
from torch import Tensor, nn

import attnbias as ab
from attnbias.nn import MLRAttention


def read(path: Path | None, column: str, length: int) -> Tensor:
    """Read or make a series of hours."""
    if path is not None:
        with path.open() as file:
            return torch.tensor([float(row[column]) for row in csv.DictReader(file)])
    rng, hours = torch.Generator().manual_seed(0), torch.arange(length)
    wander = torch.randn(length, generator=rng).cumsum(0) / 20
    noise = torch.randn(length, generator=rng) / 4
    return torch.sin(hours * math.tau / 24) + 0.5 * torch.sin(hours * math.tau / 168) + wander + noise


def make_attention(method: str, width: int, heads: int, window: int) -> nn.Module:
    """Make one layer of a method."""
    if method == "multi-level":
        size = width // heads
        return MLRAttention(width, heads, [size // 2, size // 4, size // 8, size - 7 * size // 8])
    near = ab.Causal() & ab.Window(before=window)
    return plain(width, heads, near if method == "window" else ab.Causal())


def run(method: str, context: int, seed: int, args: argparse.Namespace, series: Tensor) -> float:
    """Train, and return the last position's mean squared error, for a series of variance 1."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    split, ahead = len(series) * 4 // 5, args.ahead
    known = series[:split]
    series = (series - known.mean()) / known.std()
    embed = nn.Linear(1, args.width, bias=False)
    model = Decoder(
        embed,
        args.width,
        args.layers,
        ahead,
        context,
        lambda _: make_attention(method, args.width, args.heads, args.window),
    )

    def forecast(model: nn.Module, starts: Tensor) -> Tensor:
        """Return squared errors [n, context, ahead]; the model predicts changes from the last value seen."""
        rows = series[starts[:, None] + torch.arange(context + ahead)]
        seen = rows[:, :context]
        wanted = rows.unfold(1, ahead, 1)[:, 1:]
        return (seen[..., None] + model(seen[..., None]) - wanted).square()

    def loss_of(model: nn.Module, step: int) -> Tensor:
        starts = torch.randint(split - context - ahead, (args.batch,), generator=rng)
        return forecast(model, starts).mean()

    train(
        model,
        loss_of,
        steps=args.steps,
        lr=args.lr,
        warmup=args.steps // 10,
        name=f"{method} {context} #{seed}",
    )
    with torch.no_grad():
        starts = torch.arange(split - context, len(series) - context - ahead, 12)
        found = torch.cat([forecast(model, part)[:, -1].mean(1) for part in starts.split(32)])
    return float(found.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--column", default="OT")
    parser.add_argument("--contexts", type=int, nargs="+", default=[96, 384])
    parser.add_argument("--ahead", type=int, default=24)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--window", type=int, default=48)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    series = read(args.csv, args.column, 12_000)
    started, runs, lines = time.time(), [], {}
    for method in ("plain", "multi-level", "window"):
        lines[method] = []
        for context in args.contexts:
            errors = [run(method, context, seed, args, series) for seed in range(args.seeds)]
            runs.append({"method": method, "context": context, "error": errors})
            print(runs[-1])
            lines[method].append((context, *spread(errors)))
    name = "time_series" if args.csv is None else f"time_series_{args.csv.stem}"
    save(name, {**vars(args), "csv": args.csv and args.csv.name}, runs, started)
    axes = ("context, hours", f"mean squared error, {args.ahead} hours ahead")
    print(plot(name, "forecasts from a long context", axes, lines))


if __name__ == "__main__":
    main()

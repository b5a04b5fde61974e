"""Nearest neighbour on the sphere: what a head cannot do if its scores have too few dimensions.

Given 16 random points on a sphere in n dimensions and one more, return the nearest of the 16. One attention
layer does it if its scores compare all n dimensions. Plain attention splits them among its heads, so a head
compares n / heads, its rank. Amsel et al. (2024) prove that many heads of small rank do not replace one of
full rank; Kuang et al. (2025) take that as a reason for scores from structured matrices. The bilinear
layers have a higher rank for the same parameters.

    python examples/nearest_neighbour.py           # n = 32, 2 seeds: 1 minute on one core
    python examples/nearest_neighbour.py --full    # the stored results, n = 8 to 64, 5 seeds: 10 minutes
    python examples/nearest_neighbour.py --full --device cuda

The error is the mean square of what is wrong: 1 for the guess 0, about 0.95 for the mean of the 16 points,
and 0 for the nearest point itself. Each model is stored when it is ready; a script that was interrupted goes
on with the next.

In the stored results the error falls with the rank in all 10 pairs of neighbouring ranks of plain attention.
Bilinear BTT with one head has 0.58 to 0.68 of the parameters of one full head, and 1.09, 1.13, 1.09 and 0.91
times its error for n = 8, 16, 32 and 64. All layers have one learning rate and 400 steps, and their errors
were still falling at the last.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from decoder import COLOURS, RESULTS, Results, Run, autocast, make_parser, parse, plain, spread, train
from torch import Tensor, nn

import attnbias as ab
from attnbias.nn import BilinearBTTAttention, BilinearMLRAttention
from attnbias.nn.structured import factor_width

POINTS = 16
RELATION = ab.Bipartite(POINTS)  # the last token is the query, and related to the points before it
LEAST = 4  # dimensions of a plain head; normalised, two dimensions are no more than a sign
MEASURED = 4096  # problems that each error is the mean of, the same for all layers
FULL_N, FULL_SEEDS = [8, 16, 32, 64], 5


@dataclass(frozen=True)
class Layer:
    """A layer to compare.

    Args:
        method: "plain", "bilinear MLR" or "bilinear BTT".
        heads: number of heads.
        n: dimensions of a point.
    """

    method: str
    heads: int
    n: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the score dimensions of a plain head, or those of MLR per slice, for each level."""
        size = self.n // self.heads
        return (size // 2, size // 4, size // 4) if self.method == "bilinear MLR" else (size,)

    @property
    def rank(self) -> int:
        """Return how many dimensions a head compares."""
        if self.method == "bilinear BTT":
            return self.n
        return sum(rank * 2**level for level, rank in enumerate(self.ranks))

    def make(self) -> nn.Module:
        if self.method == "bilinear BTT":
            return BilinearBTTAttention(self.n, self.heads, RELATION)
        if self.method == "bilinear MLR":
            return BilinearMLRAttention(self.n, self.heads, self.ranks, RELATION)
        return plain(self.n, self.heads, RELATION, scale=self.rank**0.5)

    def macs(self) -> int:
        """Count forward multiply-adds of a query and its points: keys, queries, scores, values, output."""
        n = self.n
        keys, query = n * n, n * n
        if self.method == "bilinear BTT":
            keys, query = self.heads * n * sum(factor_width(n)), 0
        scores = self.heads * self.rank
        return POINTS * (keys + scores + n * n + n) + query + n * n


def layers_for(n: int) -> list[Layer]:
    """Return the layers to compare: plain ones from heads of 4 dimensions to one head, and bilinear ones."""
    heads = [n // LEAST]
    while heads[-1] > 1:
        heads.append(heads[-1] // 2)
    others = [("bilinear MLR", 2), ("bilinear BTT", 8), ("bilinear BTT", 1)]
    return [*(Layer("plain", count, n) for count in heads), *(Layer(*other, n) for other in others)]


def draw(batch: int, n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw points and a query [batch, 17, n] on the sphere of radius sqrt(n), and which point is nearest."""
    x = nn.functional.normalize(torch.randn(batch, POINTS + 1, n, generator=rng), dim=-1) * n**0.5
    return x, (x[:, :POINTS] @ x[:, POINTS:].mT).squeeze(-1).argmax(1)


def pick(x: Tensor, nearest: Tensor) -> Tensor:
    return x[torch.arange(len(x), device=x.device), nearest]


def measure(model: nn.Module, n: int, device: str) -> tuple[float, float]:
    """Return the error, and the share of answers that are nearer to the right point than to others."""
    x, nearest = (part.to(device) for part in draw(MEASURED, n, torch.Generator().manual_seed(10**6)))
    found = model(x)[:, -1].float()
    right = (x[:, :POINTS] @ found[..., None]).squeeze(-1).argmax(1) == nearest
    return float((found - pick(x, nearest)).square().mean()), float(right.float().mean())


def baselines(n: int) -> dict[str, float]:
    """Return the errors of answers that need no training, on the problems that layers are measured on."""
    x, nearest = draw(MEASURED, n, torch.Generator().manual_seed(10**6))
    wanted, points = pick(x, nearest), x[:, :POINTS]
    scores = (points @ x[:, POINTS:].mT).mT / n
    sharpened = [(scores * sharp).softmax(-1) @ points for sharp in torch.logspace(0, 3, 61)]
    errors = {
        "the guess 0": float(wanted.square().mean()),
        "mean of the points": float((points.mean(1) - wanted).square().mean()),
        # One temperature for all problems, the best: what a layer of full rank can reach.
        "softmax of exact scores": min(float((x[:, 0] - wanted).square().mean()) for x in sharpened),
    }
    return {name: round(error, 4) for name, error in errors.items()}


def run(layer: Layer, seed: int, args: argparse.Namespace) -> Run:
    """Train one layer; return its error on problems that all layers share, and what it costs."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    n = layer.n
    model = layer.make().to(args.device)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, nearest = (part.to(args.device) for part in draw(args.batch, n, rng))
        return (model(x)[:, -1] - pick(x, nearest)).float().square().mean()

    def check(model: nn.Module) -> float:
        return measure(model, n, args.device)[0]

    name = f"n = {n}, {layer.method}, heads {layer.heads}, rank {layer.rank}, seed {seed}"
    rates = {"lr": args.lr, "warmup": 20, "cooldown": args.steps // 2}
    trained = train(model, loss_of, args, **rates, name=name, check=check, checks=4)
    with torch.no_grad(), autocast(args):
        error, found = measure(model, n, args.device)
    parameters = sum(p.numel() for p in model.parameters())
    sizes = {"rank": layer.rank, "parameters": parameters, "macs_per_query": layer.macs()}
    print(f"{name}: error {error:.3f}, nearest point found {found:.0%}, {trained['seconds']} s", flush=True)
    return sizes | {"error": round(error, 4), "found": round(found, 4)} | trained


def means(runs: Sequence[Run]) -> dict[Layer, tuple[float, float]]:
    """Return mean and half range of the errors of each layer's seeds."""
    layers = {layer_of(run): [r["error"] for r in runs if layer_of(r) == layer_of(run)] for run in runs}
    return {layer: spread(errors) for layer, errors in layers.items()}


def layer_of(run: Run) -> Layer:
    return Layer(run["method"], run["heads"], run["n"])


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """Say whether the error falls with the rank, and how far BTT of one head is from the full head."""
    error = means(runs)
    pairs = []  # plain layers of neighbouring ranks
    full: list[dict[str, Any]] = []
    for n in sorted({run["n"] for run in runs}):
        mine = sorted(
            (layer for layer in error if layer.n == n and layer.method == "plain"), key=lambda x: x.rank
        )
        for low, high in pairwise(mine):
            worst, best = error[high][0] + error[high][1], error[low][0] - error[low][1]
            pairs.append((error[high][0] < error[low][0], worst < best))
        head, train_of_one = (
            [run for run in runs if layer_of(run) == Layer(method, 1, n)]
            for method in ("plain", "bilinear BTT")
        )
        if head and train_of_one:
            ratio, share, found = (
                sum(run[key] for run in train_of_one) / sum(run[key] for run in head)
                for key in ("error", "parameters", "found")
            )
            full.append(
                {"n": n, "error": round(ratio, 3), "parameters": round(share, 3), "found": round(found, 3)}
            )
    falls, apart = (sum(each) for each in zip(*pairs, strict=True)) if pairs else (0, 0)
    words = f"The error falls with the rank in {falls} of {len(pairs)} pairs of neighbouring ranks"
    return {
        "verdict": f"{words}, and in {apart} the seeds do not overlap.",
        "btt_of_one_head_over_full_head": full,
    }


def draw_figure(runs: Sequence[Run], levels: dict[str, dict[str, float]], path: Path) -> None:
    """Plot error against the rank of a head, and against multiply-adds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    error = means(runs)
    sizes = sorted({layer.n for layer in error})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")

    def line(ax: Any, layers: Sequence[Layer], x: str, **style: Any) -> None:
        points = [(layer.rank if x == "rank" else layer.macs(), *error[layer]) for layer in layers]
        if points:
            ax.errorbar(*zip(*points, strict=True), capsize=2, **style)

    styles: dict[str, dict[str, Any]] = {
        "plain, heads of 4": {"color": "#777777", "marker": "o", "linestyle": ":"},
        "plain, one head": {"color": COLOURS[0], "marker": "o"},
        "bilinear MLR, 2 heads": {"color": COLOURS[2], "marker": "s", "linestyle": "--"},
        "bilinear BTT, 8 heads": {"color": COLOURS[3], "marker": "v", "linestyle": "-."},
        "bilinear BTT, one head": {"color": COLOURS[1], "marker": "^"},
    }
    kinds = [("plain", None), ("plain", 1), ("bilinear MLR", 2), ("bilinear BTT", 8), ("bilinear BTT", 1)]
    for (label, style), (method, heads) in zip(styles.items(), kinds, strict=True):
        mine = [Layer(method, heads or n // LEAST, n) for n in sizes]
        line(right, [layer for layer in mine if layer in error], "macs", label=label, **style)
    for n in sizes:
        plains = [layer for layer in error if layer.n == n and layer.method == "plain"]
        line(left, plains, "rank", color=COLOURS[0], marker="o", label="plain" if n == sizes[0] else None)
        low = min(plains, key=lambda layer: layer.rank)
        left.annotate(
            f"n = {n}", (low.rank, error[low][0]), (-8, 0), "data", "offset points", ha="right", va="center"
        )
    for label, method, heads in (
        ("bilinear MLR, 2 heads", "bilinear MLR", 2),
        ("bilinear BTT, one head", "bilinear BTT", 1),
    ):
        line(
            left,
            [Layer(method, heads, n) for n in sizes],
            "rank",
            label=label,
            **styles[label] | {"linestyle": ""},
        )
    for ax in (left, right):
        means_of = [levels[str(n)]["mean of the points"] for n in sizes]
        ax.axhspan(min(means_of), max(means_of) + 0.002, color="#dddddd")
        words = ("mean of the points, any n", (1, max(means_of)), (-2, 3), ("axes fraction", "data"))
        ax.annotate(*words, "offset points", ha="right", fontsize=8)
        ax.set(xscale="log", ylim=(0, 1.02))
        ax.grid(color="#e5e5e5")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8, loc="lower left")
    left.set_xscale("log", base=2)
    left.set_xticks(ranks := sorted({layer.rank for layer in error}), [str(rank) for rank in ranks])
    left.set(
        xlim=(2.2, 1.3 * max(ranks)),
        xlabel="dimensions that a head compares (its rank)",
        ylabel="error of the nearest of 16 points",
    )
    right.set(xlabel="forward multiply-adds of a query and its 16 points")
    figure.savefig(path, dpi=120, facecolor="white")
    plt.close(figure)


def main() -> None:
    parser = make_parser(__doc__, "nearest_neighbour")
    add = parser.add_argument
    add("--full", action="store_true", help=f"n = {FULL_N} and {FULL_SEEDS} seeds")
    add("--n", type=int, nargs="+", default=[32], help="dimensions, powers of 2 from 8 on")
    add("--seeds", type=int, default=2, help="runs of each model")
    add("--steps", type=int, default=400, help="training steps of a model")
    add("--batch", type=int, default=128, help="problems in a batch")
    add(
        "--lr",
        type=float,
        default=3e-3,
        help="learning rate of embeddings; matrices learn at lr * 768 / fan-in",
    )
    args = parse(parser)
    if args.full:
        args.n, args.seeds = FULL_N, FULL_SEEDS
    levels = {str(n): baselines(n) for n in args.n}
    for n, found in levels.items():
        print(f"n = {n}, without a model: " + ", ".join(f"{name} {error}" for name, error in found.items()))
    results = Results(args.name, args, ("n", "seeds", "full"), levels)
    runs = []
    for seed in range(args.seeds):  # outermost, so that an interrupted script has all layers
        for layer in (layer for n in args.n for layer in layers_for(n)):
            key = {"n": layer.n, "method": layer.method, "heads": layer.heads, "seed": seed}
            runs.append(results.once(key, lambda layer=layer, seed=seed: run(layer, seed, args)))
    found = compare(runs)
    results.save(**found)
    print(found["verdict"])
    for row in found["btt_of_one_head_over_full_head"]:
        words = f"{row['error']} times the error, {row['found']} times the nearest points found"
        print(f"n = {row['n']}, bilinear BTT of one head over one full head: {words}, ", end="")
        print(f"{row['parameters']} times the parameters")
    path = RESULTS / f"{args.name}.png"
    draw_figure(runs, levels, path)
    print(path)


if __name__ == "__main__":
    main()

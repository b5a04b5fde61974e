"""The model that examples train, a small pre-norm decoder over any attention layer, and tools to store a run.

Settings as in Kuang et al. (2025): GELU MLP of 4 times the width, learned positions, zero output projections,
learning rates by fan-in (``attnbias.nn.parameter_groups``), warm-up and then a constant rate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from progress import Bar
from torch import Tensor, nn

import attnbias as ab
from attnbias.nn import MLRAttention, parameter_groups

RESULTS = Path("results")

MakeAttention = Callable[[int], nn.Module]  # takes the layer's number


def plain(width: int, heads: int, relation: ab.Relation, scale: float = 8.0) -> nn.Module:
    """Make the baseline: softmax attention with normalised queries and keys, scaled by 8 / head size."""
    return MLRAttention(width, heads, [width // heads], relation, scale=scale)


class Block(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attention = attention
        up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        nn.init.normal_(up.weight, std=width**-0.5)
        nn.init.zeros_(down.weight)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return x


class Decoder(nn.Module):
    """A decoder from embedded tokens [B, T, .] to predictions [B, T, outputs]."""

    def __init__(
        self,
        embed: nn.Module,
        width: int,
        layers: int,
        outputs: int,
        length: int,
        attention: MakeAttention,
        *,
        deviation: float = 0.02,  # of the initial positions
    ) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Parameter(torch.randn(length, width) * deviation)
        self.blocks = nn.Sequential(*(Block(width, attention(layer)) for layer in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, outputs, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        out: Tensor = self.head(self.norm(self.blocks(x + self.positions[: x.shape[1]])))
        return out


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], Tensor],
    *,
    steps: int,
    lr: float,
    warmup: int,
    name: str,
) -> list[float]:
    """Train, and return the loss of each step; ``loss_of`` gets the step's number."""
    optimizer = torch.optim.AdamW(parameter_groups(model, lr), betas=(0.9, 0.95), eps=1e-20, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / warmup))
    losses = []
    with Bar(name, steps) as bar:
        for step in range(steps):
            loss = loss_of(model, step)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            bar.advance(f"loss {losses[-1]:.3f}")
    return losses


def save(name: str, settings: dict[str, Any], runs: list[dict[str, Any]], started: float) -> Path:
    """Store the results of a script together with its options."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    found = {
        "settings": settings,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "minutes": round((time.time() - started) / 60, 1),
        "runs": runs,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    return path


def plot(
    name: str, title: str, axes: tuple[str, str], lines: dict[str, Sequence[tuple[float, float, float]]]
) -> Path:
    """Plot (x, mean, spread) for each line, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    for label, points in lines.items():
        x, y, spread = zip(*sorted(points), strict=True)
        ax.errorbar(x, y, spread, label=label, marker="o", capsize=3)
    ax.set(title=title, xlabel=axes[0], ylabel=axes[1], xscale="log", yscale="log")
    ax.legend(frameon=False)
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return path


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half the distance from the smallest to the largest."""
    return sum(values) / len(values), (max(values) - min(values)) / 2

"""The parts that the examples of structured attention share: a small decoder, its training, stored runs.

The model's settings are those of Kuang et al. (2025): pre-norm blocks, a GELU MLP of 4 times the width,
learned positions, zero output projections, learning rates by fan-in (``attnbias.nn.parameter_groups``),
warm-up and then a constant rate. A run may end with a falling rate, which the paper's do not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from progress import Bar
from torch import Tensor, nn

import attnbias as ab
from attnbias.nn import MLRAttention, parameter_groups

RESULTS = Path("results")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # of Okabe and Ito
MARKERS = "osD^vP"

MakeAttention = Callable[[int], nn.Module]  # takes the layer's number
Run = dict[str, Any]


def plain(width: int, heads: int, relation: ab.Relation, scale: float = 8.0) -> nn.Module:
    """Make the baseline: softmax attention with normalised queries and keys, scaled by 8 / head size."""
    return MLRAttention(width, heads, [width // heads], relation, scale=scale)


class ReadIn(nn.Module):
    """Map numbers to the model's width.

    It is no ``nn.Linear``, so ``parameter_groups`` gives it the rate of an embedding. With a fan-in of 1 a
    linear layer would learn at 768 times the rate.
    """

    def __init__(self, features: int, width: int, deviation: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, width) * deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens @ self.weight


def sines(length: int, width: int, deviation: float) -> Tensor:
    """Return sines and cosines of the position [length, width], from which near places are found sooner."""
    angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], 1) * 2**0.5 * deviation


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
    """A decoder from tokens [B, T, .] that ``embed`` reads to predictions [B, T, outputs] in float32."""

    def __init__(
        self,
        embed: nn.Module,
        width: int,
        layers: int,
        outputs: int,
        positions: Tensor,  # [T, width] at the start; they are learned
        attention: MakeAttention,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Parameter(positions)
        self.blocks = nn.Sequential(*(Block(width, attention(layer)) for layer in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, outputs, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        out: Tensor = self.head(self.norm(self.blocks(x + self.positions[: x.shape[1]])))
        return out.float()  # losses are computed in float32, also in autocast


def make_parser(about: str | None, name: str, paper: dict[str, Any] | None = None) -> argparse.ArgumentParser:
    """Make a parser whose help is the script's docstring, with the options that all scripts have."""

    class Format(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass

    parser = argparse.ArgumentParser(description=about, formatter_class=Format)
    parser.add_argument("--device", default="cpu", help="where to train, for example cuda")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 (autocast)")
    parser.add_argument("--accumulate", type=int, default=1, help="batches whose gradients make one step")
    parser.add_argument("--name", default=name, help="name of the files in results/")
    if paper is not None:
        known = [(key, value) for key, value in paper.items() if value is not None]
        words = ", ".join(f"{key} {_in_words(value)}" for key, value in known)
        about_paper = f"start from the paper's settings, for a GPU: {words}; options override them"
        parser.add_argument("--paper", action="store_true", help=about_paper.replace("%", "%%"))
        parser.set_defaults(presets=paper)
    return parser


def parse(parser: argparse.ArgumentParser, given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse options; those of the paper are defaults if ``--paper`` is among them."""
    args = parser.parse_args(given)
    presets = vars(args).pop("presets", {})
    if vars(args).pop("paper", False):
        parser.set_defaults(**presets)
        args = parser.parse_args(given)
        del args.presets, args.paper
    return args


def _in_words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def autocast(args: argparse.Namespace) -> torch.autocast:
    """Return the context of a forward pass: bfloat16 if it was asked for."""
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.bf16)


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], Tensor],
    args: argparse.Namespace,
    *,
    lr: float,
    warmup: int,
    cooldown: int = 0,
    name: str,
    check: Callable[[nn.Module], float],
    checks: int = 10,
) -> Run:
    """Train, and return the curve [[step, seconds, what ``check`` returns], ...] and the seconds.

    Seconds are of this process on a CPU, where others may run beside it, and on the clock otherwise. They
    leave out the checks.

    Args:
        model: already on its device.
        loss_of: gets the model and the step's number, and draws a batch; called ``args.accumulate`` times.
        args: ``steps``, ``accumulate``, ``bf16`` and ``device``.
        lr: rate of embeddings; matrices learn at ``lr * 768 / fan_in``.
        warmup: steps in which the rate grows to ``lr``.
        cooldown: last steps, in which it falls to zero.
        name: what the progress bar says.
        check: measures the model without gradients, ``checks`` times.
        checks: how often; the last check is after the last step.
    """
    optimizer = torch.optim.AdamW(parameter_groups(model, lr), betas=(0.9, 0.95), eps=1e-20, weight_decay=0)

    def rate(step: int) -> float:
        return min(1, (step + 1) / warmup, (args.steps - step) / (cooldown + 1))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    clock = time.process_time if torch.device(args.device).type == "cpu" else time.perf_counter
    curve: list[tuple[int, float, float]] = []
    spent, every = 0.0, max(1, args.steps // checks)
    with Bar(name, args.steps) as bar:
        for step in range(args.steps):
            started, total = clock(), 0.0
            optimizer.zero_grad()
            for _ in range(args.accumulate):
                with autocast(args):
                    loss = loss_of(model, step) / args.accumulate
                loss.backward()
                total += loss.item()  # waits for the device, so the clock sees its work
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            spent += clock() - started
            if (args.steps - 1 - step) % every == 0:
                with torch.no_grad(), autocast(args):
                    curve.append((step + 1, round(spent, 1), round(check(model), 4)))
            bar.advance(f"loss {total:.3f}")
    return {"curve": curve, "seconds": round(spent, 1)}


class Results:
    """The runs of a script, stored after each one; a script that starts again continues with the next.

    Args:
        name: of the file, results/<name>.json.
        args: the script's options.
        axes: the options that say which runs there are. All others must be those of the stored file.
        baselines: what anyone gets without a model, by name.
    """

    def __init__(
        self, name: str, args: argparse.Namespace, axes: Iterable[str], baselines: dict[str, Any]
    ) -> None:
        RESULTS.mkdir(exist_ok=True)
        self.path = RESULTS / f"{name}.json"
        left_out = {"name", *axes}
        options = {key: _storable(value) for key, value in vars(args).items() if key not in left_out}
        machine = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        self.found: dict[str, Any] = {"settings": options, **machine, "baselines": baselines, "runs": []}
        if self.path.exists():
            old = json.loads(self.path.read_text())
            for key, value in options.items():
                had = old["settings"].get(key)
                if had != value:
                    words = f"{self.path}: wanted runs with {key} = {had}, as those stored, got {value}"
                    raise SystemExit(f"{words}; choose another --name, or delete the file")
            self.found["runs"] = old["runs"]

    def once(self, key: Run, make: Callable[[], Run]) -> Run:
        """Return the run with this key if it is stored; otherwise make and store it."""
        runs: list[Run] = self.found["runs"]
        for run in runs:
            if key.items() <= run.items():
                return run
        runs.append(key | make())
        self.save()
        return runs[-1]

    def save(self, **more: object) -> None:
        """Store the runs, and more about all of them."""
        self.found |= more
        waiting = self.path.with_suffix(".part")  # so that an interrupt leaves the old file or the new one
        waiting.write_text(_to_json(self.found) + "\n")
        waiting.replace(self.path)


def _storable(value: object) -> object:
    """Return an option as JSON gives it back; of a file the name, since its folder is nobody's concern."""
    if isinstance(value, Path):
        return value.name
    return list(value) if isinstance(value, tuple) else value


def _to_json(found: dict[str, Any]) -> str:
    """Write one line for each run, which a person can read."""
    head = json.dumps({key: value for key, value in found.items() if key != "runs"}, indent=1)
    runs = ",\n".join(f"  {json.dumps(run)}" for run in found["runs"])
    return f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}'


def plot(
    name: str,
    title: str,
    axes: tuple[str, str],
    lines: dict[str, Sequence[tuple[float, float, float]]],
    baselines: dict[str, float],
) -> Path:
    """Plot (x, mean, spread) for each line and a level for each baseline, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(8, 4), layout="constrained")
    for (label, points), colour, marker in zip(lines.items(), COLOURS, MARKERS, strict=False):
        x, y, spread = zip(*sorted(points), strict=True)
        ax.errorbar(x, y, spread, label=label, color=colour, marker=marker, capsize=3)
    for (label, level), style in zip(baselines.items(), ("--", ":", "-."), strict=False):
        ax.axhline(level, label=label, color="#555555", linestyle=style)
    ax.set(title=title, xlabel=axes[0], ylabel=axes[1], xscale="log", yscale="log")
    ax.tick_params(axis="x", which="both", rotation=45)
    figure.legend(frameon=False, loc="outside right upper")
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half the distance from the smallest to the largest."""
    return sum(values) / len(values), (max(values) - min(values)) / 2

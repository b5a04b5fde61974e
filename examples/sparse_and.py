"""Does a relation help exactly when it fits? The AND of 3 of T bits, read by one attention layer.

One token attends to T bits; a small network maps what it read to the label. Three models differ only in the
relation between that token and the bits: 32 keys that hold the right three bits; all keys; 32 keys that hold
none of them. An inductive bias should help if it fits the data, and must hurt if it does not. Edelman et al.
(2022) show that attention learns such sparse functions from a number of samples that grows as log T.

    python examples/sparse_and.py            # two slices of the grid: three to four minutes on one core
    python examples/sparse_and.py --full     # the whole grid, to 1,024 tokens: four times as long or more

Bits are 1 with probability 2^(-1/3), so that bits which do not matter look like those that do. Half of the
samples of every set have label 1, so that chance is 50 %. The same bits alone, without the label's three,
say nothing about the label: the wrong relation cannot do better than chance on new samples, whatever its loss
in training. Baselines: the majority class, and logistic regression on all bits or on the same 32.

It writes results/sparse_and.json and .png after each point. Needs scikit-learn and matplotlib.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from progress import Bar
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import attnbias as ab
from attnbias.nn import EncoderDecoderAttention

ONES = 2 ** (-1 / 3)  # probability of a 1: three bits are all 1 half of the time
KEYS, BITS, HELD_OUT = 32, 3, 2000
RELATIONS = ("right keys", "all keys", "wrong keys")
TOKENS, SAMPLES = (64, 128, 256, 512), (25, 50, 100, 200)
FULL_TOKENS, FULL_SAMPLES = (64, 128, 256, 512, 1024), (12, 25, 50, 100, 200, 400)
MIDDLE = {"tokens": 256, "samples": 50}  # where the two slices of the grid cross
WIDTH, RATE, BATCH = 32, 5e-3, 64
LEARNED = 1e-3  # training ends at this loss
STARTS = 3


def draw(count: int, tokens: int, right: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw samples [count, tokens] of bits, and labels: the AND of the bits ``right``, half of them 1."""
    label = torch.arange(count) % 2
    bits = (torch.rand(count, tokens, generator=rng) < ONES).long()
    patterns = torch.cartesian_prod(*[torch.arange(2)] * BITS)[:-1]  # all but 1, 1, 1
    ones = patterns.sum(1)
    chosen = torch.multinomial(ONES**ones * (1 - ONES) ** (BITS - ones), count, True, generator=rng)
    bits[:, right] = torch.where(label[:, None] == 1, 1, patterns[chosen])
    return bits, label


def make_task(samples: int, tokens: int, seed: int) -> tuple[Tensor, Any, Any]:
    """Return all tokens in an order whose first three hold the label, samples to learn from, and new ones."""
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(tokens, generator=rng)
    known, new = (draw(count, tokens, order[:BITS], rng) for count in (samples, HELD_OUT))
    return order, known, new


class Reader(nn.Module):
    """One token attends to the bits over a relation; a network maps what it read to a score."""

    def __init__(self, tokens: int, keys: Tensor | None) -> None:
        super().__init__()
        self.bit, self.place = nn.Embedding(2, WIDTH), nn.Parameter(torch.randn(tokens, WIDTH))
        self.token = nn.Parameter(torch.randn(1, WIDTH))
        self.attention = EncoderDecoderAttention(WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 1))
        relation = ab.Full() if keys is None else ab.Neighbors(keys[None])  # of the single query
        self.layout = relation.layout(1, tokens)

    def forward(self, bits: Tensor) -> Tensor:  # [B, T]
        read = self.attention(
            self.token.expand(len(bits), 1, -1), self.bit(bits) + self.place, relation=self.layout
        )
        score: Tensor = self.network(read).flatten()  # [B]
        return score


def keys_of(relation: str, order: Tensor) -> Tensor | None:
    """Return the keys of a relation, None for all; the first three of the order hold the label."""
    return {"right keys": order[:KEYS], "all keys": None, "wrong keys": order[KEYS : 2 * KEYS]}[relation]


def learn(relation: str, samples: int, tokens: int, seed: int, steps: int) -> dict[str, float]:
    """Train on some samples, and return the accuracy on others.

    Training from some starts only learns the samples by heart, even where the relation fits, and takes many
    steps for it. So there are several starts, and the one that needs the fewest steps is tested: no new
    sample is looked at before.
    """
    order, known, (new, answer) = make_task(samples, tokens, seed)
    began, found = time.process_time(), []
    for start in range(STARTS):
        torch.manual_seed(STARTS * seed + start)
        model = Reader(tokens, keys_of(relation, order))
        taken, loss = train(model, known, steps)
        found.append((taken, loss, start, model))
    taken, loss, _, model = min(found, key=lambda each: each[:3])
    with torch.no_grad():
        right = (torch.cat([model(part) for part in new.split(250)]) > 0) == answer.bool()
    return {
        "accuracy": float(right.float().mean()),
        "loss": loss,
        "steps": taken,
        "seconds": round(time.process_time() - began, 2),
    }


def train(model: nn.Module, known: tuple[Tensor, Tensor], steps: int) -> tuple[int, float]:
    """Train until the loss of a batch is small; return the steps that it took, and the last loss."""
    bits, label = known
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    for step in range(steps):
        batch = torch.randperm(len(bits))[:BATCH]
        loss = nn.functional.binary_cross_entropy_with_logits(model(bits[batch]), label[batch].float())
        if loss < LEARNED:
            return step, loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return steps, loss.item()


def baselines(samples: int, tokens: int, seed: int) -> dict[str, float]:
    """Return the accuracies of models without attention, on the same samples as ``learn``."""
    order, (bits, label), (new, answer) = make_task(samples, tokens, seed)
    found = {"majority": DummyClassifier().fit(bits, label).score(new, answer)}
    for relation in RELATIONS:
        keys = keys_of(relation, order)
        keys = torch.arange(tokens) if keys is None else keys
        model = LogisticRegression().fit(bits[:, keys], label)
        found[f"logistic, {relation}"] = model.score(new[:, keys], answer)
    return found


def run_point(tokens: int, samples: int, args: argparse.Namespace, bar: Bar) -> list[dict[str, Any]]:
    """Return a row of results for each model and baseline at one point of the grid."""
    place, rows = {"tokens": tokens, "samples": samples}, []
    for relation in RELATIONS:
        found = []
        for seed in range(args.seeds):
            found.append(learn(relation, samples, tokens, seed, args.steps))
            bar.advance(f"{tokens} tokens, {samples} samples, {relation}: {found[-1]['accuracy']:.0%}")
        lists = {key: [each[key] for each in found] for key in found[0]}
        rows.append({"model": relation, **place, **lists})
    scores = [baselines(samples, tokens, seed) for seed in range(args.seeds)]
    rows += [
        {"model": name, **place, "accuracy": [float(each[name]) for each in scores]} for name in scores[0]
    ]
    return rows


def separation(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each point, the worst seed of the right keys less the best seed of the wrong ones."""
    at = {(row["model"], row["tokens"], row["samples"]): row["accuracy"] for row in rows}
    points = [key[1:] for key in at if key[0] == "right keys"]
    return [
        {
            "tokens": tokens,
            "samples": samples,
            "worst right less best wrong": round(
                min(at["right keys", tokens, samples]) - max(at["wrong keys", tokens, samples]), 4
            ),
        }
        for tokens, samples in points
    ]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot accuracy by samples and by tokens: means over seeds, and each seed of the models."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4.2), dpi=100, sharey=True, layout="constrained")
    colours = {"right keys": "tab:green", "all keys": "tab:blue", "wrong keys": "tab:red"}
    for axes, along, fixed in zip(panels, ("samples", "tokens"), ("tokens", "samples"), strict=True):
        chosen = [row for row in rows if row[fixed] == MIDDLE[fixed]]
        if not chosen:  # an interrupted run may not have come to it
            continue
        for name in dict.fromkeys(row["model"] for row in chosen):
            points = sorted((row[along], row["accuracy"]) for row in chosen if row["model"] == name)
            x, y = [point[0] for point in points], [100 * mean(point[1]) for point in points]
            colour = colours.get(name.removeprefix("logistic, "), "grey")
            if name in colours:
                axes.plot(x, y, "o-", color=colour, label=name)
                for place, seeds in points:
                    axes.plot(
                        [place] * len(seeds), [100 * seed for seed in seeds], ".", color=colour, alpha=0.4
                    )
            else:
                style = ":" if name == "majority" else "--"
                axes.plot(x, y, style, color=colour, linewidth=1, label=name)
        axes.set(xscale="log", xlabel=f"{along}, with {MIDDLE[fixed]} {fixed}")
        ticks = sorted({row[along] for row in chosen})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
    panels[0].set_ylabel("accuracy on new samples, %")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize="small", ncols=4, loc="outside lower center")
    figure.savefig(path)
    pyplot.close(figure)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print mean and deviation over the seeds, a line for each point."""
    for tokens, samples in dict.fromkeys((row["tokens"], row["samples"]) for row in rows):
        cells = []
        for row in rows:
            if (row["tokens"], row["samples"]) == (tokens, samples):
                spread = stdev(row["accuracy"]) if len(row["accuracy"]) > 1 else 0.0
                cells.append(f"{row['model']} {mean(row['accuracy']):.1%} +- {spread:.1%}")
        print(f"{tokens:5} tokens, {samples:4} samples:  " + "; ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="every pair of tokens and samples; name: sparse_and_full"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="most steps of training")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.full:
        points = [(tokens, samples) for tokens in FULL_TOKENS for samples in FULL_SAMPLES]
    else:
        points = [(tokens, MIDDLE["samples"]) for tokens in TOKENS]
        points += [(MIDDLE["tokens"], n) for n in SAMPLES if n != MIDDLE["samples"]]
    name, rows = "sparse_and_full" if args.full else "sparse_and", []
    args.out.mkdir(parents=True, exist_ok=True)
    with Bar("sparse AND", len(points) * len(RELATIONS) * args.seeds) as bar:
        for tokens, samples in points:
            rows += run_point(tokens, samples, args, bar)
            kept = {
                "settings": {
                    "seeds": args.seeds,
                    "starts": STARTS,
                    "steps": args.steps,
                    "rate": RATE,
                    "width": WIDTH,
                    "keys": KEYS,
                },
                "torch": torch.__version__,
                "machine": platform.machine(),
                "separation": separation(rows),
                "rows": rows,
            }
            (args.out / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
            plot(rows, args.out / f"{name}.png")
    print_table(rows)


if __name__ == "__main__":
    main()

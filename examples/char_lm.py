"""Character language models: do scores with more dimensions for near pairs predict text better?

It trains plain attention, multi-level scores (MLR attention) and a sliding window on the same characters.
The window is as long as the multiply-adds of multi-level scores allow. Tables that count sequences of
characters are scored on the same test text. If a model is worse than the table of three characters, nothing
was learned that attention could help with, and the script compares nothing.

    python examples/char_lm.py --bf16                       # the stored results: 12 models
    python examples/char_lm.py --steps 200 --seeds 1        # a look: 2 minutes
    python examples/char_lm.py --text my_corpus.txt
    python examples/char_lm.py --paper --device cuda --bf16 --text openwebtext.txt

A model takes 75 seconds on one core with AVX512-BF16 and --bf16, more than twice that without, and each is
stored when it is ready: run the command again after an interrupt, and it goes on with the next. The text is
the source of Python's standard library. The settings of --paper are those of Kuang et al. (2025) for
OpenWebText, days on a GPU; they have never run here.

In the stored results, at the better of two rates, plain attention reaches 1.49 nats per character, the window
1.49 and multi-level scores 1.57; the trigram table has 1.79, that of five characters 1.38. So the paper's
small advantage of multi-level scores over both does not show with 3 layers, 2.5 million characters and 256 of
context. The better rate was the higher one for all, so higher ones may be better still.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from decoder import Decoder, Results, Run, autocast, make_parser, parse, plain, plot, sines, spread, train
from torch import Tensor, nn

import attnbias as ab
from attnbias.nn import MLRAttention

KINDS = 96  # newline and the printable characters of ASCII
MOST = 5  # characters of the longest sequences in a table
TABLED, TESTED = 10_000_000, 1_000_000  # characters that tables count at most, and that models are tested on
SEEN = 64  # stretches of the test text in a check during training
METHODS = ("plain", "multi-level", "window", "mix")

# The paper's settings. "mix" has a window in two of three layers, of a quarter of the window's length.
PAPER: dict[str, Any] = {
    "methods": list(METHODS),
    "widths": [256, 384, 512, 768],
    "layers": 6,
    "head_size": 64,
    "length": 1024,
    "ranks": [32, 8, 6, 4, 4, 4, 4, 2],
    "window": 512,
    "batch": 4,
    "accumulate": 8,
    "steps": 100_000,
    "warmup": 2000,
    "cooldown": 0,
    "start": "small",
    "lrs": None,  # those below
    "limit": 4 * 10**9,
}
# Its learning rates by method and width. Those of "mix" are for GSWA, two softmaxes added, which is not here.
PAPER_RATES = {
    "plain": {256: 3e-3, 384: 3e-3, 512: 1.65e-3, 768: 1.65e-3},
    "multi-level": {256: 3e-3, 384: 1.65e-2, 512: 3e-3, 768: 1.65e-2},
    "window": {256: 3e-3, 384: 3e-3, 512: 3e-3, 768: 3e-3},
    "mix": {256: 3e-3, 384: 3e-3, 512: 3e-3, 768: 1.65e-2},
}
RATES = (5e-4, 1e-3)  # ours


def read(text: Path | None, limit: int) -> tuple[Tensor, Tensor]:
    """Return characters as bytes below 96: a part to train on, and from the last twentieth one to test on."""
    if text is not None:
        with text.open("rb") as file:
            raw = file.read(limit)
    else:
        raw = b""
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            if len(raw) < limit:
                raw += path.read_bytes() + b"\n"
        raw = raw[:limit]
    tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    tokens = tokens[(tokens == 10) | ((tokens >= 32) & (tokens < 127))]
    tokens = torch.where(tokens == 10, 95, tokens - 32)
    split = len(tokens) * 19 // 20
    return tokens[:split], tokens[split : split + TESTED]


def table_losses(known: Tensor, test: Tensor, most: int = MOST) -> dict[str, float]:
    """Return the loss of tables of 1 to ``most`` characters, in nats per character of the test text.

    A table counts the sequences of n characters. A character that followed the n - 1 before it c times of C,
    among T kinds of followers, has the probability (c + T p) / (C + T), where p is that of the table for
    n - 1 (Witten and Bell). All are scored on the same characters: those with ``most`` - 1 before them.
    """
    chance = torch.full((len(test) - most + 1,), 1 / KINDS, dtype=torch.float64)
    losses = {}
    for n in range(1, most + 1):
        seen, counts = _codes(known, n).unique(return_counts=True)
        histories, place, kinds = (seen // KINDS).unique_consecutive(return_inverse=True, return_counts=True)
        totals = torch.zeros_like(kinds).index_add(0, place, counts)
        wanted = _codes(test, n)[most - n :]
        count = _look_up(wanted, seen, counts)
        total, kind = (_look_up(wanted // KINDS, histories, x) for x in (totals, kinds))
        chance = torch.where(total > 0, (count + kind * chance) / (total + kind).clamp(min=1), chance)
        losses[f"table of {n}" if n > 1 else "frequencies"] = round(-float(chance.log().mean()), 4)
    return losses


def _codes(text: Tensor, n: int) -> Tensor:
    """Return each sequence of n characters as one number."""
    return (text.long().unfold(0, n, 1) * KINDS ** torch.arange(n - 1, -1, -1)).sum(1)


def _look_up(wanted: Tensor, names: Tensor, values: Tensor) -> Tensor:
    """Return the value of each name, names being sorted, and 0 for those that are missing."""
    at = torch.searchsorted(names, wanted).clamp(max=len(names) - 1)
    return torch.where(names[at] == wanted, values[at], 0)


def keys_read(length: int, window: int) -> float:
    """Return how many keys a query has on average, with a window that counts itself."""
    window = min(window, length)
    return window - window * (window - 1) / (2 * length)


def score_share(args: argparse.Namespace) -> float:
    """Return the multiply-adds of multi-level scores as a share of plain ones, over causal pairs."""
    T = args.length
    kept = sum(rank * keys_read(T // 2**level, T) for level, rank in enumerate(args.ranks))
    return float(kept / args.head_size / keys_read(T, T))


def window_of(args: argparse.Namespace) -> int:
    """Return the window that was asked for, or that with the multiply-adds of multi-level scores."""
    T: int = args.length
    most = (score_share(args) + 1) / 2 * keys_read(T, T)
    return args.window or max(w for w in range(1, T + 1) if keys_read(T, w) <= most or w == 1)


def is_near(method: str, layer: int) -> bool:
    return method == "window" or (method == "mix" and layer % 3 > 0)


def span(method: str, args: argparse.Namespace) -> int:
    """Return how many keys a layer with a window reads, itself included."""
    return window_of(args) // 4 if method == "mix" else window_of(args)


def make_attention(method: str, layer: int, width: int, args: argparse.Namespace) -> nn.Module:
    """Make one layer of a method."""
    heads = width // args.head_size
    if method == "multi-level":
        return MLRAttention(width, heads, args.ranks, scale=1.0)
    near = ab.Causal() & ab.Window(before=span(method, args) - 1)
    return plain(width, heads, near if is_near(method, layer) else ab.Causal())


def macs(method: str, width: int, args: argparse.Namespace) -> int:
    """Count forward multiply-adds per character over related pairs, without embedding and head."""
    total = 0.0
    for layer in range(args.layers):
        keys = keys_read(args.length, span(method, args) if is_near(method, layer) else args.length)
        share = score_share(args) if method == "multi-level" else 1.0
        total += 12 * width**2 + keys * width * (share + 1)
    return round(total)


def run(
    method: str, width: int, lr: float, seed: int, args: argparse.Namespace, data: tuple[Tensor, Tensor]
) -> Run:
    """Train a model; return its loss on the test text in nats per character, and its curve."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    T = args.length
    known, test = (part.to(args.device) for part in data)
    embed = nn.Embedding(KINDS, width)
    nn.init.normal_(embed.weight, std=0.02 if args.start == "small" else 1.0)
    positions = torch.randn(T, width) * 0.02 if args.start == "small" else sines(T, width, 0.5)

    def make(layer: int) -> nn.Module:
        return make_attention(method, layer, width, args)

    model = Decoder(embed, width, args.layers, KINDS, positions, make).to(args.device)
    stretches = torch.arange(0, len(test) - T, T)

    def loss_on(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
        rows = text[(starts[:, None] + torch.arange(T + 1)).to(args.device)].long()
        return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return loss_on(model, known, torch.randint(len(known) - T - 1, (args.batch,), generator=rng))

    def check(model: nn.Module, most: int = SEEN) -> float:
        parts = stretches[:most].split(args.batch)
        return sum(float(loss_on(model, test, part)) * len(part) for part in parts) / len(stretches[:most])

    name = f"{method}, width {width}, rate {lr:g}, seed {seed}"
    rates = {"lr": lr, "warmup": args.warmup, "cooldown": args.cooldown}
    found = train(model, loss_of, args, **rates, name=name, check=check, checks=20)
    with torch.no_grad(), autocast(args):
        loss = round(check(model, len(stretches)), 4)
    print(f"{name}: {loss} nats per character after {args.steps} steps, {found['seconds']:.0f} s", flush=True)
    return {"loss": loss, "macs_per_character": macs(method, width, args)} | found


def compare(runs: Sequence[Run], baselines: dict[str, float]) -> dict[str, Any]:
    """Return a verdict in words and, if it allows, what each method reached at its best rate, and when.

    A method whose models are no better than the trigram table learned nothing that attention could help with.
    """
    bar = baselines["table of 3"]
    best = {}
    for width, method in dict.fromkeys((run["width"], run["method"]) for run in runs):
        mine = [run for run in runs if (run["width"], run["method"]) == (width, method)]
        rates = {run["lr"]: [other for other in mine if other["lr"] == run["lr"]] for run in mine}
        best[width, method] = min(rates.values(), key=lambda same: spread([run["loss"] for run in same]))
    chosen = [run for same in best.values() for run in same]
    behind = sum(run["loss"] >= bar for run in chosen)
    if behind:
        words = f"{behind} of {len(chosen)} models are no better than a trigram table ({bar}): train longer."
        return {"verdict": f"{words} Nothing is compared.", "compared": []}
    rows = []
    for (width, method), same in best.items():
        # The loss that every model of this width reached, and the first check at which it had.
        goal = max(run["curve"][-1][2] for run in chosen if run["width"] == width)
        reached = [next(point for point in run["curve"] if point[2] <= goal) for run in same]
        mean, half = spread([run["loss"] for run in same])
        rows.append(
            {"method": method, "width": width, "lr": same[0]["lr"], "seeds": len(same)}
            | {"loss": round(mean, 4), "half_range": round(half, 4), "goal": goal}
            | {"steps_to_goal": [point[0] for point in reached]}
            | {"seconds_to_goal": [round(point[1]) for point in reached]}
        )
    words = f"The {len(chosen)} models at the best rates are better than a trigram table ({bar})"
    return {"verdict": f"{words}, so their losses can be compared.", "compared": rows}


def make_options() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, "char_lm", PAPER)
    add = parser.add_argument
    add("--text", type=Path, help="a text file; without it, the source of Python's standard library")
    add("--limit", type=int, default=4_000_000, help="bytes of the text to read")
    add("--methods", choices=METHODS, nargs="+", default=METHODS[:3], help="kinds of attention to train")
    add("--widths", type=int, nargs="+", default=[128], help="features per token; each is a model")
    add("--head-size", type=int, default=64, help="features of a head")
    add("--layers", type=int, default=3, help="blocks of a model")
    add("--length", type=int, default=256, help="characters of context")
    add("--ranks", type=int, nargs="+", default=[32, 16, 8, 8], help="score dimensions per level")
    add("--window", type=int, help="keys of a window; without it, as many as cost what multi-level scores do")
    add("--steps", type=int, default=2400, help="training steps of a model")
    add("--warmup", type=int, default=100, help="steps in which the learning rate grows")
    add("--cooldown", type=int, default=2300, help="last steps, in which it falls")
    add("--start", choices=("sines", "small"), default="sines", help="positions; small is the paper's noise")
    add("--batch", type=int, default=4, help="stretches of text in a batch")
    add("--lrs", type=float, nargs="+", default=RATES, help="rates to try; with --paper, those of the paper")
    add("--seeds", type=int, default=2, help="runs of each model")
    return parser


def main() -> None:
    args = parse(make_options())
    data = read(args.text, args.limit)
    print(f"text: {len(data[0]):,} characters to train on, {len(data[1]):,} to test on")
    baselines = table_losses(data[0][-TABLED:], data[1])
    print("without a model: " + ", ".join(f"{name} {loss}" for name, loss in baselines.items()), flush=True)
    results = Results(args.name, args, ("methods", "widths", "lrs", "seeds"), baselines)
    runs = []
    for place in range(len(args.lrs or [0])):  # rates and seeds outermost, so that all methods keep up
        for seed in range(args.seeds):
            for width in args.widths:
                for method in args.methods:
                    lr = args.lrs[place] if args.lrs else PAPER_RATES[method].get(width, 3e-3)
                    key = {"method": method, "width": width, "lr": lr, "seed": seed}
                    runs.append(results.once(key, lambda key=key: run(**key, args=args, data=data)))
                    results.save(**compare(runs, baselines))
    # Checks in training see the first part of the test text, which is easier than the rest.
    levels = table_losses(data[0][-TABLED:], data[1][: SEEN * args.length + MOST])
    results.save(baselines_of_checks=levels)
    report(runs, compare(runs, baselines), levels, args)


def report(
    runs: Sequence[Run], found: dict[str, Any], levels: dict[str, float], args: argparse.Namespace
) -> None:
    """Print what was found, and plot the curves beside the tables' losses in the same characters."""
    print(found["verdict"])
    for row in found["compared"]:
        seconds = " and ".join(map(str, row["seconds_to_goal"]))
        loss = f"{row['loss']} +- {row['half_range']} nats per character"
        print(f"{row['method']}, width {row['width']}: {loss}; {row['goal']} in the checks after {seconds} s")
    lines = {}
    for run in runs:
        label = f"{run['method']}, {run['width']}"
        same = [other for other in runs if f"{other['method']}, {other['width']}" == label]
        here = [other for other in same if other["lr"] == min(same, key=lambda x: x["loss"])["lr"]]
        points = zip(*(other["curve"] for other in here), strict=True)
        lines[label] = [(each[0][0], *spread([point[2] for point in each])) for each in points]
    axes = ("training steps", "loss in the checks, nats per character")
    shown = {name: levels[name] for name in ("table of 2", "table of 3", "table of 5")}
    print(plot(args.name, f"characters, {args.length} of context", axes, lines, shown))


if __name__ == "__main__":
    main()

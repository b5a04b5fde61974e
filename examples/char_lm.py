"""Character language models: plain attention, multi-level scores, sliding windows and a mix of both.

Kuang et al. (2025) train 6 layers on OpenWebText for up to 100,000 steps on a GPU and find multi-level scores
slightly better for the same compute. The defaults here are a few hundred steps on the source of Python's
standard library, with several seeds because the difference is small.

    python examples/char_lm.py --widths 64 96 --steps 300 --seeds 3
    python examples/char_lm.py --text my_corpus.txt
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from decoder import Decoder, plain, plot, save, spread, train
from torch import Tensor, nn

import attnbias as ab
from attnbias.nn import MLRAttention

KINDS = 96  # newline and the printable characters of ASCII


def read(text: Path | None, limit: int) -> tuple[Tensor, Tensor]:
    """Return characters as numbers below 96: a part to train on, and the last twentieth to test on."""
    if text is not None:
        raw = text.read_bytes()
    else:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        raw = b"\n".join(path.read_bytes() for path in files)
    kept = bytes(c for c in raw[:limit] if c == 10 or 32 <= c < 127)
    tokens = torch.frombuffer(bytearray(kept), dtype=torch.uint8).long()
    tokens = torch.where(tokens == 10, 95, tokens - 32)
    split = len(tokens) * 19 // 20
    return tokens[:split], tokens[split:]


def ranks_of(size: int) -> list[int]:
    """Give half of the dimensions to all pairs, then halve: 32, 16, 8, 8 for a head of 64."""
    ranks = [size // 2]
    while sum(ranks) + ranks[-1] // 2 < size and ranks[-1] > size // 8:
        ranks.append(ranks[-1] // 2)
    return [*ranks, size - sum(ranks)]


def make_attention(method: str, layer: int, width: int, heads: int, window: int) -> nn.Module:
    """Make one layer of a method; the mix has a window in two of three layers."""
    near = ab.Causal() & ab.Window(before=window)
    if method == "multi-level":
        return MLRAttention(width, heads, ranks_of(width // heads), scale=1.0)
    is_near = method == "window" or (method == "mix" and layer % 3 > 0)
    return plain(width, heads, near if is_near else ab.Causal())


def macs(method: str, width: int, heads: int, args: argparse.Namespace) -> int:
    """Count forward multiply-adds per token, without embedding and head, as if no pair were masked."""
    T, size = args.length, width // heads
    mean_rank = sum(rank / 2**level for level, rank in enumerate(ranks_of(size))) / size
    total = 0
    for layer in range(args.layers):
        is_near = method == "window" or (method == "mix" and layer % 3 > 0)
        keys = min(T, args.window + 1) if is_near else T
        share = mean_rank if method == "multi-level" else 1.0
        total += int(12 * width**2 + keys * width * (share + 1))
    return total


def run(method: str, width: int, seed: int, args: argparse.Namespace, data: tuple[Tensor, Tensor]) -> float:
    """Train, and return the mean loss on the test text, in nats per character."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    T, heads = args.length, width // args.head_size
    embed = nn.Embedding(KINDS, width)
    nn.init.normal_(embed.weight, std=0.02)
    model = Decoder(
        embed,
        width,
        args.layers,
        KINDS,
        T,
        lambda layer: make_attention(method, layer, width, heads, args.window),
    )

    def loss_on(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
        rows = text[starts[:, None] + torch.arange(T + 1)]
        return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return loss_on(model, data[0], torch.randint(len(data[0]) - T - 1, (args.batch,), generator=rng))

    train(
        model,
        loss_of,
        steps=args.steps,
        lr=args.lr,
        warmup=args.steps // 10,
        name=f"{method} {width} #{seed}",
    )
    with torch.no_grad():
        starts = torch.arange(0, len(data[1]) - T - 1, T)[:128]
        return sum(float(loss_on(model, data[1], part)) * len(part) for part in starts.split(16)) / len(
            starts
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--limit", type=int, default=4_000_000, help="bytes of the text to read")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 96])
    parser.add_argument("--head-size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    data = read(args.text, args.limit)
    started, runs, lines = time.time(), [], {}
    for method in ("plain", "multi-level", "window", "mix"):
        lines[method] = []
        for width in args.widths:
            losses = [run(method, width, seed, args, data) for seed in range(args.seeds)]
            count = macs(method, width, width // args.head_size, args)
            runs.append({"method": method, "width": width, "macs_per_token": count, "loss": losses})
            print(runs[-1])
            lines[method].append((count * args.steps * args.batch * args.length, *spread(losses)))
    settings = {**vars(args), "text": args.text and args.text.name, "ranks": ranks_of(args.head_size)}
    save("char_lm", settings, runs, started)
    axes = ("forward multiply-adds of training", "test loss, nats per character")
    print(plot("char_lm", f"characters, {args.length} of context", axes, lines))


if __name__ == "__main__":
    main()

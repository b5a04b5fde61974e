"""In-context linear regression: a prompt of pairs (x, y = w x), and the y of the last x is asked for.

To find w in its prompt a head must compare x's in all their n dimensions: with heads smaller than n, plain
attention is short of rank, and the bilinear layers are not. The paper trains 6 layers for 500,000 steps on
a GPU; the defaults here are a task of n = 8 and a few thousand steps on two cores.

    python examples/icl_regression.py --widths 16 32 64 --steps 2500
"""

from __future__ import annotations

import argparse
import time

import torch
from decoder import Decoder, plain, plot, save, spread, train
from torch import Tensor, nn

import attnbias as ab
from attnbias.nn import BilinearBTTAttention, BilinearMLRAttention


def make_attention(method: str, width: int, heads: int) -> nn.Module:
    """One layer of a method."""
    if method == "bilinear BTT":
        return BilinearBTTAttention(width, heads)
    if method == "bilinear MLR":
        size = width // heads
        return BilinearMLRAttention(width, heads, [size - size // 2, size // 2] if size > 1 else [1])
    return plain(width, 1 if method == "one head" else heads, ab.Causal())


def score_macs(method: str, width: int, heads: int, length: int) -> int:
    """Forward multiply-adds per layer and token: projections, MLP, scores and values."""
    size = width // heads
    scores = {
        "bilinear BTT": heads * width,
        "bilinear MLR": heads * (size - size // 2 + 2 * (size // 2)),
    }.get(method, width)
    few = next(width // n for n in range(int(width**0.5) + 1, width + 1) if width % n == 0)
    keys = heads * width * (width // few + few) if method == "bilinear BTT" else 2 * width**2
    return keys + 2 * width**2 + 8 * width**2 + length * (scores + width)


def draw(batch: int, n: int, active: int, pairs: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts [batch, 2 * pairs, n], x and y alternating, and the y of each x [batch, pairs]."""
    x = torch.randn(batch, pairs, n, generator=rng) / active**0.5
    x[..., active:] = 0
    w = torch.randn(batch, n, 1, generator=rng)
    y = (x @ w).squeeze(-1)
    prompt = torch.zeros(batch, pairs, 2, n)
    prompt[:, :, 0], prompt[:, :, 1, 0] = x, y
    return prompt.flatten(1, 2), y


def run(method: str, width: int, seed: int, args: argparse.Namespace) -> float:
    """Train and return the squared error at the last x, over the mean square of y."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    n, pairs = args.n, 2 * args.n
    embed = nn.Linear(n, width, bias=False)
    nn.init.normal_(embed.weight, std=0.02)
    model = Decoder(
        embed, width, args.layers, 1, 2 * pairs, lambda _: make_attention(method, width, args.heads)
    )

    def loss_of(model: nn.Module, step: int) -> Tensor:
        # The curriculum: from half of the dimensions to all of them in the first third.
        active = min(n, n // 2 + (n - n // 2) * 3 * step // args.steps)
        prompt, y = draw(args.batch, n, active, pairs, rng)
        return (model(prompt)[:, ::2, 0] - y).square().mean()

    train(
        model,
        loss_of,
        steps=args.steps,
        lr=args.lr,
        warmup=args.steps // 20,
        name=f"{method} {width} #{seed}",
    )
    test = torch.Generator().manual_seed(10**6)
    with torch.no_grad():
        prompt, y = draw(2048, n, n, pairs, test)
        error = (model(prompt)[:, -2, 0] - y[:, -1]).square().mean()
    return float(error / y[:, -1].square().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    started, runs, lines = time.time(), [], {}
    for method in ("plain", "one head", "bilinear MLR", "bilinear BTT"):
        lines[method] = []
        for width in args.widths:
            errors = [run(method, width, seed, args) for seed in range(args.seeds)]
            macs = args.layers * score_macs(method, width, args.heads, 4 * args.n)
            runs.append({"method": method, "width": width, "macs_per_token": macs, "error": errors})
            print(runs[-1])
            lines[method].append((macs, *spread(errors)))
    save("icl_regression", vars(args), runs, started)
    axes = ("forward multiply-adds per token", "squared error of the last y / its variance")
    print(plot("icl_regression", f"in-context regression, n = {args.n}, {args.heads} heads", axes, lines))


if __name__ == "__main__":
    main()

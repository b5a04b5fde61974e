"""In-context linear regression: given a prompt of pairs (x, y = w x), predict the y of the last x.

To find w in its prompt a model must compare x's in all their n dimensions. A head of plain attention with
fewer than n dimensions lacks the rank for that; the bilinear layers and one wide head do not. The guess 0 has
an error of 1, the best single step of gradient descent on the prompt (n + 1) / (3 n), and least squares 0.

    python examples/icl_regression.py --seeds 2       # the stored results: 24 models, an hour on one core
    python examples/icl_regression.py --n 8 --widths 32 --steps 4000 --methods plain "bilinear BTT" \\
        --name icl_regression_n8                      # 5 minutes
    python examples/icl_regression.py --paper --n 64 --device cuda    # days on a GPU; never run here
    python examples/icl_regression.py --tokens pairs

A model takes 1 to 4 minutes on one core, and each is stored when it is ready: run the command again after an
interrupt, and it goes on with the next.

The first two commands made the stored results. With n = 16 no model reached the error of one step of
gradient descent, 0.34 on these prompts, so they show which layers begin to learn, not what layers can do.
With heads of 4, 6 and 8 dimensions, bilinear BTT left less error than plain attention of the same width and
seed in six pairs of six, MLR in five. Three findings of Kuang et al. (2025) did not show: a plateau of plain
attention at width 64, where it only learns more slowly; less error of BTT for the same multiply-adds (width
48 against plain 64); one wide head that learns whenever it is wide enough (at width 64 one seed of two had
not started). All methods have one learning rate; the ranks of MLR were chosen among four lists tried with
n = 8 at width 32, a choice that plain attention does not have.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from decoder import Decoder, ReadIn, Results, Run, autocast, make_parser, parse, plain, plot, spread, train
from torch import Tensor, nn

import attnbias as ab
from attnbias.nn import BilinearBTTAttention, BilinearMLRAttention
from attnbias.nn.structured import factor_width

METHODS = ("plain", "one head", "bilinear MLR", "bilinear BTT")
FIRST = 2  # dimensions of x in the first lesson of the curriculum

# The paper's settings, for n of 16, 32, 64, 128 and 256. Rates from 1e-5 to 1e-3 were tried, most often 1e-4.
PAPER: dict[str, Any] = {
    "methods": list(METHODS),
    "widths": [16, 32, 64, 128, 256, 512, 1024],
    "layers": 6,
    "heads": 8,
    "batch": 64,
    "steps": 500_001,
    "warmup": 1000,
    "lesson": 2000,
    "deviation": 0.02,
    "lr": 1e-4,
}


def ranks_of(size: int) -> list[int]:
    """Return ranks for two levels, the second in two slices of the features: rank first + 2 * second.

    Once normalised, a level of two dimensions holds only signs, and one of one dimension is zero. So small
    heads have all but one dimension in the second level.
    """
    first = size // 2 if size > 5 else 1
    return [first, size - first] if size > 1 else [1]


def make_attention(method: str, width: int, heads: int) -> nn.Module:
    """Make one layer of a method; all divide scores by the root of their size."""
    if method == "bilinear BTT":
        return BilinearBTTAttention(width, heads)
    if method == "bilinear MLR":
        return BilinearMLRAttention(width, heads, ranks_of(width // heads))
    heads = 1 if method == "one head" else heads
    return plain(width, heads, ab.Causal(), scale=(width // heads) ** 0.5)


def macs(method: str, width: int, heads: int, length: int) -> int:
    """Count forward multiply-adds per layer and token, as if no pair were masked."""
    scores, projections = width, 2 * width**2
    if method == "bilinear BTT":
        scores, projections = heads * width, heads * width * sum(factor_width(width))
    elif method == "bilinear MLR":
        scores = heads * sum(rank * 2**level for level, rank in enumerate(ranks_of(width // heads)))
    rest = 2 * width**2 + 8 * width**2 + length * width  # values and output, MLP, weights times values
    return projections + length * scores + rest


def draw(batch: int, n: int, active: int, tokens: str, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw prompts [batch, 4 * active, n + 1] of 2 * active pairs, and the y of each x [batch, 2 * active].

    An x token is followed by its y token, which in "pairs" holds x as well, so that no layer has to bring
    them together.
    """
    x = torch.randn(batch, 2 * active, n, generator=rng) / active**0.5
    x[..., active:] = 0
    w = torch.randn(batch, n, 1, generator=rng)
    y = (x @ w).squeeze(-1)
    prompt = torch.zeros(batch, 2 * active, 2, n + 1)
    prompt[:, :, 0, :n], prompt[:, :, 1, n] = x, y
    if tokens == "pairs":
        prompt[:, :, 1, :n] = x
    return prompt.flatten(1, 2), y


def active_at(step: int, args: argparse.Namespace) -> int:
    """Return how many dimensions of x are in use: the curriculum."""
    n: int = args.n
    if args.lesson is None:  # all dimensions and full prompts after a third of the steps
        return min(n, FIRST + (n - FIRST) * 3 * step // args.steps)
    more = max(1, -(-(n - 4) // 15))  # the paper's: from 4 dimensions on, so that 15 lessons reach all
    return min(n, 4 + more * (step // args.lesson))


def test_prompts(count: int, n: int, tokens: str) -> tuple[Tensor, Tensor]:
    """Return the prompts on which all models are measured."""
    return draw(count, n, n, tokens, torch.Generator().manual_seed(10**6))


def error_of(model: nn.Module, count: int, args: argparse.Namespace) -> float:
    """Return the squared error at the last x over the mean square of y."""
    prompt, y = test_prompts(count, args.n, args.tokens)
    found = torch.cat([model(part.to(args.device))[:, -2, 0].cpu() for part in prompt.split(256)])
    return float((found - y[:, -1]).square().mean() / y[:, -1].square().mean())


def baselines(n: int) -> dict[str, float]:
    """Return the errors of answers that need no training, on the prompts that models are measured on."""
    prompt, y = (part.double() for part in test_prompts(4096, n, "alternating"))
    x = prompt[:, ::2, :n]
    known, asked, wanted = x[:, :-1], x[:, -1], y[:, -1]
    gradient = (known.mT @ y[:, :-1, None]).squeeze(-1)
    step = (asked * gradient).sum(1)
    step = step * (step @ wanted) / (step @ step)  # the best step size for all prompts
    solved = torch.linalg.lstsq(known, y[:, :-1, None]).solution.squeeze(-1)
    answers = {
        "the guess 0": torch.zeros_like(wanted),
        "one step of gradient descent": step,
        "least squares": (asked * solved).sum(1),
    }
    power = wanted.square().mean()
    return {name: round(float((a - wanted).square().mean() / power), 4) for name, a in answers.items()}


def run(method: str, width: int, seed: int, args: argparse.Namespace) -> Run:
    """Train one model; return its error at the end, and its curve."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    n = args.n
    model = Decoder(
        ReadIn(n + 1, width, args.deviation),
        width,
        args.layers,
        1,
        torch.randn(4 * n, width) * args.deviation,
        lambda _: make_attention(method, width, args.heads),
    ).to(args.device)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        prompt, y = draw(args.batch, n, active_at(step, args), args.tokens, rng)
        errors: Tensor = model(prompt.to(args.device))[:, ::2, 0] - y.to(args.device)
        return errors.square().mean()

    def check(model: nn.Module) -> float:
        return error_of(model, 512, args)

    name = f"{method}, width {width}, seed {seed}"
    warmup = args.warmup or max(1, args.steps // 20)
    found = train(model, loss_of, args, lr=args.lr, warmup=warmup, name=name, check=check)
    with torch.no_grad(), autocast(args):
        error = round(error_of(model, 4096, args), 4)
    print(f"{name}: error {error} after {args.steps} steps, {found['seconds']:.0f} s", flush=True)
    count = args.layers * macs(method, width, args.heads, 4 * n)
    return {"macs_per_token": count, "error": error} | found


def verdict(runs: Sequence[Run], levels: dict[str, float]) -> str:
    """Say how many models do what one step of gradient descent does."""
    bar = levels["one step of gradient descent"]
    ahead = sum(run["error"] < bar for run in runs)
    words = f"{ahead} of {len(runs)} models have a smaller error than one step of gradient descent ({bar})"
    return f"{words}; the others show only how far learning has come."


def main() -> None:
    parser = make_parser(__doc__, "icl_regression", PAPER)
    add = parser.add_argument
    add("--n", type=int, default=16, help="dimensions of x")
    add(
        "--tokens", choices=("alternating", "pairs"), default="alternating", help="pairs: y tokens hold x too"
    )
    add("--methods", choices=METHODS, nargs="+", default=METHODS, help="kinds of attention to train")
    add("--widths", type=int, nargs="+", default=[32, 48, 64], help="features per token; each is a model")
    add("--heads", type=int, default=8, help="attention heads")
    add("--layers", type=int, default=2, help="blocks of a model")
    add("--steps", type=int, default=1500, help="training steps of a model")
    add("--warmup", type=int, help="steps in which the rate grows; without it, a twentieth of all")
    add(
        "--lesson", type=int, help="steps between more dimensions; without it, all after a third of the steps"
    )
    add(
        "--deviation",
        type=float,
        default=0.3,
        help="of the start; with the paper's 0.02 learning begins later",
    )
    add("--batch", type=int, default=64, help="rows of a batch")
    add(
        "--lr",
        type=float,
        default=1e-4,
        help="learning rate of embeddings; matrices learn at lr * 768 / fan-in",
    )
    add("--seeds", type=int, default=1, help="runs of each model")
    args = parse(parser)
    levels = baselines(args.n)
    print("without a model: " + ", ".join(f"{name} {error}" for name, error in levels.items()), flush=True)
    results = Results(args.name, args, ("methods", "widths", "seeds"), levels)
    runs = []
    for seed in range(args.seeds):  # outermost, so that an interrupted script has all methods
        for width in args.widths:
            for method in args.methods:
                key = {"method": method, "width": width, "seed": seed}
                runs.append(results.once(key, lambda key=key: run(**key, args=args)))
    words = verdict(runs, levels)
    results.save(verdict=words)
    print(words)
    lines: dict[str, Sequence[tuple[float, float, float]]] = {}
    for method in args.methods:
        each = [[r for r in runs if (r["method"], r["width"]) == (method, width)] for width in args.widths]
        lines[method] = [(same[0]["macs_per_token"], *spread([r["error"] for r in same])) for same in each]
    axes = ("forward multiply-adds per token", "squared error of the last y / its variance")
    shown = {name: level for name, level in levels.items() if level > 0}  # the axis is logarithmic
    print(plot(args.name, f"in-context regression, n = {args.n}, {args.heads} heads", axes, lines, shown))


if __name__ == "__main__":
    main()

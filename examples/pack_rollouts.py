"""Pack rollouts that share prompts into one tree, and train on them as on separate sequences.

A policy's rollouts of one prompt share it, and often the first tokens of their answers. Separately, every
rollout computes the prompt again. `ab.Tree.from_sequences` keeps each shared prefix once. This example draws
rollouts, computes loss and gradients of a small model both ways, compares them in float64, times both in
float32 and draws the tree. It needs torch and attnbias, matplotlib for the picture, and takes a few seconds.

    python examples/pack_rollouts.py --prompts 2 --rollouts 8 --prompt 256 --answer 128
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import attnbias as ab

VOCABULARY = 64


class Model(nn.Module):
    """Two layers of attention with learned positions: enough for a loss that depends on every ancestor."""

    def __init__(self, longest: int, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(longest, width)
        self.project = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor, relation: ab.Relation) -> Tensor:
        """Return the logits of the next token, [L, vocabulary]."""
        x = self.tokens(ids) + self.places(positions)
        for layer in self.project:
            q, k, v = layer(x).view(len(ids), 3, self.heads, -1).permute(1, 2, 0, 3)
            backend = "rows" if x.dtype == torch.float64 else None  # which compares; kernels are for float32
            x = x + ab.attention(q, k, v, relation, backend=backend).transpose(0, 1).reshape(x.shape)
        return self.out(x)


def draw_rollouts(given: argparse.Namespace) -> list[list[int]]:
    """Draw answers that agree at first and then part, each after its prompt."""
    rng = random.Random(given.seed)
    rollouts = []
    for _ in range(given.prompts):
        prompt = [rng.randrange(VOCABULARY) for _ in range(given.prompt)]
        greedy = [rng.randrange(VOCABULARY) for _ in range(given.answer)]
        for _ in range(given.rollouts):
            agree = rng.randrange(given.answer // 2 + 1)
            rest = [rng.randrange(VOCABULARY) for _ in range(given.answer - agree)]
            rollouts.append(prompt + greedy[:agree] + rest)
    return rollouts


def loss_apart(model: Model, rollouts: list[list[int]]) -> Tensor:
    """Add up the loss of every token of every rollout, one rollout after another."""
    total = torch.zeros(())
    for tokens in rollouts:
        ids = torch.tensor(tokens)
        logits = model(ids, torch.arange(len(ids)), ab.Causal())
        total = total + cross_entropy(logits[:-1], ids[1:], reduction="sum")
    return total


def loss_packed(model: Model, packed: ab.relations.PackedTree) -> Tensor:
    """Add up the same losses in the tree: a token is predicted at its parent, once for all its rollouts."""
    logits = model(packed.ids, packed.positions, packed.tree)
    has_parent = packed.tree.parents >= 0
    predicted = logits[packed.tree.parents[has_parent]]
    losses = cross_entropy(predicted, packed.ids[has_parent], reduction="none")
    return losses @ packed.weights[has_parent].to(losses.dtype)


def gradients(model: Model, loss: Tensor) -> Tensor:
    """Return all gradients in one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def main() -> None:
    """Compare, time, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=2, help="number of prompts (2)")
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts of each prompt (8)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt (256)")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer (128)")
    parser.add_argument("--seed", type=int, default=0, help="seed (0)")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for JSON and picture")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)

    rollouts = draw_rollouts(given)
    packed = ab.Tree.from_sequences(rollouts)
    print(f"{sum(map(len, rollouts))} tokens in {len(rollouts)} rollouts, {len(packed.ids)} in the tree")
    print(f"saved: {packed.saved:.1%} of the tokens")

    model = Model(given.prompt + given.answer).double()
    apart, together = loss_apart(model, rollouts), loss_packed(model, packed)
    a, b = gradients(model, apart), gradients(model, together)
    difference = float((a - b).abs().max() / a.abs().max())
    print(f"loss apart {float(apart.detach()):.9f}, packed {float(together.detach()):.9f}")
    print(f"largest difference of a gradient, over the largest gradient: {difference:.1e}")

    model = model.float()
    seconds = {}
    for name, run in (
        ("apart", lambda: loss_apart(model, rollouts)),
        ("packed", lambda: loss_packed(model, packed)),
    ):
        gradients(model, run())
        start = time.process_time()
        gradients(model, run())
        seconds[name] = time.process_time() - start
    ratio = seconds["apart"] / seconds["packed"]
    print(f"a step takes {seconds['apart']:.3f} s apart, {seconds['packed']:.3f} s packed: {ratio:.2f} times")

    given.output.mkdir(parents=True, exist_ok=True)
    result = {
        "tokens": sum(map(len, rollouts)),
        "packed": len(packed.ids),
        "saved": packed.saved,
        "loss_apart": float(apart.detach()),
        "loss_packed": float(together.detach()),
        "gradient_difference": difference,
        "seconds": seconds,
    }
    (given.output / "pack_rollouts.json").write_text(json.dumps(result, indent=1))
    try:
        packed.tree.layout(len(packed.ids), len(packed.ids)).picture(given.output / "pack_rollouts.png")
    except ImportError as error:
        print(f"no picture: {error}")
    print(f"wrote {given.output / 'pack_rollouts.json'}")


if __name__ == "__main__":
    main()

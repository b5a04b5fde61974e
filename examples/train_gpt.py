"""Train a small GPT on packed documents with a window, and compare its speed with SDPA's.

The text is this package's own source, one document per file, packed one after another. A token attends to the
256 tokens before it in its own file. attnbias takes that as a relation, SDPA as a mask of every pair.

    python examples/train_gpt.py [--steps 60] [--tokens 4096]

It takes a few minutes on a CPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import attnbias as ab
from attnbias.nn import Rotary
from attnbias.nn.relational import join_heads, split_heads

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # takes [B, H, N, D] each


class Block(nn.Module):
    """A pre-norm block that is given its attention, so that two kinds can run the same weights."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads, self.rotary = heads, Rotary(d_model // heads)
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(2))
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.network = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model)
        )

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(join_heads(attend(self.rotary(q), self.rotary(k), v)))
        x = x + self.network(self.norms[1](x))
        return x


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 256, d_model: int = 128, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(d_model), nn.Linear(d_model, vocabulary)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, attend)
        logits: Tensor = self.out(self.norm(x))
        return logits


def load() -> tuple[Tensor, Tensor]:
    """Return all bytes of the package's source, and the file of each."""
    files = [path.read_bytes() for path in sorted(Path(ab.__file__).parent.rglob("*.py"))]
    files = [text for text in files if text]
    lengths = torch.tensor([len(text) for text in files])
    return torch.tensor(list(b"".join(files))), torch.repeat_interleave(torch.arange(len(files)), lengths)


def loss_of(model: GPT, tokens: Tensor, files: Tensor, attend: Attend) -> Tensor:
    """Return the loss of predicting each byte from the earlier bytes of its file."""
    logits = model(tokens[None, :-1], attend)[0]
    same = files[1:] == files[:-1]
    return nn.functional.cross_entropy(logits[same], tokens[1:][same])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=256)
    given = parser.parse_args()
    torch.manual_seed(0)
    text, file_of = load()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    near = ab.Window(before=given.window - 1)
    times: dict[str, list[float]] = {"attnbias": [], "SDPA": []}
    for step in range(given.steps):
        start = int(torch.randint(len(text) - given.tokens - 1, ()))
        part = slice(start, start + given.tokens + 1)
        tokens, files = text[part], file_of[part]
        began = time.process_time()
        packed = near & ab.Documents(files[:-1])
        loss = loss_of(model, tokens, files, partial(ab.attention, relation=packed))
        optimizer.zero_grad()
        loss.backward()
        times["attnbias"].append(time.process_time() - began)
        if step % 10 == 0:
            times["SDPA"].append(time_sdpa(model, tokens, files, near, loss.item()))
            bits = loss.item() / math.log(2)
            print(
                f"step {step:3}: {bits:.2f} bits per byte, {times['attnbias'][-1]:.2f} s of CPU", flush=True
            )
        optimizer.step()
    print(f"loss {loss.item():.3f} after {given.steps} steps of {given.tokens} tokens, window {given.window}")
    medians = {name: statistics.median(each) for name, each in times.items()}
    print(
        ", ".join(f"{name} {seconds:.2f} s" for name, seconds in medians.items()),
        "of CPU per step (median), forward",
    )
    print(
        f"and backward, layout and mask included: {medians['SDPA'] / medians['attnbias']:.1f} times as fast"
    )


def time_sdpa(model: GPT, tokens: Tensor, files: Tensor, near: ab.Relation, loss: float) -> float:
    """Time the same step with SDPA and a mask; its loss must be the same."""
    began = time.process_time()
    n = len(tokens) - 1
    q, k = torch.arange(n)[:, None], torch.arange(n)
    mask = near.related(q, k) & (files[:-1, None] == files[:-1])

    def by_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)

    other = loss_of(model, tokens, files, by_mask)
    kept = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    other.backward()
    seconds = time.process_time() - began
    for parameter, grad in zip(model.parameters(), kept, strict=True):
        parameter.grad = grad
    assert abs(other.item() - loss) < 1e-3, (other.item(), loss)
    return seconds


if __name__ == "__main__":
    main()

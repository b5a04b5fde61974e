"""Train a small GPT on packed documents with a window, and compare its speed with SDPA's.

The text is this package's own source, one document per file, packed one after another. A token attends to the
256 tokens before it in its own file. attnbias takes that as a relation, SDPA as a mask of every pair.

    python examples/train_gpt.py [--steps 60] [--tokens 4096]
    torchrun --nproc-per-node 2 examples/train_gpt.py --shard [--fsdp]

The first takes a few minutes on a CPU. With ``--shard`` every process holds a part of the tokens and fetches
the keys that they need, and with ``--fsdp`` a part of the weights, too; the losses are those of one process.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

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

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(join_heads(attend(self.rotary(q, positions), self.rotary(k, positions), v)))
        x = x + self.network(self.norms[1](x))
        return x


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 256, d_model: int = 128, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(d_model), nn.Linear(d_model, vocabulary)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, attend)
        logits: Tensor = self.out(self.norm(x))
        return logits


def load() -> tuple[Tensor, Tensor]:
    """Return all bytes of the package's source, and the file of each."""
    files = [path.read_bytes() for path in sorted(Path(ab.__file__).parent.rglob("*.py"))]
    files = [text for text in files if text]
    lengths = torch.tensor([len(text) for text in files])
    return torch.tensor(list(b"".join(files))), torch.repeat_interleave(torch.arange(len(files)), lengths)


class Batch(NamedTuple):
    """Bytes, each to be predicted from the one before it."""

    tokens: Tensor  # [n]
    targets: Tensor  # [n], the bytes that follow
    counts: Tensor  # [n], bool: the byte that follows is of the same file
    positions: Tensor  # [n]
    relation: ab.Relation | ab.Shard
    total: int  # targets that count, on all ranks

    def scatter(self, mesh: DeviceMesh) -> Batch:
        """Return this rank's part: each rank makes the same plan, and nothing is sent."""
        assert isinstance(self.relation, ab.Relation)
        shard = ab.shard(self.relation, len(self.tokens), mesh)
        parts = (shard.scatter(x, dim=0) for x in self[:3])
        return Batch(*parts, shard.positions, shard, self.total)


def draw(text: Tensor, file_of: Tensor, length: int, near: ab.Relation) -> Batch:
    """Draw a part of the text; every rank draws the same."""
    start = int(torch.randint(len(text) - length - 1, ()))
    tokens, files = (x[start : start + length + 1] for x in (text, file_of))
    same = files[1:] == files[:-1]
    relation = near & ab.Documents(files[:-1])
    return Batch(tokens[:-1], tokens[1:], same, torch.arange(length), relation, int(same.sum()))


def loss_of(model: GPT, batch: Batch, attend: Attend) -> Tensor:
    """Return this rank's share of the loss of predicting each byte from the earlier bytes of its file."""
    logits = model(batch.tokens[None], batch.positions, attend)[0]
    losses = nn.functional.cross_entropy(logits, batch.targets, reduction="none")
    return (losses * batch.counts).sum() / batch.total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--shard", action="store_true", help="split the tokens over processes; use torchrun")
    parser.add_argument("--fsdp", action="store_true", help="with --shard: split the weights, too")
    given = parser.parse_args()
    if given.fsdp and not given.shard:
        parser.error("--fsdp: wanted --shard as well")
    if given.shard and "RANK" not in os.environ:
        parser.error("--shard: wanted torchrun --nproc-per-node 2 examples/train_gpt.py --shard")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),)) if given.shard else None
    torch.manual_seed(0)
    train(GPT(), given, mesh)
    if mesh is not None:
        dist.destroy_process_group()


def train(model: GPT, given: argparse.Namespace, mesh: DeviceMesh | None) -> None:
    """Train; with a mesh, on the tokens of all ranks."""
    ranks = 1 if mesh is None else mesh.size()
    if given.fsdp:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text, file_of = load()
    near = ab.Window(before=given.window - 1)
    times: dict[str, list[float]] = {"attnbias": [], "SDPA": []}
    for step in range(given.steps):
        whole = draw(text, file_of, given.tokens, near)
        began = time.process_time()
        batch = whole if mesh is None else whole.scatter(mesh)
        loss = loss_of(model, batch, partial(ab.attention, relation=batch.relation))
        optimizer.zero_grad()
        # The loss of all ranks is the sum of theirs. FSDP takes the mean of their gradients, so it is scaled.
        (loss * ranks if given.fsdp else loss).backward()
        if mesh is not None:
            add_up(model, loss, by_hand=not given.fsdp)
        times["attnbias"].append(time.process_time() - began)
        if mesh is None and step % 10 == 0:
            times["SDPA"].append(time_sdpa(model, whole, loss.item()))
        if step % 10 == 0 and (mesh is None or mesh.get_rank() == 0):
            bits = loss.item() / math.log(2)
            print(
                f"step {step:3}: {bits:.2f} bits per byte, {times['attnbias'][-1]:.2f} s of CPU", flush=True
            )
        optimizer.step()
    if mesh is None or mesh.get_rank() == 0:
        report(given, loss.item(), times)


def add_up(model: GPT, loss: Tensor, *, by_hand: bool) -> None:
    """Add the losses of all ranks, and their gradients unless FSDP has done so."""
    dist.all_reduce(loss.detach())  # in place
    for parameter in model.parameters() if by_hand else ():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)


def report(given: argparse.Namespace, loss: float, times: dict[str, list[float]]) -> None:
    print(f"loss {loss:.6f} after {given.steps} steps of {given.tokens} tokens, window {given.window}")
    medians = {name: statistics.median(each) for name, each in times.items() if each}
    print(
        ", ".join(f"{name} {seconds:.2f} s" for name, seconds in medians.items()),
        "of CPU per step (median), forward and backward, layout and mask included",
    )
    if "SDPA" in medians:
        print(f"attnbias is {medians['SDPA'] / medians['attnbias']:.1f} times as fast")


def time_sdpa(model: GPT, batch: Batch, loss: float) -> float:
    """Time the same step with SDPA and a mask; its loss must be the same."""
    began = time.process_time()
    assert isinstance(batch.relation, ab.Relation)
    mask = batch.relation.related(batch.positions[:, None], batch.positions)

    def by_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)

    other = loss_of(model, batch, by_mask)
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

"""Train a two-layer GAT on a graph over several processes, each of which holds some of the nodes.

    python examples/shard_graph.py [pubmed] [--data folder]      # one process
    torchrun --nproc-per-node 2 examples/shard_graph.py          # the same losses

The edges are PubMed's, or those of the mesh ``airfoil``, which comes with the package, if PubMed is missing.
Features and labels are drawn: near nodes tend to have the same label, and the features are noisy. Dropout
drops the same pairs of nodes whatever the number of processes. It takes less than a minute on a CPU.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import attnbias as ab
from attnbias.benchmarks.cases.stored import NAMES, GraphData, MissingGraphError, load
from attnbias.integrations.pyg import GATConv

FEATURES, CLASSES, HEADS, SIZE = 32, 5, 4, 8
DROPOUT, RATE = 0.3, 0.01


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GATConv(FEATURES, SIZE, heads=HEADS, dropout=DROPOUT)
        self.second = GATConv(HEADS * SIZE, CLASSES, dropout=DROPOUT)

    def forward(self, x: Tensor, graph: ab.Graph | ab.Shard) -> Tensor:
        scores: Tensor = self.second(F.elu(self.first(x, graph)), graph)
        return scores


class Task(NamedTuple):
    """Nodes to classify, all of them or those of a rank."""

    x: Tensor  # [N, FEATURES]
    label: Tensor  # [N]
    trained: Tensor  # [N], bool

    @classmethod
    def draw(cls, graph: ab.Graph) -> Task:
        """Spread random votes along the edges a few times; the label is the class with most."""
        nodes = graph.lengths[0]
        source, target = graph.edge_index
        votes = torch.randn(nodes, CLASSES)
        for _ in range(4):
            votes = votes + torch.zeros_like(votes).index_add(0, target, votes[source])
            votes = F.normalize(votes, dim=1)
        label = votes.argmax(1)
        x = 0.5 * torch.randn(CLASSES, FEATURES)[label] + torch.randn(nodes, FEATURES)
        return cls(x, label, torch.rand(nodes) < 0.3)


def read(name: str, folder: str | None) -> GraphData:
    try:
        return load(name, folder)
    except MissingGraphError as error:
        print(f"{error} A mesh takes its place.")
        return load("airfoil")


def describe(shard: ab.Shard) -> str:
    """Return what a rank holds and fetches, in the two layers, beside an all-gather of all nodes."""
    mine, total = shard.held("keys")
    row = 4 * (HEADS * (SIZE + 1) + CLASSES + 1)  # bytes: values and the score of the source, by head
    halo, others = len(shard.halo), total - mine
    return (
        f"rank {shard.ranks.rank}: {mine} of {total} nodes, {len(shard.edges)} edges into them, "
        f"{halo} halo nodes; fetches {halo * row / 1e3:.0f} kB a pass, "
        f"an all-gather {others * row / 1e3:.0f} kB"
    )


def train(graph: ab.Graph, steps: int, ranks: int) -> None:
    torch.manual_seed(0)  # all ranks draw the same task and the same weights
    task, net = Task.draw(graph), Net()
    total = int(task.trained.sum())
    shard = graph.shard(None if ranks > 1 else 1)
    mine = Task(*(shard.scatter(each, 0) for each in task))
    is_first = shard.ranks.rank == 0
    if ranks > 1:
        print(describe(shard), flush=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    began = time.perf_counter()
    for step in range(steps):
        scores = net(mine.x, shard)
        losses = F.cross_entropy(scores, mine.label, reduction="none")
        loss = losses[mine.trained].sum() / total
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if ranks > 1:  # the loss of the whole is the sum of the ranks' shares
            for each in (loss.detach(), *(parameter.grad for parameter in net.parameters())):
                dist.all_reduce(each)
        optimizer.step()
        if is_first and (step % 10 == 0 or step == steps - 1):
            print(f"step {step:3}: loss {loss.item():.6f}", flush=True)
    if is_first:
        print(f"{steps} steps in {time.perf_counter() - began:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graph", nargs="?", default="pubmed", choices=NAMES)
    parser.add_argument("--data", help="folder with the graph")
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    train(read(given.graph, given.data).relation(), given.steps, ranks)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

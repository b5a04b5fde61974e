"""Train the two-layer GAT of Velickovic et al. (2018) on Cora and CiteSeer, and time an epoch against PyG.

    python examples/train_gat.py                     # both graphs, 10 seeds: a few minutes
    python examples/train_gat.py cora --seeds 100    # as in the paper
    python examples/train_gat.py --data folder       # cora.npz, or Planetoid's own files

The paper's settings: 8 heads of 8, then one head of classes; dropout 0.6 on features and attention; Adam with
rate 0.005 and weight decay 5e-4; bag-of-words features whose rows sum to 1; stop after 100 epochs without
better validation loss or accuracy, and test the last epoch in which both improved. If a graph is missing, a
stochastic block model takes its place. Writes gat.json and gat.png.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from progress import Bar
from torch import Tensor, nn
from torch.nn import functional as F

import attnbias as ab
from attnbias.benchmarks.cases.drawn import both_ways
from attnbias.benchmarks.cases.stored import PLANETOID, MissingGraphError, load, load_nodes
from attnbias.benchmarks.measure.timing import Spread, interleave, one_thread
from attnbias.integrations.pyg import GATConv

PAPER = {
    "cora": (83.0, 0.7),
    "citeseer": (72.5, 0.7),
}  # test accuracy in percent: mean and standard deviation
HEADS, SIZE = 8, 8
DROPOUT, RATE, DECAY, PATIENCE = 0.6, 0.005, 5e-4, 100


@dataclass(frozen=True, eq=False)
class Task:
    """A graph with nodes to classify."""

    name: str
    edge_index: Tensor  # [2, E]
    ptr: Tensor  # [N + 1], features of node i are at ptr[i] : ptr[i + 1]
    index: Tensor
    value: Tensor  # rows sum to 1
    num_features: int
    label: Tensor  # [N]
    train: Tensor
    val: Tensor
    test: Tensor

    @property
    def nodes(self) -> int:
        return len(self.label)

    def features(self, dropout: float = 0.0) -> Tensor:
        """Return the features as a sparse matrix; dropout of its zeros would change nothing."""
        value = F.dropout(self.value, dropout)
        return torch.sparse_csr_tensor(self.ptr, self.index, value, (self.nodes, self.num_features))


@dataclass
class Run:
    """The result of one seed."""

    seed: int
    accuracy: float = 0.0  # on the test nodes, in percent, in the epoch that validation chose
    chosen: int = 0  # that epoch
    losses: list[float] = field(default_factory=list)  # on the validation nodes, by epoch


class Net(nn.Module):
    """The paper's model, with layers of this library or of PyG."""

    def __init__(self, features: int, classes: int, layer: Any = GATConv) -> None:
        super().__init__()
        self.first = layer(features, SIZE, heads=HEADS, dropout=DROPOUT)
        self.second = layer(HEADS * SIZE, classes, heads=1, concat=False, dropout=DROPOUT)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        x = F.elu(self.first(x, graph))
        return self.second(F.dropout(x, DROPOUT, self.training), graph)


class Trainer:
    """A model, its optimiser and a graph."""

    def __init__(self, task: Task, graph: Any, layer: Any = GATConv) -> None:
        self.task, self.graph = task, graph
        self.net = Net(task.num_features, int(task.label.max()) + 1, layer)
        named = list(self.net.named_parameters())
        groups = [
            {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": DECAY},
            {"params": [p for name, p in named if name.endswith("bias")]},
        ]
        self.optimiser = torch.optim.Adam(groups, lr=RATE)
        self.whole = task.features()

    def step(self) -> None:
        """Take one step on the training nodes."""
        self.net.train()
        self.optimiser.zero_grad()
        scores = self.net(self.task.features(DROPOUT), self.graph)
        F.cross_entropy(scores[self.task.train], self.task.label[self.task.train]).backward()
        self.optimiser.step()

    def judge(self) -> tuple[float, float, float]:
        """Return loss and accuracy on the validation nodes, and accuracy on the test nodes."""
        self.net.eval()
        with torch.no_grad():
            scores = self.net(self.whole, self.graph)
        task = self.task
        right = scores.argmax(1) == task.label
        loss = F.cross_entropy(scores[task.val], task.label[task.val]).item()
        return loss, right[task.val].float().mean().item(), 100 * right[task.test].float().mean().item()


def train(task: Task, seed: int, most: int, bar: Bar) -> Run:
    """Train with early stopping."""
    torch.manual_seed(seed)
    trainer = Trainer(task, ab.Graph(task.edge_index, num_nodes=task.nodes))
    run, least, best, waited = Run(seed), math.inf, 0.0, 0
    for epoch in range(most):
        trainer.step()
        loss, accuracy, tested = trainer.judge()
        run.losses.append(loss)
        if loss <= least and accuracy >= best:
            run.accuracy, run.chosen = tested, epoch
        waited = 0 if loss <= least or accuracy >= best else waited + 1
        least, best = min(least, loss), max(best, accuracy)
        bar.advance(f"seed {seed}, epoch {epoch}: validation {100 * accuracy:.1f} %", steps=0)
        if waited == PATIENCE:
            break
    bar.advance(f"seed {seed}: test {run.accuracy:.1f} %")
    return run


def time_epochs(task: Task, rounds: int) -> dict[str, Spread] | None:
    """Time a step and its validation, with our layer and PyG's in turn; return None without PyG."""
    try:
        from torch_geometric.nn import GATConv as Peer
    except ImportError:
        return None
    ours = Trainer(task, ab.Graph(task.edge_index, num_nodes=task.nodes))
    theirs = Trainer(task, task.edge_index, Peer)

    def epoch(trainer: Trainer) -> None:
        trainer.step()
        trainer.judge()

    with one_thread():
        times = interleave([lambda: epoch(ours), lambda: epoch(theirs)], rounds)
    ratios = [b / a for a, b in zip(*times, strict=True)]
    return dict(zip(("attnbias", "pyg", "ratio"), map(Spread.of, (*times, ratios)), strict=True))


def read(name: str, folder: str | None) -> Task:
    """Read a graph with features, labels and the public split, or draw one if it is missing."""
    try:
        graph, nodes = load(name, folder), load_nodes(name, folder)
    except MissingGraphError as error:
        print(f"{error} A stochastic block model takes its place.")
        return draw_blocks(f"blocks in place of {name}")
    ptr, index = torch.from_numpy(nodes.feature_ptr), torch.from_numpy(nodes.feature_index)
    value = torch.from_numpy(nodes.feature_value)
    numbers = (torch.from_numpy(x) for x in (nodes.label, nodes.train, nodes.val, nodes.test))
    edges = torch.from_numpy(graph.edge_index)
    return Task(name, edges, ptr, index, _normalise(ptr, value), nodes.num_features, *numbers)


def draw_blocks(name: str, nodes: int = 2000, classes: int = 6, seed: int = 0) -> Task:
    """Draw a graph whose classes have more edges inside, and some words of their own."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes, nodes)
    by_class = [np.flatnonzero(label == c) for c in range(classes)]
    source = rng.integers(0, nodes, 2 * nodes)
    near = np.array([rng.choice(by_class[label[i]]) for i in source])
    target = np.where(rng.random(2 * nodes) < 0.75, near, rng.integers(0, nodes, 2 * nodes))
    words, count = 100 * classes, 20
    own = label[:, None] * 100 + rng.integers(0, 100, (nodes, count))
    index = np.where(rng.random((nodes, count)) < 0.15, own, rng.integers(0, words, (nodes, count)))
    ptr = torch.arange(0, nodes * count + 1, count)
    order = rng.permutation(nodes)
    first = np.concatenate([[i for i in order if label[i] == c][:20] for c in range(classes)])
    rest = np.setdiff1d(order, first)
    return Task(
        name,
        torch.from_numpy(both_ways(source, target, nodes)),
        ptr,
        torch.from_numpy(np.sort(index, 1).reshape(-1)),
        _normalise(ptr, torch.ones(nodes * count)),
        words,
        *(torch.from_numpy(x) for x in (label, first, rest[:500], rest[500:1500])),
    )


def _normalise(ptr: Tensor, value: Tensor) -> Tensor:
    """Divide by the sum of each row; a node may have no words."""
    row = torch.repeat_interleave(torch.arange(len(ptr) - 1), ptr.diff())
    total = torch.zeros(len(ptr) - 1).index_add(0, row, value)
    return value / total[row]


def report(task: Task, runs: list[Run], epochs: dict[str, Spread] | None) -> dict[str, Any]:
    """Print the results of a graph, and return those to store."""
    accuracies = [run.accuracy for run in runs]
    deviation = stdev(accuracies) if len(runs) > 1 else 0.0
    kept: dict[str, Any] = {
        "nodes": task.nodes,
        "edges": task.edge_index.shape[1],
        "accuracy": {"mean": mean(accuracies), "deviation": deviation, "paper": PAPER.get(task.name)},
        "runs": [{k: v for k, v in asdict(run).items() if k != "losses"} for run in runs],
        "epochs": [len(run.losses) for run in runs],
        "milliseconds an epoch": None,
    }
    words = f"{task.name}: {mean(accuracies):.1f} +- {deviation:.1f} % over {len(runs)} seeds"
    if task.name in PAPER:
        words += " (paper: {} +- {} %)".format(*PAPER[task.name])
    if epochs is not None:
        times = {who: {k: 1e3 * v for k, v in epochs[who]._asdict().items()} for who in ("attnbias", "pyg")}
        kept["milliseconds an epoch"] = {**times, "pyg / attnbias": epochs["ratio"]._asdict()}
        ours, theirs, ratio = (epochs[who].median for who in ("attnbias", "pyg", "ratio"))
        words += (
            f"; an epoch takes {1e3 * ours:.1f} ms, with PyG's layer {1e3 * theirs:.1f} ms ({ratio:.2f}x)"
        )
    print(words)
    return kept


def plot(found: dict[str, tuple[list[Run], dict[str, Any]]], path: Path) -> None:
    """Plot accuracies with the paper's, and the validation losses."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(found), figsize=(4.5 * len(found), 6.5), squeeze=False)
    for column, (name, (runs, kept)) in zip(axes.T, found.items(), strict=True):
        over, under = column
        over.plot([run.seed for run in runs], [run.accuracy for run in runs], "o")
        over.axhline(kept["accuracy"]["mean"], label="mean")
        if kept["accuracy"]["paper"] is not None:
            middle, width = kept["accuracy"]["paper"]
            over.axhspan(middle - width, middle + width, alpha=0.2, label="paper")
        over.set(title=name, xlabel="seed", ylabel="test accuracy, %")
        over.legend()
        for run in runs:
            under.plot(run.losses, linewidth=0.7)
        under.set(xlabel="epoch", ylabel="validation loss")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("graphs", nargs="*", default=[], help="cora, citeseer or pubmed (the first two)")
    parser.add_argument("--data", help="folder with the graphs")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5000, help="most epochs to train")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of timing; 0 = none")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    unknown = [name for name in options.graphs if name not in PLANETOID]
    if unknown:
        parser.error(f"graphs: wanted {', '.join(PLANETOID)}, got {', '.join(unknown)}")
    warnings.filterwarnings(
        "ignore", message="Sparse (CSR tensor|invariant)"
    )  # torch warns about sparse features
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    kept: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    for name in options.graphs or PAPER:
        task = read(name, options.data)
        epochs = time_epochs(task, options.rounds) if options.rounds else None
        with Bar(task.name, options.seeds) as bar:
            runs = [train(task, seed, options.epochs, bar) for seed in range(options.seeds)]
        kept[task.name] = report(task, runs, epochs)
        found[task.name] = (runs, kept[task.name])
        (options.out / "gat.json").write_text(json.dumps(kept, indent=1) + "\n")
    plot(found, options.out / "gat.png")


if __name__ == "__main__":
    main()

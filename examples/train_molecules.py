"""Train a small graph transformer on batches of molecules: a new block-diagonal graph in every step.

    python examples/train_molecules.py

The molecules (1,024 of the NCI set) come with the package. The model sees only the bonds and predicts what
follows from them: the number of rings, and the mean distance between atoms. A node's features are its degree
and the probabilities that a random walk is back after 1 to 8 steps. Prints how the time of a step is spent:
batching and building the layout, forward, backward. Writes molecules.json and molecules.png.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from progress import Bar
from torch import Tensor, nn

import attnbias as ab
from attnbias.benchmarks.cases.stored import MissingGraphError, load
from attnbias.integrations.pyg import TransformerConv

DEGREES, WALK = 5, 8  # largest degree with its own feature, longest walk
TARGETS = ("rings", "mean distance")


@dataclass(frozen=True, eq=False)
class Molecule:
    """A graph, its nodes' features and the targets."""

    graph: ab.Graph
    features: Tensor  # [N, DEGREES + 1 + WALK]
    target: Tensor  # [2]


class Block(nn.Module):
    """A pre-norm block: x + attention(norm(x)) along bonds, then x + MLP(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = TransformerConv(width, width // heads, heads=heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, graph: ab.Graph) -> Tensor:
        x = x + self.attention(self.norms[0](x), graph)
        return x + self.mlp(self.norms[1](x))


class Net(nn.Module):
    """A model from features [N, .] and the graph of each node [N] to predictions [graphs, 2]."""

    def __init__(self, features: int, width: int = 64, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, len(TARGETS)))

    def forward(self, x: Tensor, graph: ab.Graph, of_graph: Tensor, graphs: int) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, graph)
        total = x.new_zeros(graphs, x.shape[1]).index_add(0, of_graph, self.norm(x))
        count = torch.bincount(of_graph, minlength=graphs)[:, None]
        return self.head(torch.cat([total / count, total / 16], 1))


def read(folder: str | None) -> list[Molecule]:
    """Read all molecules, with targets of mean 0 and deviation 1."""
    data = load("mol1024", folder)
    assert data.ptr is not None
    molecule = np.searchsorted(data.ptr, data.edge_index[1], side="right") - 1
    order = np.argsort(molecule, kind="stable")
    edges = np.split(
        data.edge_index[:, order], np.searchsorted(molecule[order], range(1, len(data.ptr) - 1)), 1
    )
    made = []
    for i, first in enumerate(data.ptr[:-1]):
        size, bonds = int(data.ptr[i + 1] - first), edges[i] - first
        made.append((bonds, size, *describe(bonds, size)))
    targets = np.array([target for *_, target in made])
    targets = (targets - targets.mean(0)) / targets.std(0)
    return [
        Molecule(ab.Graph(bonds, num_nodes=size), torch.tensor(x).float(), torch.tensor(y).float())
        for (bonds, size, x, _), y in zip(made, targets, strict=True)
    ]


def describe(bonds: NDArray[np.int64], size: int) -> tuple[NDArray[np.float64], tuple[float, float]]:
    """Return node features [N, .] and the targets: rings, and mean distance between connected atoms."""
    near = np.zeros((size, size))
    near[bonds[1], bonds[0]] = 1
    degree = near.sum(1)
    walk = near / np.maximum(degree, 1)[:, None]
    back, power = [], np.eye(size)
    for _ in range(WALK):
        power = power @ walk
        back.append(np.diag(power))
    distance = np.where(np.eye(size), 0.0, np.inf)
    reached, steps = np.eye(size, dtype=bool), 0
    while (more := (reached @ near > 0) & ~reached).any():
        steps += 1
        distance[more] = steps
        reached |= more
    parts = len(np.unique(reached, axis=0))
    rings = bonds.shape[1] / 2 - size + parts
    apart = distance[np.isfinite(distance) & (distance > 0)]
    one_hot = np.eye(DEGREES + 1)[np.minimum(degree, DEGREES).astype(int)]
    features = np.concatenate([one_hot, np.stack(back, 1)], 1)
    return features, (rings, float(apart.mean()) if len(apart) else 0.0)


class Clock:
    """Add up the process time of the parts of a step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._since = time.process_time()

    def start(self) -> None:
        self._since = time.process_time()

    def stop(self, part: str) -> None:
        now = time.process_time()
        self.spent[part] = self.spent.get(part, 0.0) + now - self._since
        self._since = now


def join(molecules: list[Molecule]) -> tuple[Tensor, ab.Graph, Tensor, int]:
    """Batch molecules into the model's arguments, with the layout built."""
    graph = ab.Graph.batch([molecule.graph for molecule in molecules])
    sizes = torch.tensor([len(molecule.features) for molecule in molecules])
    of_graph = torch.repeat_interleave(torch.arange(len(molecules)), sizes)
    features = torch.cat([molecule.features for molecule in molecules])
    graph.layout(len(features), len(features))  # built here so that it is timed; all layers share it
    return features, graph, of_graph, len(molecules)


def train(molecules: list[Molecule], options: argparse.Namespace) -> dict[str, Any]:
    """Train on all but the last 200; return losses, errors and times."""
    torch.manual_seed(options.seed)
    order = torch.randperm(len(molecules)).tolist()
    mixed = [molecules[i] for i in order]
    fit, held = mixed[:-200], mixed[-200:]
    net = Net(molecules[0].features.shape[1])
    optimiser = torch.optim.AdamW(net.parameters(), lr=options.rate, weight_decay=1e-2)
    steps = -(-len(fit) // options.batch)
    total = options.epochs * steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, options.rate, total_steps=total)
    test = join(held)
    wanted = torch.stack([molecule.target for molecule in held])
    losses, errors, clock = [], [], Clock()
    with Bar("molecules", options.epochs) as bar:
        for _ in range(options.epochs):
            net.train()
            lot = torch.randperm(len(fit)).split(options.batch)
            for chosen in lot:
                clock.start()
                some = [fit[i] for i in chosen.tolist()]
                batch = join(some)
                clock.stop("batch and layout")
                loss = nn.functional.mse_loss(net(*batch), torch.stack([m.target for m in some]))
                clock.stop("forward")
                optimiser.zero_grad()
                loss.backward()
                clock.stop("backward")
                optimiser.step()
                schedule.step()
                losses.append(loss.item())
            net.eval()
            with torch.no_grad():
                predicted = net(*test)
            errors.append((predicted - wanted).square().mean(0).tolist())
            bar.advance(f"unexplained: rings {errors[-1][0]:.3f}, distance {errors[-1][1]:.3f}")
    milliseconds = {part: 1e3 * spent / total for part, spent in clock.spent.items()}
    explained = (1 - (predicted - wanted).square().mean(0) / wanted.var(0, correction=0)).tolist()
    return {
        "losses": losses,
        "errors": errors,
        "explained": dict(zip(TARGETS, explained, strict=True)),
        "milliseconds": milliseconds,
        "predicted": predicted.tolist(),
        "wanted": wanted.tolist(),
    }


def plot(found: dict[str, Any], path: Path) -> None:
    """Plot the losses, and the predictions for unseen molecules."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 1 + len(TARGETS), figsize=(13, 4))
    axes[0].semilogy(found["losses"], linewidth=0.5, color="grey", label="training")
    per_epoch = len(found["losses"]) / len(found["errors"])
    for i, name in enumerate(TARGETS):
        steps = [per_epoch * (epoch + 1) for epoch in range(len(found["errors"]))]
        axes[0].semilogy(steps, [error[i] for error in found["errors"]], label=f"{name}, unseen")
        predicted, wanted = ([row[i] for row in found[which]] for which in ("predicted", "wanted"))
        axes[i + 1].plot(wanted, predicted, ".")
        axes[i + 1].plot(wanted, wanted, linewidth=0.5)
        share = 100 * found["explained"][name]
        axes[i + 1].set(
            title=f"{name}: {share:.1f} % explained", xlabel="true (in deviations)", ylabel="predicted"
        )
    axes[0].set(xlabel="step", ylabel="squared error")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", help="folder with mol1024.npz, instead of the package's own")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64, help="molecules per step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        molecules = read(options.data)
    except MissingGraphError as error:
        parser.error(str(error))
    found = train(molecules, options)
    plot(found, options.out / "molecules.png")
    parts = ", ".join(f"{part} {spent:.1f} ms" for part, spent in found["milliseconds"].items())
    shares = ", ".join(f"{100 * share:.1f} % of {name}" for name, share in found["explained"].items())
    print(f"explained on 200 held-out molecules: {shares}\na step: {parts}")
    kept = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    kept |= {"batch": options.batch, "epochs": options.epochs, "seed": options.seed}
    kept |= {key: found[key] for key in ("explained", "milliseconds")}
    (options.out / "molecules.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()

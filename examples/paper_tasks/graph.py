"""A drawn graph whose nodes have classes, for GAT."""

from __future__ import annotations

import time
from typing import Any

import torch
from progress import Bar
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn import functional as F
from train_gat import Trainer, draw_blocks

import attnbias as ab

from .training import Found, picture, share, size_of, thin


def gat(steps: int | None) -> list[Found]:
    """Train GAT to name the class of each node of a drawn graph."""
    torch.manual_seed(0)
    task = draw_blocks("blocks")
    trainer = Trainer(task, ab.Graph(task.edge_index, num_nodes=task.nodes))
    losses, began = [], time.process_time()
    steps = steps or 500
    with Bar("GAT", steps) as bar:
        for _ in range(steps):
            trainer.step()
            loss, accuracy, tested = trainer.judge()
            losses.append(loss)
            bar.advance(f"loss {loss:.3f}, on validation nodes {accuracy:.0%} right")
    seconds = round(time.process_time() - began, 1)
    words = task.features().to_dense().numpy()
    logistic = LogisticRegression(C=100.0, max_iter=1000).fit(words[task.train], task.label[task.train])
    baselines = {
        "most frequent": float(
            (task.label[task.test] == task.label[task.train].mode().values).float().mean()
        ),
        "logistic regression on words": float(logistic.score(words[task.test], task.label[task.test])),
    }
    loops = ab.Graph(task.edge_index, num_nodes=task.nodes) | ab.Window(before=0)
    with torch.no_grad():
        layer, x = trainer.net.first, trainer.whole
        error = (layer(x, trainer.graph) - dense_gat(layer, x, loops)).abs().max()
    return [
        Found(
            "GAT",
            "graph",
            "classes of the nodes of a drawn graph",
            "Graph(edges) | Window(before=0)",
            ball(task, 20),
            (task.nodes, task.nodes),
            share(loops, task.nodes, task.nodes),
            "test nodes right",
            tested / 100,
            baselines["logistic regression on words"],
            baselines,
            float(error),
            size_of(trainer.net),
            steps,
            seconds,
            thin(losses),
        )
    ]


def dense_gat(layer: Any, x: Tensor, relation: ab.Relation) -> Tensor:
    """Compute a GATConv on all pairs of nodes with a mask."""
    heads = layer.lin(x).unflatten(-1, (layer.heads, -1))  # [N, H, D]
    source, target = ((heads * each).sum(-1).T for each in (layer.att_src, layer.att_dst))  # [H, N]
    scores = F.leaky_relu(target[:, :, None] + source[:, None, :], layer.negative_slope)
    weights = scores.masked_fill(~relation.dense(len(x), len(x)), -torch.inf).softmax(-1)
    out: Tensor = (weights @ heads.transpose(0, 1)).transpose(0, 1).flatten(1) + layer.bias
    return out


def ball(task: Any, count: int) -> list[str]:
    """Draw the graph among the nodes nearest to node 0, by class."""
    source, target = task.edge_index
    chosen = torch.tensor([0])
    while len(chosen) < count:
        chosen = torch.cat((chosen, target[torch.isin(source, chosen)])).unique()[:count]
    chosen = chosen[task.label[chosen].argsort()]
    place = torch.full((task.nodes,), -1)
    place[chosen] = torch.arange(len(chosen))
    edges = place[task.edge_index]
    near = ab.Graph(edges[:, (edges >= 0).all(0)], num_nodes=len(chosen))
    return picture(near | ab.Window(before=0), len(chosen), len(chosen))

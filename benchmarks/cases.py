"""The relations that are timed, each for any number of tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import attnbias as ab

DOCUMENTS = 1_000
NODES, EDGES = 100_000, 2_000_000


@dataclass(frozen=True)
class Case:
    """A relation as a function of the number of tokens."""

    name: str
    relation: Callable[[int], ab.Relation]

    def build(self, tokens: int) -> ab.Layout:
        """Make the relation and its layout anew, so that nothing comes from a cache."""
        return ab.Layout.build(self.relation(tokens), tokens, tokens)

    def check(self, tokens: int) -> None:
        """Fail unless the layout holds exactly the pairs of the relation."""
        relation = self.relation(tokens)
        got = ab.Layout.build(relation, tokens, tokens).to_dense()
        if not (got == relation.dense(tokens, tokens)).all():
            raise AssertionError(f"{self.name}: the layout at {tokens} tokens is not the relation")


def document_lengths(tokens: int) -> list[int]:
    """Cut ``tokens`` at random, the same way each time, into documents of at least one token."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(tokens - 1, generator=generator)[: DOCUMENTS - 1].sort().values + 1
    ends = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])])
    lengths: list[int] = ends.diff().tolist()
    return lengths


def random_edges() -> Tensor:
    """Draw source and target of each edge at random, the same ones each time."""
    return torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(0))


def build_graph(edges: Tensor) -> ab.Layout:
    """Make the graph and its layout anew: edges by target and by source."""
    return ab.Layout.build(ab.Graph(edges, num_nodes=NODES), NODES, NODES)


def local(tokens: int) -> ab.Relation:
    return ab.Causal() & ab.Window(before=255)


def documents(tokens: int) -> ab.Relation:
    return ab.Documents.from_lengths(document_lengths(tokens)) & ab.Causal()


def with_global(tokens: int) -> ab.Relation:
    return ab.Window(before=255) | ab.Global(range(64))


LOCAL = Case("causal & window", local)
GROWTH = [
    LOCAL,
    Case("1,000 documents & causal", documents),
    Case("window | 64 global", with_global),
]

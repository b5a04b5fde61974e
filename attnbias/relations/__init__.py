"""Relations: which query may attend to which key, as values."""

from .choice import PerBatch, PerHead
from .documents import Documents, Padding
from .expression import parse
from .graph import Graph
from .grids import Neighborhood
from .neighbors import Neighbors, knn_graph
from .patterns import (
    Bipartite,
    Causal,
    Chunks,
    Columns,
    Dilated,
    Empty,
    Full,
    Global,
    Prefix,
    RandomBlocks,
    Window,
)
from .predicate import Dense, Where
from .relation import Relation

__all__ = [
    "Bipartite",
    "Causal",
    "Chunks",
    "Columns",
    "Dense",
    "Dilated",
    "Documents",
    "Empty",
    "Full",
    "Global",
    "Graph",
    "Neighborhood",
    "Neighbors",
    "Padding",
    "PerBatch",
    "PerHead",
    "Prefix",
    "RandomBlocks",
    "Relation",
    "Where",
    "Window",
    "knn_graph",
    "parse",
]

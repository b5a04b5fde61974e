"""Relations: which query may attend to which key, as values without lengths.

``relation`` has the base class, ``value`` what makes its subclasses values, ``algebra`` what ``& | ~ .T``
make of them. The relations: ``patterns`` compare positions; ``grids``, ``lengths``, ``documents``,
``ranges``, ``tree``, ``blocks``, ``graph``, ``neighbors`` and ``predicate`` (functions and masks) hold data;
``choice`` holds one relation per head or batch, ``portion`` some heads and batches of a relation, ``picked``
some queries of one.

They share ``tables`` (data by batch and head), ``listing`` (pairs stored one by one), ``orders`` (of
nodes), ``graph_inputs`` and ``range_forms`` (graphs and ranges of other libraries) and ``pointwise``
(functions of one pair, called for many). ``display`` draws relations. ``expression`` parses what a repr
prints; ``recipe`` writes a relation as text and tensors, for traced programs.

Import the classes from here. To add one, write it in the file where it fits, or in a file of its own, and
export it below: subclassing ``Relation`` registers it. CONTRIBUTING.md lists what else it needs.
"""

from .blocks import Blocks, topk_blocks
from .choice import PerBatch, PerHead
from .documents import Documents
from .expression import parse
from .graph import Graph
from .grids import Neighborhood
from .lengths import Padding, Prefix
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
    RandomBlocks,
    Window,
)
from .predicate import Dense, Where
from .ranges import Ranges
from .relation import Relation
from .tree import PackedTree, Tree

__all__ = [
    "Bipartite",
    "Blocks",
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
    "PackedTree",
    "Padding",
    "PerBatch",
    "PerHead",
    "Prefix",
    "RandomBlocks",
    "Ranges",
    "Relation",
    "Tree",
    "Where",
    "Window",
    "knn_graph",
    "parse",
    "topk_blocks",
]

"""Attention that computes only the relations you assume."""

from . import testing
from .buckets import linear_buckets, t5_buckets
from .dispatch import use_backend
from .explanation import explain, verify
from .layouts import Layout, layout_cache
from .merge import merge
from .multilevel import MultiLevel
from .ops import attention
from .relations import (
    Bipartite,
    Causal,
    Chunks,
    Columns,
    Dense,
    Dilated,
    Documents,
    Empty,
    Full,
    Global,
    Graph,
    Neighborhood,
    Neighbors,
    Padding,
    PerBatch,
    PerHead,
    Prefix,
    RandomBlocks,
    Relation,
    Where,
    Window,
    knn_graph,
)
from .scores import AdditiveScore
from .terms import ALiBi, EdgeBias, GridBias, KeyBias, PairBias, RelativeBias
from .weights import attention_weights, edge_weights

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "AdditiveScore",
    "Bipartite",
    "Causal",
    "Chunks",
    "Columns",
    "Dense",
    "Dilated",
    "Documents",
    "EdgeBias",
    "Empty",
    "Full",
    "Global",
    "Graph",
    "GridBias",
    "KeyBias",
    "Layout",
    "MultiLevel",
    "Neighborhood",
    "Neighbors",
    "Padding",
    "PairBias",
    "PerBatch",
    "PerHead",
    "Prefix",
    "RandomBlocks",
    "Relation",
    "RelativeBias",
    "Where",
    "Window",
    "attention",
    "attention_weights",
    "edge_weights",
    "explain",
    "knn_graph",
    "layout_cache",
    "linear_buckets",
    "merge",
    "t5_buckets",
    "testing",
    "use_backend",
    "verify",
]

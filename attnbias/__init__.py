"""Attention that computes only the relations you assume."""

from . import testing
from .dispatch import use_backend
from .explain import explain, verify
from .layouts import Layout, layout_cache
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
)

__version__ = "0.1.0"

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
    "Layout",
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
    "attention",
    "explain",
    "layout_cache",
    "testing",
    "use_backend",
    "verify",
]

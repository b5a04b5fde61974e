"""Attention that computes only the relations you assume.

Start with ``attention``. The other modules here are ``arguments`` (checks that every folder may use),
``native`` (opens the C++ library), ``simplicial`` (attention over triples) and ``structured`` (structured
matrices). The folders, from the bottom: ``sets``, ``layouts``, ``relations``, ``recipes``, ``scores``,
``backends``, ``op``, ``sharding``, then ``testing`` and ``symmetry``, then ``nn`` and ``integrations``, then
``report``, which also imports the benchmarks. A folder imports only those before it; docs/architecture.md
explains why.
"""

from . import recipes, testing
from .attention import attention, max_logit
from .layouts import Layout, layout_cache
from .op.dispatch import use_backend
from .op.explain import explain
from .op.merge import merge
from .op.weights import attention_weights, edge_weights
from .relations import (
    Bipartite,
    Blocks,
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
    Ranges,
    Relation,
    Tree,
    Where,
    Window,
    knn_graph,
    topk_blocks,
)
from .scores.additive import AdditiveScore
from .scores.buckets import linear_buckets, t5_buckets
from .scores.multilevel import MultiLevel
from .scores.terms import ALiBi, EdgeBias, GridBias, KeyBias, PairBias, RelativeBias
from .sharding import Shard, shard
from .simplicial import simplicial_attention
from .testing.verify import verify

__version__ = "0.2.0"

__all__ = [
    "ALiBi",
    "AdditiveScore",
    "Bipartite",
    "Blocks",
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
    "Ranges",
    "Relation",
    "RelativeBias",
    "Shard",
    "Tree",
    "Where",
    "Window",
    "attention",
    "attention_weights",
    "edge_weights",
    "explain",
    "knn_graph",
    "layout_cache",
    "linear_buckets",
    "max_logit",
    "merge",
    "recipes",
    "shard",
    "simplicial_attention",
    "t5_buckets",
    "testing",
    "topk_blocks",
    "use_backend",
    "verify",
]

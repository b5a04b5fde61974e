"""Attention that computes only the relations you assume.

A relation says which query may attend to which key. It is a value without lengths::

    import torch, attnbias as ab

    rel = ab.Window(before=255) | ab.Global([0])     # combine with & | ~ - .T .shift .permute
    print(rel.picture(16)); rel.plot(512)            # look at it; a notebook draws it by itself
    q = k = v = torch.randn(2, 8, 1024, 64)          # [batch, heads, tokens, size]
    out = ab.attention(q, k, v, rel)                 # compute related pairs only; differentiable
    out = ab.attention(q, k, v, rel, terms=[ab.ALiBi(torch.ones(8))], softcap=30.0)
    print(ab.explain(q, k, v, rel))                  # which backend runs, why, and how much work it is
    print(ab.verify(q, k, v, rel))                   # its errors against float64
    layer = ab.nn.RelationalAttention(512, 8, rel)   # layers; also ab.recipes, ab.integrations, ab.symmetry

The relations: ``Causal Window Global Documents Prefix Graph Neighbors Where Dense`` and more; the score
terms: ``ALiBi RelativeBias KeyBias PairBias EdgeBias GridBias``. ``help`` of each has an example.

The modules here are ``arguments`` (checks that every folder may use), ``native`` (opens the C++ library),
``simplicial`` (attention over triples), ``structured`` (structured matrices) and ``attention``. The folders,
from the bottom: ``sets``, ``layouts``, ``relations``, ``recipes``, ``scores``, ``backends``, ``op``,
``sharding``, then ``testing`` and ``symmetry``, then ``nn`` and ``integrations``, then ``report``, which also
imports the benchmarks, and ``command``. A folder imports only those before it; docs/architecture.md explains
why.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from . import integrations as integrations
    from . import nn as nn
    from . import structured as structured
    from . import symmetry as symmetry

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

_LATER = ("integrations", "nn", "structured", "symmetry")  # modules that are loaded when they are asked for


def __dir__() -> list[str]:
    return sorted((*__all__, *_LATER, "__version__"))


if not TYPE_CHECKING:  # or type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            return import_module(f"{__name__}.{name}")
        words = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(words, name=name, obj=sys.modules[__name__])  # from which Python suggests one

"""Recipes: attention patterns of published models, each an expression of relations.

``text`` has those of one sequence of tokens, ``drafts`` those of models that predict several tokens at once,
``vision`` those of images and video. ``pieces`` holds what several of them are made of. docs/recipes.md draws
them all, and ``attnbias show recipes`` lists them.

A recipe is a function that returns a relation, so its result combines with others: ``longformer(256, [0]) &
Documents.from_lengths(lengths)``. (A traced program's form of a relation, in ``relations.recipe``, is
something else.)
"""

from collections.abc import Callable
from typing import Any

from .drafts import block_diffusion, dflash, eagle3, multi_token_prediction
from .text import (
    bigbird,
    dilated,
    local_global,
    longformer,
    prefix_lm,
    shared_prefix,
    sparse_transformer_fixed,
    sparse_transformer_strided,
    streaming,
)
from .vision import flamingo, sliding_tile, transfusion, video_blocks

__all__ = [
    "bigbird",
    "block_diffusion",
    "dflash",
    "dilated",
    "eagle3",
    "flamingo",
    "local_global",
    "longformer",
    "multi_token_prediction",
    "prefix_lm",
    "shared_prefix",
    "sliding_tile",
    "sparse_transformer_fixed",
    "sparse_transformer_strided",
    "streaming",
    "transfusion",
    "video_blocks",
]

RECIPES: dict[str, Callable[..., Any]] = {name: globals()[name] for name in __all__}

"""Describe in errors the value that was given, and say what to write instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import closest, words_of
from ..relations.expression import call_of, classes
from ..relations.relation import Relation

_SDPA = "attnbias.integrations.sdpa has a function with torch's arguments"
_OF_OTHERS = {  # arguments of other libraries
    "is_causal": f"pass ab.Causal() as the relation; {_SDPA}",
    "causal": "pass ab.Causal() as the relation",
    "attn_mask": f"pass ab.Dense(mask) as the relation, or numbers as terms=[ab.PairBias(mask)]; {_SDPA}",
    "mask": "pass ab.Dense(mask) as the relation, or numbers as terms=[ab.PairBias(mask)]",
    "block_mask": "pass attnbias.integrations.flex.from_block_mask(mask) as the relation",
    "score_mod": "pass score terms, such as terms=[ab.ALiBi(slopes)]",
    "window_size": "pass ab.Window(before, after) as the relation",
    "alibi_slopes": "pass terms=[ab.ALiBi(slopes)]",
}


def describe(got: Any) -> str:
    """Name what was given for a relation, and what makes a relation of it."""
    if isinstance(got, Tensor):
        return f"a tensor {shape_of(got)}{_advise(got)}"
    if isinstance(got, np.ndarray) and got.dtype.kind in "biuf":
        return f"a NumPy array {list(got.shape)}{_advise(torch.from_numpy(got))}"
    if isinstance(got, str):
        return f"str {got!r}; {_advise_text(got)}"
    if hasattr(got, "edge_index"):
        return f"{type(got).__name__}, which has edges; use ab.Graph(data)"
    if hasattr(got, "attend_sharded"):
        return f"a {type(got).__name__}; only attention runs on several processes"
    if type(got).__name__ == "BlockMask":
        return "a BlockMask; use attnbias.integrations.flex.from_block_mask(mask)"
    if isinstance(got, type) and issubclass(got, Relation):
        return f"the class {got.__name__}; make a value of it, {got.__name__}(...)"
    if callable(got):
        return "a function; for a predicate or a mask_mod use ab.Where(function)"
    return words_of(got)


def _advise(got: Tensor) -> str:
    """Return what to make of a tensor: an adjacency matrix is square, a mask boolean, edges are integers."""
    if got.is_nested:
        return "; for a boolean mask use ab.Dense(mask)"
    if got.is_sparse or got.layout != torch.strided:
        return "; for a sparse adjacency matrix, row = query, use ab.Graph.from_adjacency(matrix)"
    is_square = got.dim() == 2 and got.shape[0] == got.shape[1]
    matrix = "for an adjacency matrix, row = query, use ab.Graph.from_adjacency(matrix)"
    if got.dtype in (torch.int64, torch.int32):
        edges = "for edges use ab.Graph(edge_index, num_nodes)"
        if not is_square:
            return f" of integers; {edges}"
        return f" of integers; {matrix}" + (f"; {edges}" if len(got) == 2 else "")
    if got.is_floating_point():
        mask = "for numbers that are added to the scores use terms=[ab.PairBias(mask)]"
    else:
        mask = "for a boolean mask use ab.Dense(mask)"
    return f"; {matrix}; {mask}" if is_square else f"; {mask}"


def _advise_text(text: str) -> str:
    known = classes()
    near = closest(text, known)
    return f"did you mean ab.{call_of(known[near])}?" if near else "wanted a value, such as ab.Causal()"


def advise_option(name: str, known: Iterable[str]) -> str:
    """Return what to use in place of an argument that ``attention`` does not have."""
    near = closest(name, known)
    hint = _OF_OTHERS.get(name) or (f"did you mean {near}?" if near else "")
    return f"there are {', '.join(known)}" + (f"; {hint}" if hint else "")


def guess_order(key: Tensor, wanted: int | None) -> str:
    """Return a hint if a tensor has as many heads as a length that was wanted, and fewer tokens."""
    _, heads, length, _ = key.shape
    if wanted is None or heads != wanted or length >= heads:
        return ""
    return (
        f"; wanted [B, H, L, D], and {shape_of(key)} looks like [B, L, H, D]: x.transpose(1, 2) makes it so"
    )


def shape_of(x: Tensor) -> str:
    """Return a tensor's shape as text."""
    return "of nested ones" if x.is_nested else str(list(x.shape))

"""Theorems 1 to 4: the relation that each mechanism assumes, measured on what a backend computes.

A backend's weights say which pairs it relates: those whose weight is not 0. The theorems are checked on that
measured relation, not on the one that was asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...relations import Bipartite, Causal, Chunks, Dense, Full, Relation, Window
from ..properties import closure, properties
from .claim import Attend, Claims
from .measure import (
    CHAIN,
    MEMORY,
    PREVIOUS,
    TOKENS,
    assumed,
    compare,
    make_tokens,
    missing,
    part,
)

CLAIMS = Claims()


def _other_pairs(found: Relation, n: int, wanted: Tensor) -> list[str]:
    """List pairs, if a relation has other ones than wanted."""
    wrong = (found.dense(n, n) != wanted).nonzero().tolist()
    return [f"pairs differ, the first is {tuple(wrong[0])}"] if wrong else []


@CLAIMS.add(
    "Theorem 1",
    "relational bias in self-attention",
    "self-attention assumes the complete graph: all pairs, loops included, E = x X x",
    relation=Full(),
    wrong=(Causal(), Window(before=TOKENS - 1, after=TOKENS - 2), CHAIN),
)
def _complete(attend: Attend, relation: Relation) -> list[str]:
    found = assumed(attend, relation)
    return missing(found, TOKENS, "complete", "reflexive", "symmetric", "transitive", "regular")


@CLAIMS.add(
    "Theorem 2",
    "relational bias in encoder-decoder attention",
    "with the inputs X before the outputs Y, exactly the pairs Y x X are related: the complete bipartite "
    "graph, directed from inputs to outputs, the lower left block of the matrix. The rows of inputs are "
    "empty, so Proposition 1 is about those of outputs only",
    relation=Bipartite(MEMORY),
    wrong=(Full(), Causal(), Bipartite(MEMORY - 1), Bipartite(MEMORY).T),
)
def _bipartite(attend: Attend, relation: Relation) -> list[str]:
    n = MEMORY + TOKENS
    block = torch.zeros(n, n, dtype=torch.bool)
    block[MEMORY:, :MEMORY] = True
    found = assumed(attend, relation, n)
    faults = _other_pairs(found, n, block) + missing(found, n, "bipartite", "acyclic")
    tokens = make_tokens(n)
    query, key, value = tokens
    outputs = attend(query[..., MEMORY:, :], key[..., :MEMORY, :], value[..., :MEMORY, :], Full())
    joint = attend(*tokens, relation)[..., MEMORY:, :]
    return faults + compare("Definition 6", tokens, joint, outputs, Bipartite(MEMORY))


@CLAIMS.add(
    "Theorem 3",
    "relational bias in masked attention",
    "masked attention assumes the total order j <= i: reflexive, antisymmetric, transitive, and any two "
    "tokens are related; it is the reflexive, transitive closure of O(x) = {(x_i, x_i+1)}",
    relation=Causal(),
    wrong=(Full(), Window(before=TOKENS - 2), Causal().T, Window(before=TOKENS - 1, after=1)),
)
def _total_order(attend: Attend, relation: Relation) -> list[str]:
    found = assumed(attend, relation)
    faults = missing(found, TOKENS, "total_order", "acyclic", "unique_topological_order")
    successors = Dense(torch.diag(torch.ones(TOKENS - 1), -1) > 0)  # row i + 1 asks for key i
    faults += _other_pairs(found, TOKENS, closure(successors, TOKENS).dense(TOKENS, TOKENS))
    tokens = make_tokens()
    whole = attend(*tokens, relation)
    for t in range(1, TOKENS):
        start = attend(*part(tokens, slice(t)), relation)
        faults += compare(f"the first {t} tokens on their own", tokens, start, whole[..., :t, :], Causal())
    return faults


@CLAIMS.add(
    "Theorem 4",
    "relational bias in stride attention",
    "tokens i and j are related if and only if max(0, i - p) <= j <= i: p previous tokens and the token "
    "itself, at the start min(i, p) + 1 of them; without its loops a directed acyclic graph, not an order",
    relation=Window(before=PREVIOUS),
    wrong=(Causal(), Window(before=PREVIOUS - 1), Window(before=PREVIOUS + 1), Chunks(PREVIOUS + 1)),
    condition="0 < p < n - 1, for the last part: else it is an order",
)
def _window(attend: Attend, relation: Relation) -> list[str]:
    found = assumed(attend, relation)
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    faults = _other_pairs(found, TOKENS, ((i - PREVIOUS).clamp(min=0) <= j) & (j <= i))
    counts = found.dense(TOKENS, TOKENS).sum(1).tolist()
    if counts != [min(i, PREVIOUS) + 1 for i in range(TOKENS)]:
        faults.append(f"numbers of keys: {counts}")
    held = properties(found, TOKENS)
    return faults + missing(found, TOKENS, "acyclic") + (["transitive"] if held.transitive else [])

"""Definitions 4 to 10, Proposition 1 and Lemma 1: what an attention layer is.

The definitions of single mechanisms print "weights as in Equation 4", a softmax over all tokens, and then sum
over some. Lemma 1 says what is meant: a softmax over the neighbours alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...relations import Bipartite, Causal, Full, Graph, PerBatch, Prefix, Relation, Window
from .claim import Attend, Claims
from .measure import (
    CHAIN,
    LESS,
    MEMORY,
    MORE,
    PREVIOUS,
    SQUARES,
    TOKENS,
    Tokens,
    bound_of,
    compare,
    differences,
    make_tokens,
    weights_of,
)

CLAIMS = Claims()
_NEIGHBOUR = "every token has a neighbour: one without gets zeros"

Neighbours = Callable[[int], Iterable[int]]


def _defined(tokens: Tokens, neighbours: Neighbours) -> Tensor:
    """Compute sum_j alpha(x_i, x_j) v(x_j) for each token, with a softmax over its neighbours j, if any."""
    q, k, v = (x[0, 0].double() for x in tokens)
    rows = []
    for i in range(len(q)):
        near = list(neighbours(i))
        strength = torch.exp(k[near] @ q[i] / q.shape[-1] ** 0.5)
        rows.append(strength @ v[near] / strength.sum() if near else torch.zeros_like(v[0]))
    return torch.stack(rows)[None, None]


def _printed(tokens: Tokens, neighbours: Neighbours) -> Tensor:
    """Compute the same sum with the weights of Equation 4 as printed, a softmax over all tokens."""
    q, k, v = (x[0, 0].double() for x in tokens)
    strength = torch.exp(q @ k.T / q.shape[-1] ** 0.5)
    weights = strength / strength.sum(-1, keepdim=True)
    rows = [weights[i, near] @ v[near] for i in range(len(q)) for near in [list(neighbours(i))]]
    return torch.stack(rows)[None, None]


def _is_defined(attend: Attend, relation: Relation, neighbours: Neighbours, own: Relation) -> list[str]:
    """List what tells a layer from its definition, and whether the printed weights would give it too."""
    tokens = make_tokens()
    got = attend(*tokens, relation)
    faults = compare("the definition", tokens, got, _defined(tokens, neighbours), own)
    as_printed = compare("", tokens, got, _printed(tokens, neighbours), own)
    return faults + ([] if as_printed else ["a softmax over all tokens gives the same"])


@CLAIMS.add(
    "Definition 4",
    "graph layer",
    "attention sends the messages (e^s v, e^s) along the edges, adds them up at each token, and divides the "
    "first sum by the second, the update; s is the score of the edge",
    relation=SQUARES,
    wrong=(Full(), LESS, MORE),
    condition=_NEIGHBOUR,
)
def _graph_layer(attend: Attend, relation: Relation) -> list[str]:
    tokens = make_tokens()
    target, source = SQUARES.dense(TOKENS, TOKENS).nonzero().T
    q, k, v = (x[0, 0].double() for x in tokens)
    strength = torch.exp((q[target] * k[source]).sum(-1) * q.shape[-1] ** -0.5)
    message = strength[:, None] * torch.cat((v[source], torch.ones(len(source), 1)), -1)
    total = torch.zeros(TOKENS, v.shape[-1] + 1, dtype=torch.float64).index_add(0, target, message)
    updated = total[None, None, :, :-1] / total[:, -1:]
    return compare("messages", tokens, attend(*tokens, relation), updated, SQUARES)


@CLAIMS.add(
    "Definition 5",
    "self-attention",
    "token i gets the sum over all j of softmax_j(q_i . k_j / sqrt(d)) v_j",
    relation=Full(),
    wrong=(Causal(), CHAIN, Window(before=TOKENS - 1, after=TOKENS - 2)),
    condition="d is the size of a head, which is that of x only if there is one head",
)
def _self(attend: Attend, relation: Relation) -> list[str]:
    tokens = make_tokens()
    truth = _defined(tokens, lambda i: range(TOKENS))
    return compare("the definition", tokens, attend(*tokens, relation), truth, Full())


@CLAIMS.add(
    "Definition 6",
    "encoder-decoder attention",
    "output token i gets the sum over all input tokens j of softmax_j(q_i . k_j / sqrt(d)) v_j",
    relation=Full(),
    wrong=(Causal(), Prefix(MEMORY - 2), Window(before=2, after=2)),
)
def _encoder_decoder(attend: Attend, relation: Relation) -> list[str]:
    tokens = make_tokens(keys=MEMORY)
    truth = _defined(tokens, lambda i: range(MEMORY))
    return compare("the definition", tokens, attend(*tokens, relation), truth, Full())


@CLAIMS.add(
    "Definition 7",
    "masked attention",
    "token i gets the mean of v_j over j <= i, weighted by a softmax over these j alone (Lemma 1)",
    relation=Causal(),
    wrong=(Full(), Window(before=TOKENS - 2), Causal().T),
)
def _masked(attend: Attend, relation: Relation) -> list[str]:
    return _is_defined(attend, relation, lambda i: range(i + 1), Causal())


@CLAIMS.add(
    "Definition 8",
    "strided attention",
    "token i gets the mean of v_j over max(0, i - k) <= j <= i, the k tokens before it and itself, weighted "
    "by a softmax over these j alone (Lemma 1)",
    relation=Window(before=PREVIOUS),
    wrong=(Causal(), Window(before=PREVIOUS - 1), Window(before=PREVIOUS + 1)),
)
def _strided(attend: Attend, relation: Relation) -> list[str]:
    own = Window(before=PREVIOUS)
    return _is_defined(attend, relation, lambda i: range(max(0, i - PREVIOUS), i + 1), own)


@CLAIMS.add(
    "Definition 9",
    "graph attention",
    "token i gets the mean of v_j over its neighbours j, weighted by a softmax over these alone (Lemma 1); "
    "each instance brings its own neighbours",
    relation=SQUARES,
    wrong=(Full(), LESS, MORE),
    condition=_NEIGHBOUR,
)
def _graph(attend: Attend, relation: Relation) -> list[str]:
    table = SQUARES.dense(TOKENS, TOKENS)
    faults = _is_defined(attend, relation, lambda i: table[i].nonzero()[:, 0].tolist(), SQUARES)
    both = make_tokens(batch=2)
    together = attend(*both, PerBatch([CHAIN, relation]))
    for instance, graph in enumerate((CHAIN, SQUARES)):
        query, key, value = (x[instance : instance + 1] for x in both)
        alone = attend(query, key, value, graph)
        name = f"instance {instance} of two"
        faults += compare(name, (query, key, value), together[instance : instance + 1], alone, graph)
    return faults


@CLAIMS.add(
    "Section 2.3",
    "graph attention is the most general",
    "each of the other mechanisms is graph attention over the graph of its own pairs",
    relation=Window(before=PREVIOUS),
    wrong=(Causal(), Window(before=PREVIOUS - 1), Full()),
)
def _most_general(attend: Attend, relation: Relation) -> list[str]:
    tokens = make_tokens()
    faults = []
    neighbours: dict[Relation, Neighbours] = {
        Full(): lambda i: range(TOKENS),
        Causal(): lambda i: range(i + 1),
        Bipartite(MEMORY): lambda i: range(MEMORY if i >= MEMORY else 0),
        relation: lambda i: range(max(0, i - PREVIOUS), i + 1),
    }
    for mechanism, near in neighbours.items():
        edges = [(j, i) for i in range(TOKENS) for j in near(i)]
        graph = Graph(torch.tensor(edges).T, num_nodes=TOKENS)
        truth = _defined(tokens, near)
        faults += compare(f"{mechanism!r}", tokens, attend(*tokens, mechanism), truth, graph)
        faults += compare(f"the graph of {mechanism!r}", tokens, attend(*tokens, graph), truth, graph)
    return faults


@CLAIMS.add(
    "Proposition 1",
    "stochastic relation bias",
    "the weights of a token are a distribution over its neighbours: positive there, 0 elsewhere, of sum 1",
    relation=SQUARES,
    wrong=(Full(), Window(before=0, after=0), LESS, MORE),
    condition="the token has a neighbour: in the joint matrix of Theorem 2 the rows of inputs have sum 0",
)
def _stochastic(attend: Attend, relation: Relation) -> list[str]:
    weights = weights_of(attend, relation)
    query, key, _ = make_tokens()
    bound = bound_of((query, key, torch.eye(TOKENS)[None, None]), SQUARES) * TOKENS  # of a sum
    faults = [] if (weights >= 0).all() else ["a weight is negative"]
    if not torch.equal(weights > 0, SQUARES.dense(TOKENS, TOKENS)):
        faults.append("weights are positive elsewhere than on the pairs")
    faults += differences("sums of rows", weights.sum(-1), torch.ones(TOKENS), bound)
    joint = weights_of(attend, Bipartite(MEMORY)).sum(-1)
    if joint[:MEMORY].any():
        faults.append("tokens without a neighbour have weights")
    return faults + differences("rows of outputs", joint[MEMORY:], torch.ones(TOKENS - MEMORY), bound)


@CLAIMS.add(
    "Definition 10",
    "attention layer",
    "a token gets the expected value of its neighbours, under the distribution of Proposition 1",
    relation=SQUARES,
    wrong=(Full(), LESS, MORE),
    condition=_NEIGHBOUR,
)
def _expectation(attend: Attend, relation: Relation) -> list[str]:
    tokens = make_tokens()
    q, k, v = (x[0, 0].double() for x in tokens)
    rows = []
    for token, row in enumerate(SQUARES.dense(TOKENS, TOKENS)):
        near = row.nonzero()[:, 0]
        chance = torch.distributions.Categorical(logits=k[near] @ q[token] * q.shape[-1] ** -0.5).probs
        rows.append((chance[:, None] * v[near]).sum(0))
    return compare("means", tokens, attend(*tokens, relation), torch.stack(rows)[None, None], SQUARES)


@CLAIMS.add(
    "Lemma 1",
    "masking",
    "a relation acts as a mask: an unrelated pair has score -inf before the softmax, so its weight is 0 and "
    "its key and value change nothing",
    relation=Causal(),
    wrong=(Full(), Window(before=TOKENS - 2), Window(before=TOKENS - 1, after=1)),
)
def _masking(attend: Attend, relation: Relation) -> list[str]:
    query, key, value = tokens = make_tokens()
    before = attend(*tokens, relation)
    q, k, v = (x.double() for x in tokens)
    table = torch.ones(TOKENS, TOKENS).tril() > 0  # of pairs that the claim relates
    masked = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~table, -torch.inf)
    faults = compare("scores with -inf", tokens, before, masked.softmax(-1) @ v, Causal())
    for token in range(TOKENS):
        other_key, other_value = key.clone(), value.clone()
        for x in (other_key, other_value):
            x[..., token, :] = x[..., token, :] * -3 + 5
        after = attend(query, other_key, other_value, relation)
        blind = ~table[:, token]
        if not torch.equal(after[..., blind, :], before[..., blind, :]):
            faults.append(f"token {token} changes a token that is not related to it")
    return faults

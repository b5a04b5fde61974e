"""The claims of "Relational inductive biases on attention mechanisms", as checks of a backend.

Each check takes the backend and the relation to use. The claim's own relation passes; a wrong one fails. The
claims on symmetry are numbered here in the order in which they build on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import testing
from ..op.weights import attention_weights
from ..relations import Bipartite, Causal, Full, Graph, Relation, Window
from .groups import automorphisms
from .properties import properties

Tokens = tuple[Tensor, Tensor, Tensor]  # query [1, 1, Q, D], key [1, 1, K, D], value [1, 1, K, E]
Attend = Callable[[Tensor, Tensor, Tensor, Relation], Tensor]
Check = Callable[[Attend, Relation], list[str]]

TOKENS = 8  # in every check
MEMORY = 5  # keys of encoder-decoder attention
PREVIOUS = 3  # p of strided attention

# Two directed cycles of four tokens, and a loop at every token.
_ROUND = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 0, 5, 6, 7, 4]])
_SQUARES = Graph(torch.cat((_ROUND, torch.arange(TOKENS).expand(2, -1)), 1), num_nodes=TOKENS)


@dataclass(frozen=True)
class Claim:
    """A statement, the relation it is about, and a check that lists what contradicts it."""

    name: str
    statement: str
    relation: Relation
    check: Check
    condition: str = ""  # the claim does not hold without it

    def faults(self, attend: Attend, relation: Relation | None = None) -> list[str]:
        """List what contradicts the claim when a backend attends with this relation; None is its own."""
        return self.check(attend, self.relation if relation is None else relation)


CLAIMS: list[Claim] = []


def _claim(name: str, statement: str, relation: Relation, condition: str = "") -> Callable[[Check], Check]:
    """Make a function the check of a claim, and add the claim to the list."""

    def add(check: Check) -> Check:
        CLAIMS.append(Claim(name, statement, relation, check, condition))
        return check

    return add


# -- measuring --------------------------------------------------------------------------------------


def _tokens(keys: int = TOKENS, size: int = 8) -> Tokens:
    return testing.make_inputs(0, 1, 1, 1, TOKENS, keys, size, 6)


def _part(tokens: Tokens, rows: slice) -> Tokens:
    query, key, value = tokens
    return query[..., rows, :], key[..., rows, :], value[..., rows, :]


def _bound(tokens: Tokens, relation: Relation) -> float:
    """Return the largest difference that rounding explains between two results.

    A backend may err by twice the error of eager code in its dtype, plus a rounding step (the rule of all
    tests). Two results may differ by twice that.
    """
    query, key, value = tokens
    mask = relation.dense(query.shape[2], key.shape[2])
    exact = testing.eager(query.double(), key.double(), value.double(), mask)[0]
    rounded = (testing.eager(query, key, value, mask)[0].double() - exact).abs().max().item()
    none = torch.zeros_like(query)
    sizes = testing.magnitudes(query, key, value, none, none[..., 0], query.shape[-1] ** -0.5)
    return 2 * (2 * rounded + torch.finfo(query.dtype).eps * (exact.abs().max().item() + sizes["out"]))


def _differences(name: str, got: Tensor, truth: Tensor, bound: float) -> list[str]:
    far = (got.double() - truth).abs().max().item()
    return [] if far <= bound else [f"{name}: differ by {far:.2e}, rounding explains {bound:.2e}"]


def _compare(name: str, attend: Attend, relation: Relation, truth: Tensor, own: Relation) -> list[str]:
    """List how far attention is from the truth about the claim's own relation."""
    tokens = _tokens()
    return _differences(name, attend(*tokens, relation), truth, _bound(tokens, own))


def _commutes(
    attend: Attend, relation: Relation, p: Sequence[int], of_keys: Sequence[int] | None = None
) -> bool:
    """Return whether f(P x) is P f(x) up to rounding; keys are permuted like queries unless given."""
    p, r = list(p), list(p if of_keys is None else of_keys)
    query, key, value = tokens = _tokens(len(r))
    moved = attend(query[..., p, :], key[..., r, :], value[..., r, :], relation)
    still = attend(*tokens, relation)[..., p, :]
    return bool(((moved - still).abs() <= _bound(tokens, relation)).all())


def _swaps() -> list[list[int]]:
    """List every exchange of two tokens."""
    swaps = []
    for i in range(TOKENS):
        for j in range(i):
            p = list(range(TOKENS))
            p[i], p[j] = j, i
            swaps.append(p)
    return swaps


def _rotation() -> list[int]:
    return [*range(1, TOKENS), 0]


def _missing(relation: Relation, *wanted: str) -> list[str]:
    held = properties(relation, TOKENS)
    return [f"not {name.replace('_', ' ')}" for name in wanted if not getattr(held, name)]


# -- the claims -------------------------------------------------------------------------------------


@_claim(
    "1 automorphisms", "attention over a relation commutes with every automorphism of it", relation=_SQUARES
)
def _automorphisms(attend: Attend, relation: Relation) -> list[str]:
    group = automorphisms(_SQUARES, TOKENS)
    return [f"does not commute with {p}" for p in group.generators if not _commutes(attend, relation, p)]


@_claim(
    "2 no others",
    "no other permutation commutes with it",
    relation=_SQUARES,
    condition="the tokens are in general position: equal tokens can always be exchanged",
)
def _no_others(attend: Attend, relation: Relation) -> list[str]:
    table = _SQUARES.dense(TOKENS, TOKENS)
    others = [p for p in [*_swaps(), _rotation()] if not torch.equal(table[p][:, p], table)]
    return [f"commutes with {p}" for p in others if _commutes(attend, relation, p)]


@_claim(
    "3 self",
    "self-attention assumes the complete graph and commutes with all of S_n",
    relation=Full(),
    condition="the tokens carry no positions",
)
def _self(attend: Attend, relation: Relation) -> list[str]:
    faults = _missing(relation, "complete", "reflexive", "symmetric", "transitive", "regular")
    generators = [_swaps()[0], _rotation()]  # of all permutations
    return faults + [f"does not commute with {p}" for p in generators if not _commutes(attend, relation, p)]


@_claim(
    "4 masked",
    "masked attention assumes a total order, whose only symmetry is the identity",
    relation=Causal(),
)
def _masked(attend: Attend, relation: Relation) -> list[str]:
    faults = _missing(relation, "total_order", "acyclic", "unique_topological_order")
    faults += [f"commutes with {p}" for p in [*_swaps(), _rotation()] if _commutes(attend, relation, p)]
    tokens = _tokens()
    whole, bound = attend(*tokens, relation), _bound(tokens, Causal())
    for t in range(1, TOKENS):
        start = attend(*_part(tokens, slice(t)), relation)
        faults += _differences(f"the first {t} tokens on their own", start, whole[..., :t, :].double(), bound)
    return faults


@_claim(
    "5 strided",
    "strided attention assumes an order seen through a window, and commutes with translations",
    relation=Window(before=PREVIOUS),
    condition="away from the border: the first p tokens have fewer keys, and a translation changes them; "
    "among permutations of n tokens, the identity is the only symmetry",
)
def _strided(attend: Attend, relation: Relation) -> list[str]:
    faults = _missing(relation, "acyclic", "unique_topological_order", "translation_invariant")
    counts = relation.dense(TOKENS, TOKENS).sum(1).tolist()
    if counts != [min(i, PREVIOUS) + 1 for i in range(TOKENS)]:
        faults.append(f"numbers of keys per token: {counts}")
    tokens = _tokens()
    whole, bound = attend(*tokens, relation), _bound(tokens, Window(before=PREVIOUS))
    later = attend(*_part(tokens, slice(1, None)), relation)  # all tokens one place earlier
    apart = (later - whole[..., 1:, :]).abs().amax(-1)[0, 0]
    if not (apart[PREVIOUS:] <= bound).all():
        faults.append("a translation changes tokens away from the border")
    if not (apart[:PREVIOUS] > bound).all():
        faults.append("a translation does not change the tokens at the border")
    return faults


@_claim(
    "6 encoder-decoder",
    "encoder-decoder attention assumes a complete bipartite graph and commutes with S_n x S_m",
    relation=Full(),
)
def _encoder_decoder(attend: Attend, relation: Relation) -> list[str]:
    generators = [
        (list(range(TOKENS)), [1, 0, *range(2, MEMORY)]),
        (list(range(TOKENS)), [*range(1, MEMORY), 0]),
        (_swaps()[0], list(range(MEMORY))),
        (_rotation(), list(range(MEMORY))),
    ]
    faults = [
        f"does not commute with {p} on queries and {r} on keys"
        for p, r in generators
        if not _commutes(attend, relation, p, r)
    ]
    joined = properties(Bipartite(MEMORY), TOKENS + MEMORY)
    return faults + ([] if joined.bipartite and joined.acyclic else ["not bipartite"])


@_claim(
    "7 sparse",
    "sparse attention is self-attention on fewer pairs, renormalised",
    relation=_SQUARES,
    condition="every token has a key: a token without one gets zeros",
)
def _sparse(attend: Attend, relation: Relation) -> list[str]:
    query, key, value = (x.double() for x in _tokens())
    weights = attention_weights(query, key) * _SQUARES.dense(TOKENS, TOKENS)  # of self-attention
    truth = weights / weights.sum(-1, keepdim=True) @ value
    return _compare("self-attention on those pairs", attend, relation, truth, _SQUARES)


@_claim(
    "8 depth",
    "layers over one relation, stacked with residuals, commute with its automorphisms",
    relation=_SQUARES,
)
def _depth(attend: Attend, relation: Relation) -> list[str]:
    tokens = _tokens(size=6)

    def twice(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        h = value + attend(query, key, value, relation)
        return h + attend(h, h, h, relation)

    def eager(query: Tensor, key: Tensor, value: Tensor, relation: Relation) -> Tensor:
        return testing.eager(query, key, value, relation.dense(TOKENS, TOKENS))[0]

    # The rule for one layer, applied to both together.
    exact = twice(eager, *(x.double() for x in tokens))
    rounded = (twice(eager, *tokens).double() - exact).abs().max().item()
    bound = 2 * (2 * rounded + torch.finfo(torch.float32).eps * exact.abs().max().item())
    faults = []
    for p in automorphisms(_SQUARES, TOKENS).generators:
        moved = twice(attend, *(x[..., list(p), :] for x in tokens))
        still = twice(attend, *tokens)[..., list(p), :]
        faults += _differences(f"two layers and {p}", moved, still.double(), bound)
    return faults


@_claim("Lemma 1", "an unrelated pair has weight 0: changing the key changes nothing", relation=Causal())
def _absent(attend: Attend, relation: Relation) -> list[str]:
    query, key, value = _tokens()
    before = attend(query, key, value, relation)
    faults = []
    for token in range(TOKENS):
        other_key, other_value = key.clone(), value.clone()
        for x in (other_key, other_value):
            x[..., token, :] = x[..., token, :] * -3 + 5
        after = attend(query, other_key, other_value, relation)
        blind = ~Causal().dense(TOKENS, TOKENS)[:, token]  # tokens that the claim does not relate to it
        if not torch.equal(after[..., blind, :], before[..., blind, :]):
            faults.append(f"token {token} changes a token that is not related to it")
    return faults


@_claim(
    "Proposition 1",
    "the weights of a token are a distribution over its neighbours",
    relation=_SQUARES,
    condition="the token has a neighbour",
)
def _stochastic(attend: Attend, relation: Relation) -> list[str]:
    query, key, _ = _tokens()
    tokens = query, key, torch.eye(TOKENS)[None, None]
    weights = attend(*tokens, relation)[0, 0]
    faults = [] if (weights >= 0).all() else ["a weight is negative"]
    if not torch.equal(weights > 0, _SQUARES.dense(TOKENS, TOKENS)):
        faults.append("weights are positive elsewhere than on the pairs")
    bound = _bound(tokens, _SQUARES) * TOKENS
    return faults + _differences("sums of rows", weights.sum(-1), torch.ones(TOKENS), bound)


@_claim(
    "Corollary 1",
    "masked attention is strided attention with p >= n - 1",
    relation=Window(before=TOKENS - 1),
)
def _masked_is_strided(attend: Attend, relation: Relation) -> list[str]:
    masked = attend(*_tokens(), Causal()).double()
    faults = [] if relation.equivalent(Causal(), TOKENS, TOKENS) else ["pairs differ"]
    faults += _compare("results", attend, relation, masked, Causal())
    differs = _compare("", attend, Window(before=TOKENS - 2), masked, Causal())
    return faults + ([] if differs else ["p = n - 2 gives the same result"])


@_claim("Definition 4", "a layer is a message, a sum and an update", relation=_SQUARES)
def _message_passing(attend: Attend, relation: Relation) -> list[str]:
    target, source = _SQUARES.dense(TOKENS, TOKENS).nonzero().T
    q, k, v = (x[0, 0].double() for x in _tokens())
    strength = torch.exp((q[target] * k[source]).sum(-1) * q.shape[-1] ** -0.5)
    message = strength[:, None] * torch.cat((v[source], torch.ones(len(source), 1)), -1)
    total = torch.zeros(TOKENS, v.shape[-1] + 1, dtype=torch.float64).index_add(0, target, message)
    return _compare("messages", attend, relation, total[:, :-1] / total[:, -1:], _SQUARES)


@_claim("Definition 10", "a layer is the expectation of its neighbours' values", relation=_SQUARES)
def _expectation(attend: Attend, relation: Relation) -> list[str]:
    q, k, v = (x[0, 0].double() for x in _tokens())
    rows = []
    for token, row in enumerate(_SQUARES.dense(TOKENS, TOKENS)):
        near = row.nonzero()[:, 0]
        chance = torch.distributions.Categorical(logits=k[near] @ q[token] * q.shape[-1] ** -0.5).probs
        rows.append((chance[:, None] * v[near]).sum(0))
    return _compare("means", attend, relation, torch.stack(rows), _SQUARES)

"""What "Relational inductive biases on attention mechanisms" claims, as checks that a backend passes or not.

Each check is given the backend and the relation to use. The claim's own relation passes; one of another kind
is found out. The claims on symmetry are numbered here in the order in which they build on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import testing
from ..relations import Bipartite, Causal, Full, Graph, Relation, Window
from ..weights import attention_weights
from .groups import automorphisms
from .properties import properties

Attend = Callable[[Tensor, Tensor, Tensor, Relation], Tensor]  # [1, 1, Q, D], [1, 1, K, D], [1, 1, K, E]

TOKENS = 8  # of every check
MEMORY = 5  # keys of encoder-decoder attention
PREVIOUS = 3  # p of strided attention

# Two squares, each with an arrow round it, and what every token is to itself.
_ROUND = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 0, 5, 6, 7, 4]])
_SQUARES = Graph(torch.cat((_ROUND, torch.arange(TOKENS).expand(2, -1)), 1), num_nodes=TOKENS)


@dataclass(frozen=True)
class Claim:
    """One statement, the relation it is about, and its check, which lists what is wrong."""

    name: str
    statement: str
    relation: Relation
    check: Callable[[Attend, Relation], list[str]]
    condition: str = ""  # without which it does not hold

    def faults(self, attend: Attend, relation: Relation | None = None) -> list[str]:
        """What contradicts the claim when a backend attends with this relation; by default its own."""
        return self.check(attend, self.relation if relation is None else relation)


# -- measuring --------------------------------------------------------------------------------------


def _tokens(keys: int = TOKENS, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return testing.make_inputs(0, 1, 1, 1, TOKENS, keys, size, 6)


def _part(tokens: tuple[Tensor, Tensor, Tensor], rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = tokens
    return query[..., rows, :], key[..., rows, :], value[..., rows, :]


def _bound(query: Tensor, key: Tensor, value: Tensor, relation: Relation) -> float:
    """How far two results may be apart that are equal but for rounding.

    A backend may err by twice what eager code of its dtype does, plus a rounding step (the rule of all
    tests); two results by twice that.
    """
    mask = relation.dense(query.shape[2], key.shape[2])
    exact = testing.eager(query.double(), key.double(), value.double(), mask)[0]
    rounded = (testing.eager(query, key, value, mask)[0].double() - exact).abs().max().item()
    none = torch.zeros_like(query)
    sizes = testing.magnitudes(query, key, value, none, none[..., 0], query.shape[-1] ** -0.5)
    return 2 * (2 * rounded + torch.finfo(query.dtype).eps * (exact.abs().max().item() + sizes["out"]))


def _moved(
    attend: Attend, relation: Relation, of_queries: Sequence[int], of_keys: Sequence[int]
) -> tuple[Tensor, float]:
    """How far f(P x) is from P f(x) at each query, [Q], and how far rounding may take it."""
    query, key, value = _tokens(len(of_keys))
    p, r = list(of_queries), list(of_keys)
    moved = attend(query[..., p, :], key[..., r, :], value[..., r, :], relation)
    still = attend(query, key, value, relation)[..., p, :]
    return (moved - still).abs().amax(-1)[0, 0], _bound(query, key, value, relation)


def _commutes(attend: Attend, relation: Relation, p: Sequence[int]) -> bool:
    difference, bound = _moved(attend, relation, p, p)
    return bool((difference <= bound).all())


def _swaps() -> list[list[int]]:
    """Every exchange of two tokens."""
    swaps = []
    for i in range(TOKENS):
        for j in range(i):
            p = list(range(TOKENS))
            p[i], p[j] = j, i
            swaps.append(p)
    return swaps


def _rotation() -> list[int]:
    return [*range(1, TOKENS), 0]


def _differences(name: str, got: Tensor, truth: Tensor, bound: float) -> list[str]:
    far = (got.double() - truth).abs().max().item()
    return [] if far <= bound else [f"{name}: {far:.2e} apart, rounding explains {bound:.2e}"]


def _missing(relation: Relation, *wanted: str) -> list[str]:
    held = properties(relation, TOKENS)
    return [f"not {name.replace('_', ' ')}" for name in wanted if not getattr(held, name)]


# -- the claims -------------------------------------------------------------------------------------


def _check_automorphisms(attend: Attend, relation: Relation) -> list[str]:
    group = automorphisms(_SQUARES, TOKENS)
    return [f"does not commute with {p}" for p in group.generators if not _commutes(attend, relation, p)]


def _check_no_others(attend: Attend, relation: Relation) -> list[str]:
    table = _SQUARES.dense(TOKENS, TOKENS)
    others = [p for p in [*_swaps(), _rotation()] if not torch.equal(table[p][:, p], table)]
    return [f"commutes with {p}" for p in others if _commutes(attend, relation, p)]


def _check_self(attend: Attend, relation: Relation) -> list[str]:
    faults = _missing(relation, "complete", "reflexive", "symmetric", "transitive", "regular")
    generators = [_swaps()[0], _rotation()]  # of all permutations
    return faults + [f"does not commute with {p}" for p in generators if not _commutes(attend, relation, p)]


def _check_masked(attend: Attend, relation: Relation) -> list[str]:
    faults = _missing(relation, "total_order", "acyclic", "unique_topological_order")
    faults += [f"commutes with {p}" for p in [*_swaps(), _rotation()] if _commutes(attend, relation, p)]
    query, key, value = _tokens()
    whole = attend(query, key, value, relation)
    for t in range(1, TOKENS):
        start = attend(*_part((query, key, value), slice(0, t)), relation)
        bound = _bound(query, key, value, Causal())
        faults += _differences(f"the first {t} tokens alone", start, whole[..., :t, :].double(), bound)
    return faults


def _check_strided(attend: Attend, relation: Relation) -> list[str]:
    faults = _missing(relation, "acyclic", "unique_topological_order", "translation_invariant")
    counts = relation.dense(TOKENS, TOKENS).sum(1).tolist()
    if counts != [min(i, PREVIOUS) + 1 for i in range(TOKENS)]:
        faults.append(f"keys of each token: {counts}")
    query, key, value = _tokens()
    whole = attend(query, key, value, relation)
    bound = _bound(query, key, value, Window(before=PREVIOUS))
    later = attend(*_part((query, key, value), slice(1, None)), relation)  # all tokens one place earlier
    apart = (later - whole[..., 1:, :]).abs().amax(-1)[0, 0]
    if not (apart[PREVIOUS:] <= bound).all():
        faults.append("a translation changes tokens away from the border")
    if not (apart[:PREVIOUS] > bound).all():
        faults.append("a translation leaves the tokens at the border as they are")
    return faults


def _check_encoder_decoder(attend: Attend, relation: Relation) -> list[str]:
    generators = [
        (list(range(TOKENS)), [1, 0, *range(2, MEMORY)]),
        (list(range(TOKENS)), [*range(1, MEMORY), 0]),
        (_swaps()[0], list(range(MEMORY))),
        (_rotation(), list(range(MEMORY))),
    ]
    faults = []
    for p, r in generators:
        apart, bound = _moved(attend, relation, p, r)
        if not (apart <= bound).all():
            faults.append(f"does not commute with {p} of queries and {r} of keys")
    joined = properties(Bipartite(MEMORY), TOKENS + MEMORY)
    return faults + ([] if joined.bipartite and joined.acyclic else ["not bipartite"])


def _check_sparse(attend: Attend, relation: Relation) -> list[str]:
    query, key, value = _tokens()
    mask = _SQUARES.dense(TOKENS, TOKENS)
    weights = attention_weights(query.double(), key.double()) * mask  # of self-attention
    truth = weights / weights.sum(-1, keepdim=True) @ value.double()
    bound = _bound(query, key, value, _SQUARES)
    return _differences("self-attention on those pairs", attend(query, key, value, relation), truth, bound)


def _check_depth(attend: Attend, relation: Relation) -> list[str]:
    tokens = _tokens(size=6)

    def twice(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        h = value + attend(query, key, value, relation)
        return h + attend(h, h, h, relation)

    def eager(query: Tensor, key: Tensor, value: Tensor, relation: Relation) -> Tensor:
        return testing.eager(query, key, value, relation.dense(TOKENS, TOKENS))[0]

    # The same rule as for one layer, on both together.
    exact = twice(eager, *(x.double() for x in tokens))
    rounded = (twice(eager, *tokens).double() - exact).abs().max().item()
    bound = 2 * (2 * rounded + torch.finfo(torch.float32).eps * exact.abs().max().item())
    faults = []
    for p in automorphisms(_SQUARES, TOKENS).generators:
        moved = twice(attend, *(x[..., list(p), :] for x in tokens))
        still = twice(attend, *tokens)[..., list(p), :]
        faults += _differences(f"two layers and {p}", moved, still.double(), bound)
    return faults


def _check_absent(attend: Attend, relation: Relation) -> list[str]:
    query, key, value = _tokens()
    before = attend(query, key, value, relation)
    faults = []
    for token in range(TOKENS):
        other_key, other_value = key.clone(), value.clone()
        for x in (other_key, other_value):
            x[..., token, :] = x[..., token, :] * -3 + 5
        blind = ~Causal().dense(TOKENS, TOKENS)[:, token]  # those the claim's relation does not relate
        if not torch.equal(
            attend(query, other_key, other_value, relation)[..., blind, :], before[..., blind, :]
        ):
            faults.append(f"token {token} is seen by one that is not related to it")
    return faults


def _check_stochastic(attend: Attend, relation: Relation) -> list[str]:
    query, key, _ = _tokens()
    weights = attend(query, key, torch.eye(TOKENS)[None, None], relation)[0, 0]
    mask = _SQUARES.dense(TOKENS, TOKENS)
    faults = [] if (weights >= 0).all() else ["a weight is negative"]
    if not torch.equal(weights > 0, mask):
        faults.append("weights stand elsewhere than the pairs")
    bound = _bound(query, key, torch.eye(TOKENS)[None, None], _SQUARES) * TOKENS
    return faults + _differences("sums of rows", weights.sum(-1), torch.ones(TOKENS), bound)


def _check_masked_is_strided(attend: Attend, relation: Relation) -> list[str]:
    query, key, value = _tokens()
    masked = attend(query, key, value, Causal()).double()
    bound = _bound(query, key, value, Causal())
    faults = [] if relation.equivalent(Causal(), TOKENS, TOKENS) else ["pairs differ"]
    faults += _differences("results", attend(query, key, value, relation), masked, bound)
    short = attend(query, key, value, Window(before=TOKENS - 2))
    return faults + ([] if _differences("", short, masked, bound) else ["p = n - 2 is no different"])


def _check_message_passing(attend: Attend, relation: Relation) -> list[str]:
    query, key, value = _tokens()
    target, source = _SQUARES.dense(TOKENS, TOKENS).nonzero().T
    q, k, v = (x[0, 0].double() for x in (query, key, value))
    strength = torch.exp((q[target] * k[source]).sum(-1) * q.shape[-1] ** -0.5)
    message = strength[:, None] * torch.cat((v[source], torch.ones(len(source), 1)), -1)
    total = torch.zeros(TOKENS, v.shape[-1] + 1, dtype=torch.float64).index_add(0, target, message)
    update = total[:, :-1] / total[:, -1:]
    bound = _bound(query, key, value, _SQUARES)
    return _differences("messages", attend(query, key, value, relation)[0, 0], update, bound)


def _check_expectation(attend: Attend, relation: Relation) -> list[str]:
    query, key, value = _tokens()
    q, k, v = (x[0, 0].double() for x in (query, key, value))
    rows = []
    for token in range(TOKENS):
        near = _SQUARES.dense(TOKENS, TOKENS)[token].nonzero()[:, 0]
        chance = torch.distributions.Categorical(logits=k[near] @ q[token] * q.shape[-1] ** -0.5).probs
        rows.append((chance[:, None] * v[near]).sum(0))
    bound = _bound(query, key, value, _SQUARES)
    return _differences("means", attend(query, key, value, relation)[0, 0], torch.stack(rows), bound)


CLAIMS = (
    Claim(
        "1 automorphisms",
        "attention over a relation commutes with every automorphism of it",
        _SQUARES,
        _check_automorphisms,
    ),
    Claim(
        "2 no others",
        "no other permutation commutes with it",
        _SQUARES,
        _check_no_others,
        "tokens in general position: equal tokens can always be exchanged",
    ),
    Claim(
        "3 self",
        "self-attention assumes the complete graph and commutes with all of S_n",
        Full(),
        _check_self,
        "without positions among the tokens",
    ),
    Claim(
        "4 masked",
        "masked attention assumes a total order, of which only the identity is a symmetry",
        Causal(),
        _check_masked,
    ),
    Claim(
        "5 strided",
        "strided attention assumes an order seen through a window, and commutes with translations",
        Window(before=PREVIOUS),
        _check_strided,
        "away from the border: the first p tokens have fewer keys, and a translation changes them; as a "
        "permutation of n tokens only the identity is a symmetry",
    ),
    Claim(
        "6 encoder-decoder",
        "encoder-decoder attention assumes a complete bipartite graph and commutes with S_n x S_m",
        Full(),
        _check_encoder_decoder,
    ),
    Claim(
        "7 sparse",
        "sparse attention is self-attention on fewer pairs, renormalised",
        _SQUARES,
        _check_sparse,
        "every token has a key: one without gets zeros",
    ),
    Claim(
        "8 depth",
        "layers over one relation, stacked with residuals, commute with its automorphisms",
        _SQUARES,
        _check_depth,
    ),
    Claim(
        "Lemma 1",
        "a pair that is not related has weight 0: changing that token changes nothing",
        Causal(),
        _check_absent,
    ),
    Claim(
        "Proposition 1",
        "the weights of a token are a distribution over its neighbours",
        _SQUARES,
        _check_stochastic,
        "it has a neighbour",
    ),
    Claim(
        "Corollary 1",
        "masked attention is strided attention with p >= n - 1",
        Window(before=TOKENS - 1),
        _check_masked_is_strided,
    ),
    Claim(
        "Definition 4",
        "a layer is message, sum and update",
        _SQUARES,
        _check_message_passing,
    ),
    Claim(
        "Definition 10",
        "a layer is the expectation of its neighbours' values",
        _SQUARES,
        _check_expectation,
    ),
)

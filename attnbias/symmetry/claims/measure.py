"""What the checks measure: differences up to rounding, permutations, the relation that a layer assumes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ... import testing
from ...relations import Dense, Graph, Relation
from ..properties import properties
from .claim import Attend

Tokens = tuple[Tensor, Tensor, Tensor]  # query [B, 1, Q, D], key [B, 1, K, D], value [B, 1, K, E]

R = TypeVar("R", bound=Relation)

TOKENS = 8  # in most checks
MEMORY = 5  # input tokens of encoder-decoder attention
PREVIOUS = 3  # p of strided attention

_CHAIN = torch.tensor([range(TOKENS - 1), range(1, TOKENS)])
_LOOPS = torch.arange(TOKENS).expand(2, -1)
_ROUND = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 0, 5, 6, 7, 4]])


def _looped(edges: Tensor) -> Graph:
    return Graph(torch.cat((edges, _LOOPS), 1), num_nodes=TOKENS)


SQUARES = _looped(_ROUND)  # two directed cycles of four tokens, and a loop at every token
LESS = _looped(torch.cat((_ROUND[:, :3], _ROUND[:, 4:]), 1))
MORE = _looped(torch.cat((_ROUND, torch.tensor([[0], [2]])), 1))
CHAIN = _looped(_CHAIN)
RING = _looped(torch.cat((_CHAIN, torch.tensor([[TOKENS - 1], [0]])), 1))
_NAMES: dict[Relation, str] = {
    SQUARES: "two directed squares",
    LESS: "the squares less an arrow",
    MORE: "the squares and one more arrow",
    CHAIN: "a directed chain",
    RING: "a directed ring",
}


def called(words: str, relation: R) -> R:
    """Give a relation a name for the report, and return it."""
    _NAMES[relation] = words
    return relation


def words_of(relation: Relation) -> str:
    """Return a relation as text: the name of a graph of the checks, or the expression."""
    return _NAMES.get(relation) or repr(relation)


def make_tokens(queries: int = TOKENS, keys: int | None = None, size: int = 8, batch: int = 1) -> Tokens:
    """Draw tokens; the values are narrower than the keys unless ``size`` is 6."""
    return testing.make_inputs(0, batch, 1, 1, queries, queries if keys is None else keys, size, 6)


def on_a_ring(offsets: Sequence[int]) -> Graph:
    """Relate each of the tokens of a ring to the keys at these offsets from it."""
    edges = [((i + offset) % TOKENS, i) for i in range(TOKENS) for offset in offsets]
    return Graph(torch.tensor(edges).T, num_nodes=TOKENS)


def part(tokens: Tokens, rows: slice) -> Tokens:
    """Return some of the tokens."""
    query, key, value = tokens
    return query[..., rows, :], key[..., rows, :], value[..., rows, :]


def bound_of(tokens: Tokens, relation: Relation, **options: Any) -> float:
    """Return the largest difference that rounding explains between two results.

    A backend may err by twice the error of eager code in its dtype, plus a rounding step (the rule of all
    tests). Two results may differ by twice that.
    """
    query, key, value = tokens
    mask = relation.dense(query.shape[2], key.shape[2])
    exact = testing.eager(query.double(), key.double(), value.double(), mask, **options)[0]
    rounded = (testing.eager(query, key, value, mask, **options)[0].double() - exact).abs().max().item()
    none = torch.zeros_like(query)
    sizes = testing.magnitudes(query, key, value, none, none[..., 0], query.shape[-1] ** -0.5)
    return 2 * (2 * rounded + torch.finfo(query.dtype).eps * (exact.abs().max().item() + sizes["out"]))


def differences(name: str, got: Tensor, truth: Tensor, bound: float) -> list[str]:
    """List how far a result is from the truth, if rounding does not explain it."""
    far = (got.double() - truth.double()).abs().max().item()
    return [] if far <= bound else [f"{name}: differ by {far:.2e}, rounding explains {bound:.2e}"]


def compare(name: str, tokens: Tokens, got: Tensor, truth: Tensor, own: Relation) -> list[str]:
    """List how far a result is from the truth about the claim's own relation."""
    return differences(name, got, truth, bound_of(tokens, own))


def symmetry_faults(
    attend: Attend,
    relation: Relation,
    kept: Sequence[Sequence[int]] = (),
    broken: Sequence[Sequence[int]] = (),
    n: int = TOKENS,
    bound: float | None = None,
    **options: Any,
) -> list[str]:
    """List permutations that should commute and do not, f(P x) = P f(x) up to rounding, and the reverse.

    Args:
        attend: f.
        relation: among n tokens.
        kept: permutations that should commute.
        broken: permutations that should not.
        n: number of tokens.
        bound: what rounding explains; None is that of attention.
        options: of ``attend``.
    """
    tokens = make_tokens(n)
    listed = torch.tensor([*map(list, kept), *map(list, broken)])  # [P, n]
    moved = attend(*(x[0, 0][listed][:, None] for x in tokens), relation, **options)[:, 0]  # [P, n, E]
    still = attend(*tokens, relation, **options)[0, 0][listed]
    bound = bound_of(tokens, relation, **options) if bound is None else bound
    faults = []
    for number, is_equal in enumerate(((moved - still).abs() <= bound).all(-1).all(-1).tolist()):
        if is_equal != (number < len(kept)):
            faults.append(f"{'commutes' if is_equal else 'does not commute'} with {listed[number].tolist()}")
    return faults


def swap(i: int, j: int, n: int = TOKENS) -> list[int]:
    """Return the exchange of two of n tokens."""
    p = list(range(n))
    p[i], p[j] = j, i
    return p


def swaps() -> list[list[int]]:
    """List every exchange of two tokens."""
    return [swap(i, j) for i in range(TOKENS) for j in range(i)]


def rotation(steps: int = 1, n: int = TOKENS) -> list[int]:
    """Return the shift of n tokens in a circle."""
    return [(i + steps) % n for i in range(n)]


def weights_of(attend: Attend, relation: Relation, n: int = TOKENS) -> Tensor:
    """Measure the matrix of weights, [n, n]: with unit vectors as values, it is the result."""
    query, key, _ = make_tokens(n)
    return attend(query, key, torch.eye(n)[None, None], relation)[0, 0]


def assumed(attend: Attend, relation: Relation, n: int = TOKENS) -> Dense:
    """Measure the relation that a layer assumes: the pairs whose weight is not 0."""
    return Dense(weights_of(attend, relation, n) != 0)


def missing(relation: Relation, n: int, *wanted: str) -> list[str]:
    """List the properties that a relation does not have."""
    held = properties(relation, n)
    return [f"not {name.replace('_', ' ')}" for name in wanted if not getattr(held, name)]

"""Theorems 5 to 8 and Corollary 1: the permutations with which each mechanism commutes.

"Equivariant to translations", sigma(i) = i + m, can be taken in four ways (``READINGS``), for masked as for
strided attention. The sentence is false in the first, where the tokens are a finite set as in Definition 3,
and exactly true in the second, which is what the paper's proof shows, and in the third.
"""

from __future__ import annotations

import torch

from ...relations import (
    Bipartite,
    Causal,
    Chunks,
    Dilated,
    Documents,
    Full,
    Global,
    Prefix,
    Relation,
    Window,
)
from ..groups import automorphisms
from ..properties import has_only_translations
from .claim import Attend, Claims, Reading
from .measure import (
    CHAIN,
    PREVIOUS,
    RING,
    TOKENS,
    assumed,
    bound_of,
    compare,
    differences,
    make_tokens,
    on_a_ring,
    part,
    rotation,
    swap,
    swaps,
    symmetry_faults,
)

CLAIMS = Claims()

_CIRCLE = "shifting n tokens in a circle"
_ELSEWHERE = "moving the whole sequence to other positions"
_INTEGERS = "permuting all integers"
_DROPPED = "dropping the first m tokens, as of a convolution"
READINGS = {
    "Theorem 6": (
        Reading(1, _CIRCLE, False),
        Reading(2, _ELSEWHERE, True),
        Reading(3, _INTEGERS, True),
        Reading(4, _DROPPED, False),
    ),
    "Theorem 7": (
        Reading(1, _CIRCLE, False),
        Reading(2, _ELSEWHERE, True),
        Reading(3, _INTEGERS, True),
        Reading(4, _DROPPED, True),
    ),
}
_IN_MASKED, _IN_STRIDE = "equivariance in masked attention", "equivariance in stride attention"


@CLAIMS.add(
    "Theorem 5",
    "equivariance in self-attention",
    "f(P x) = P f(x) for all of S_n; an exchange and a rotation generate it",
    relation=Full(),
    wrong=(Causal(), Window(before=TOKENS - 1, after=TOKENS - 2), CHAIN),
    condition="the tokens carry no positions: with positions added to them it fails",
)
def _permutations(attend: Attend, relation: Relation) -> list[str]:
    generators = [swap(0, 1), rotation()]
    faults = symmetry_faults(attend, relation, kept=generators)
    places = torch.linspace(-2, 2, TOKENS)[:, None]

    def placed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, among: Relation) -> torch.Tensor:
        return attend(query + places, key + places, value, among)

    return faults + symmetry_faults(placed, relation, broken=generators)


# -- the four readings -----------------------------------------------------------------------------


def _in_a_circle(attend: Attend, relation: Relation) -> list[str]:
    """Check that only the identity commutes: by group for all permutations, by results for some."""
    group = automorphisms(assumed(attend, relation), TOKENS)
    faults = [f"{group.order} permutations keep the relation"] if group.order != 1 else []
    shifts = [rotation(m) for m in range(1, TOKENS)]
    return faults + symmetry_faults(attend, relation, broken=[*shifts, *swaps()])


def _elsewhere(attend: Attend, relation: Relation) -> list[str]:
    """Check that the tokens at positions m, m + 1, ... give what they give at 0, 1, ..."""
    after = 3
    faults = []
    for m in (1, 2, 5):
        tokens = make_tokens(m + TOKENS + after)
        inside = Documents(torch.tensor([-1] * m + [0] * TOKENS + [-1] * after))
        moved = attend(*tokens, relation & inside)[..., m:-after, :]
        own = part(tokens, slice(m, -after))
        faults += compare(f"moved by {m}", own, moved, attend(*own, relation), relation)
    return faults


def _on_the_integers(attend: Attend, relation: Relation) -> list[str]:
    found = assumed(attend, relation, 2 * TOKENS)
    return [] if has_only_translations(found, 2 * TOKENS) else ["its symmetries are not the translations"]


def _dropped(attend: Attend, relation: Relation, previous: int, own: Relation) -> list[str]:
    """Check that dropping m tokens changes the first ``previous`` of the remaining, and no other."""
    tokens = make_tokens()
    whole, bound = attend(*tokens, relation), bound_of(tokens, own)
    faults = []
    for m in (1, 2, 4):
        later = attend(*part(tokens, slice(m, None)), relation)
        changed = ((later - whole[..., m:, :]).abs().amax(-1)[0, 0] > bound).tolist()
        if changed != [row < previous for row in range(TOKENS - m)]:
            faults.append(f"without the first {m} tokens, these rows change: {changed}")
    return faults


@CLAIMS.add(
    "Theorem 6",
    _IN_MASKED,
    "only the identity commutes: a total order of n tokens has no other symmetry",
    relation=Causal(),
    wrong=(Full(), Window(before=0), RING),
    condition="n >= 2",
    reading=READINGS["Theorem 6"][0],
)
def _masked_in_a_circle(attend: Attend, relation: Relation) -> list[str]:
    return _in_a_circle(attend, relation)


@CLAIMS.add(
    "Theorem 6",
    _IN_MASKED,
    "the tokens at positions m, ..., m + n - 1, with nothing related elsewhere, give what they give at "
    "0, ..., n - 1, borders included, since (i + m, j + m) is related if and only if (i, j) is",
    relation=Causal(),
    wrong=(Chunks(4), Prefix(3), Global([0]) | Window(before=2)),
    reading=READINGS["Theorem 6"][1],
)
def _masked_elsewhere(attend: Attend, relation: Relation) -> list[str]:
    return _elsewhere(attend, relation)


@CLAIMS.add(
    "Theorem 6",
    _IN_MASKED,
    "the symmetries of the integers with j <= i are exactly the translations. Translations keep it; another "
    "symmetry, moved back by a translation, would be one of n tokens (reading 1)",
    relation=Causal(),
    wrong=(Full(), Chunks(4), Window(before=0), Dilated(2, before=3)),
    reading=READINGS["Theorem 6"][2],
)
def _masked_on_the_integers(attend: Attend, relation: Relation) -> list[str]:
    return _on_the_integers(attend, relation)


@CLAIMS.add(
    "Theorem 6",
    _IN_MASKED,
    "every remaining token changes, since each sees the first: masked attention is not local",
    relation=Causal(),
    wrong=(Window(before=PREVIOUS), Window(before=TOKENS - 2), Chunks(4)),
    reading=READINGS["Theorem 6"][3],
)
def _masked_dropped(attend: Attend, relation: Relation) -> list[str]:
    return _dropped(attend, relation, TOKENS, Causal())


@CLAIMS.add(
    "Theorem 7",
    _IN_STRIDE,
    "only the identity commutes: the unique topological order must be kept",
    relation=Window(before=PREVIOUS),
    wrong=(Full(), Window(before=0), RING),
    condition="p >= 1: with p = 0 all of S_n commutes",
    reading=READINGS["Theorem 7"][0],
)
def _strided_in_a_circle(attend: Attend, relation: Relation) -> list[str]:
    return _in_a_circle(attend, relation)


@CLAIMS.add(
    "Theorem 7",
    _IN_STRIDE,
    "the tokens at positions m, ..., m + n - 1, with nothing related elsewhere, give what they give at "
    "0, ..., n - 1, borders included",
    relation=Window(before=PREVIOUS),
    wrong=(Chunks(4), Prefix(3), Global([0]) | Window(before=2)),
    reading=READINGS["Theorem 7"][1],
)
def _strided_elsewhere(attend: Attend, relation: Relation) -> list[str]:
    return _elsewhere(attend, relation)


@CLAIMS.add(
    "Theorem 7",
    _IN_STRIDE,
    "the symmetries of the integers with i - p <= j <= i are exactly the translations: the transitive "
    "closure is j <= i, whose symmetries they are. On a ring of n tokens they are the n rotations",
    relation=Window(before=PREVIOUS),
    wrong=(Full(), Chunks(4), Window(before=0), Dilated(2, before=3)),
    condition="p >= 1, and p < n - 1 on the ring",
    reading=READINGS["Theorem 7"][2],
)
def _strided_on_the_integers(attend: Attend, relation: Relation) -> list[str]:
    faults = _on_the_integers(attend, relation)
    query = 2 * TOKENS - 1  # far from the border
    row = assumed(attend, relation, 2 * TOKENS).dense(2 * TOKENS, 2 * TOKENS)[query]
    offsets = (row.nonzero()[:, 0] - query).tolist()
    ring = on_a_ring(offsets)
    group = automorphisms(ring, TOKENS)
    if group.name != f"Z_{TOKENS}":
        faults.append(f"the group on a ring is {group.name}")
    return faults + symmetry_faults(attend, ring, [rotation()], swaps())


@CLAIMS.add(
    "Theorem 7",
    _IN_STRIDE,
    "the first p of the remaining tokens change, those after them do not: strided attention is local",
    relation=Window(before=PREVIOUS),
    wrong=(Causal(), Window(before=PREVIOUS - 1), Window(before=PREVIOUS + 1), Chunks(4)),
    condition="away from the border",
    reading=READINGS["Theorem 7"][3],
)
def _strided_dropped(attend: Attend, relation: Relation) -> list[str]:
    return _dropped(attend, relation, PREVIOUS, Window(before=PREVIOUS))


# -- Corollary 1 and Theorem 8 -----------------------------------------------------------------------


@CLAIMS.add(
    "Corollary 1",
    "strided attention subsumes masked attention",
    "on n tokens, strided attention with p previous tokens is masked attention if and only if p >= n - 1",
    relation=Window(before=TOKENS - 1),
    wrong=(Window(before=TOKENS - 2), Full(), Causal().T),
)
def _subsumes(attend: Attend, relation: Relation) -> list[str]:
    tokens = make_tokens()
    masked = attend(*tokens, Causal())
    faults = [] if relation.equivalent(Causal(), TOKENS, TOKENS) else ["pairs differ"]
    faults += compare("results", tokens, attend(*tokens, relation), masked, Causal())
    for p in range(TOKENS - 1):
        strided = attend(*tokens, Window(before=p))
        if not differences("", strided, masked, bound_of(tokens, Causal())):
            faults.append(f"p = {p} gives the same result")
    return faults


@CLAIMS.add(
    "Theorem 8",
    "equivariance in encoder-decoder attention",
    "it commutes with S_X x S_Y, whose blocks are the inputs X and the outputs Y: outputs are permuted with "
    "their queries (equivariant) and do not depend on the order of the inputs (invariant)",
    relation=Bipartite(TOKENS // 2),
    wrong=(Full(), Causal(), Bipartite(TOKENS // 2 - 1), Chunks(TOKENS // 2)),
    condition="the blocks stay: their exchange, where |X| = |Y|, keeps the partition and does not commute",
)
def _blocks(attend: Attend, relation: Relation) -> list[str]:
    half = TOKENS // 2
    every = list(range(TOKENS))
    turned = [*every[1:half], 0]
    of_inputs = [swap(0, 1), [*turned, *every[half:]]]
    of_outputs = [swap(half, half + 1), [*every[:half], *(half + i for i in turned)]]
    exchange = [*every[half:], *every[:half]]
    faults = symmetry_faults(attend, relation, of_inputs + of_outputs, [exchange])
    group = automorphisms(assumed(attend, relation), TOKENS)
    if group.orbits != (tuple(every[:half]), tuple(every[half:])) or group.name != f"S_{half} x S_{half}":
        faults.append(f"the group is {group.name} with blocks {group.orbits}")
    query, key, value = tokens = make_tokens()
    outputs = attend(*tokens, relation)[..., half:, :]
    for p in of_inputs:
        shuffled = attend(query, key[..., p, :], value[..., p, :], relation)[..., half:, :]
        faults += compare(f"inputs in the order {p}", tokens, shuffled, outputs, relation)
    return faults

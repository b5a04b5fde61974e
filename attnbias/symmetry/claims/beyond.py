"""What the paper does not state: the converse, depth, multi-level scores, convolution."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import testing
from ...relations import Causal, Chunks, Empty, Full, PerHead, Relation, Window
from ...scores.multilevel import MultiLevel
from ..groups import automorphisms
from .claim import Attend, Claims
from .measure import (
    CHAIN,
    LESS,
    MORE,
    SQUARES,
    TOKENS,
    assumed,
    differences,
    make_tokens,
    on_a_ring,
    rotation,
    swaps,
    symmetry_faults,
)

CLAIMS = Claims()
_OFFSETS = (-1, 0, 1)  # of a kernel of three


@CLAIMS.add(
    "Beyond 1",
    "automorphisms",
    "attention over a relation commutes with every automorphism of it",
    relation=SQUARES,
    wrong=(CHAIN, LESS, MORE, Causal()),
)
def _automorphisms(attend: Attend, relation: Relation) -> list[str]:
    return symmetry_faults(attend, relation, kept=automorphisms(SQUARES, TOKENS).generators)


@CLAIMS.add(
    "Beyond 2",
    "no others",
    "no other permutation commutes with it: one that does maps the pairs of weights that are not 0 to "
    "themselves",
    relation=SQUARES,
    wrong=(Full(), Empty(), Window(before=0)),
    condition="the tokens are in general position: equal tokens can always be exchanged",
)
def _no_others(attend: Attend, relation: Relation) -> list[str]:
    order = automorphisms(assumed(attend, relation), TOKENS).order  # of all permutations that commute
    faults = [f"{order} permutations commute"] if order != automorphisms(SQUARES, TOKENS).order else []
    table = SQUARES.dense(TOKENS, TOKENS)
    others = [p for p in [*swaps(), rotation()] if not torch.equal(table[p][:, p], table)]
    return faults + symmetry_faults(attend, relation, broken=others)


@CLAIMS.add(
    "Beyond 3",
    "depth",
    "layers over one relation, stacked with residuals, commute with its automorphisms",
    relation=SQUARES,
    wrong=(CHAIN, LESS, MORE, Causal()),
)
def _depth(attend: Attend, relation: Relation) -> list[str]:
    tokens = make_tokens(size=6)

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
    for p in automorphisms(SQUARES, TOKENS).generators:
        moved = twice(attend, *(x[..., list(p), :] for x in tokens))
        still = twice(attend, *tokens)[..., list(p), :]
        faults += differences(f"two layers and {p}", moved, still, bound)
    return faults


@CLAIMS.add(
    "Beyond 4",
    "multi-level scores",
    "self-attention with MultiLevel scores commutes with the automorphisms of its levels, a relation per "
    "head: the symmetries of a binary tree, 2^(n - 1) of them, which exchange the halves of a block. It "
    "commutes with no other exchange of two tokens, and with no rotation by one",
    relation=PerHead([Full(), Chunks(TOKENS // 2), Chunks(TOKENS // 4)]),
    wrong=(
        PerHead([Full(), Chunks(TOKENS // 2), Window(before=0)]),
        PerHead([Full(), Full(), Chunks(TOKENS // 4)]),
    ),
    condition="n is a power of 2, and each level halves the one before",
)
def _levels(attend: Attend, relation: Relation) -> list[str]:
    score = MultiLevel([4, 2, 2])
    group = automorphisms(relation, TOKENS)
    faults = [f"{group.order} automorphisms"] if group.order != 2 ** (TOKENS - 1) else []
    table = relation.dense(TOKENS, TOKENS)
    listed = [*group.generators, *swaps(), rotation()]
    kept = [p for p in listed if torch.equal(table[..., p, :][..., p], table)]
    broken = [p for p in listed if p not in kept]
    return faults + symmetry_faults(attend, Full(), kept, broken, score=score)


@CLAIMS.add(
    "Beyond 5",
    "convolution",
    "a convolution is the sum of attention heads of which each relates a token to one offset: a single key "
    "has weight 1 whatever its score, and a token without one gets zeros, which is zero padding. On a ring "
    "it commutes with the n translations and nothing else",
    relation=PerHead([Window(before=0).shift(offset) for offset in _OFFSETS]),
    wrong=(
        PerHead([Window(before=0).shift(offset) for offset in (-1, 0, 2)]),
        PerHead([Window(before=0).shift(offset) for offset in (1, 0, -1)]),
        PerHead([Window(before=1, after=1)] * 3),
    ),
    condition="each offset has its own head: the weights of one head are positive, so it only takes means",
)
def _convolution(attend: Attend, relation: Relation) -> list[str]:
    tokens = make_tokens()
    x = tokens[2][0, 0]  # [L, channels in]
    rng = torch.Generator().manual_seed(0)
    kernel = torch.randn(len(_OFFSETS), x.shape[1], 4, generator=rng)  # [H, channels in, channels out]

    def convolve(query: Tensor, key: Tensor, value: Tensor, among: Relation) -> Tensor:
        heads = (each.expand(-1, len(_OFFSETS), -1, -1) for each in (query, key))
        return attend(*heads, value @ kernel, among).sum(1, keepdim=True)

    truth = torch.nn.functional.conv1d(x.double().T[None], kernel.double().permute(2, 1, 0), padding=1)
    # Heads are copies of values, so only products and their sum over channels and heads are rounded: at most
    # a step each, two with half a step each where two results are compared.
    steps = x.shape[1] * len(_OFFSETS)
    bound = steps * torch.finfo(torch.float32).eps * (x.abs() @ kernel.abs()).sum(0).max().item()
    faults = differences("torch's convolution", convolve(*tokens, relation)[0, 0], truth[0].T, bound)

    middle = TOKENS // 2
    rows = relation.dense(TOKENS, TOKENS)[0, :, middle]  # [H, K], far from the borders
    ring = PerHead([on_a_ring((row.nonzero()[:, 0] - middle).tolist()) for row in rows])
    group = automorphisms(ring, TOKENS)
    if group.name != f"Z_{TOKENS}":
        faults.append(f"the group on a ring is {group.name}")
    return faults + symmetry_faults(convolve, ring, [rotation()], swaps(), bound=bound)

"""Claims that the paper does not state: the converse, depth, multi-level scores, convolution, triples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ... import testing
from ...relations import Causal, Chunks, Empty, Full, Graph, Neighborhood, PerHead, Relation, Window
from ...scores.multilevel import MultiLevel
from ...simplicial import simplicial_attention
from ..groups import automorphisms
from .claim import Attend, Claims
from .measure import (
    CHAIN,
    LESS,
    MORE,
    SQUARES,
    TOKENS,
    assumed,
    called,
    differences,
    make_tokens,
    on_a_ring,
    rotation,
    swap,
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


def _faults_of_convolution(
    attend: Attend, relation: Relation, torus: Relation, shape: tuple[int, ...], kept: Sequence[Sequence[int]]
) -> list[str]:
    """Compare heads over some offsets with torch's convolution of three taps along each axis.

    Args:
        attend: attention.
        relation: a head per tap.
        torus: the same offsets on a grid without borders.
        shape: of the grid.
        kept: translations that generate all.
    """
    n, taps = math.prod(shape), 3 ** len(shape)
    tokens = make_tokens(n)
    x = tokens[2][0, 0]  # [L, channels in]
    kernel = torch.randn(taps, x.shape[1], 4, generator=torch.Generator().manual_seed(0))  # [H, in, out]

    def convolve(query: Tensor, key: Tensor, value: Tensor, among: Relation) -> Tensor:
        heads = (each.expand(-1, taps, -1, -1) for each in (query, key))
        return attend(*heads, value @ kernel, among).sum(1, keepdim=True)

    image, filters = x.double().T.unflatten(1, shape), kernel.double().permute(2, 1, 0)
    convolution = torch.nn.functional.conv1d if len(shape) == 1 else torch.nn.functional.conv2d
    truth = convolution(image[None], filters.unflatten(2, (3,) * len(shape)), padding=1)
    # Heads are copies of values, so only products and their sum over channels and heads are rounded: at most
    # a step each, two with half a step each where two results are compared.
    steps = x.shape[1] * taps
    bound = steps * torch.finfo(torch.float32).eps * (x.abs() @ kernel.abs()).sum(0).max().item()
    faults = differences(
        "torch's convolution", convolve(*tokens, relation)[0, 0], truth[0].flatten(1).T, bound
    )
    order = automorphisms(torus, n).order
    if order != n:
        faults.append(f"without borders {order} permutations keep the offsets")
    mirrored = list(range(n))[::-1]
    exchanges = [swap(0, j, n) for j in range(1, n)]
    return faults + symmetry_faults(convolve, torus, kept, [mirrored, *exchanges], n, bound)


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
    middle = TOKENS // 2
    rows = relation.dense(TOKENS, TOKENS)[0, :, middle]  # [H, K], far from the borders
    ring = PerHead([on_a_ring((row.nonzero()[:, 0] - middle).tolist()) for row in rows])
    return _faults_of_convolution(attend, relation, ring, (TOKENS,), [rotation()])


_GRID = (3, 4)
_TAPS = tuple(itertools.product(_OFFSETS, repeat=2))


def _per_offset(offsets: Iterable[tuple[int, ...]]) -> PerHead:
    return PerHead([Neighborhood(_GRID, radius=0, offset=offset) for offset in offsets])


@CLAIMS.add(
    "Beyond 6",
    "convolution of images",
    "the same holds on a grid, with a head for each of the nine offsets of a 3 x 3 kernel; the union of "
    "their relations is the neighbourhood of radius 1. On a torus it commutes with the height x width "
    "translations and nothing else",
    relation=_per_offset(_TAPS),
    wrong=(
        called("offsets with rows and columns exchanged", _per_offset((x, y) for y, x in _TAPS)),
        called("offsets of the opposite sign", _per_offset(_TAPS[::-1])),
        called("the offset (0, 0) twice and (-1, -1) not", _per_offset([(0, 0), *_TAPS[1:]])),
        called("all nine neighbours in each head", PerHead([Neighborhood(_GRID, radius=1)] * 9)),
    ),
    condition="each offset has its own head",
)
def _convolution_of_images(attend: Attend, relation: Relation) -> list[str]:
    height, width = _GRID
    n = height * width
    among = relation.dense(n, n)[0]  # [H, Q, K]
    union = Neighborhood(_GRID, radius=1).dense(n, n)
    faults = [] if torch.equal(among.any(0), union) else ["the union is not the neighbourhood"]
    # The offsets are read from a token away from the borders, and wrapped around them.
    y, x = 1, 1
    places = [[divmod(k, width) for k in row.nonzero()[:, 0].tolist()] for row in among[:, y * width + x]]
    torus = PerHead([_on_a_torus([(b - y, a - x) for b, a in each]) for each in places])
    kept = [
        [(i // width + dy) % height * width + (i + dx) % width for i in range(n)]
        for dy, dx in ((1, 0), (0, 1))
    ]
    return faults + _faults_of_convolution(attend, relation, torus, _GRID, kept)


def _on_a_torus(offsets: Sequence[tuple[int, int]]) -> Graph:
    """Relate each token of the grid to the keys at these offsets from it, around the borders."""
    height, width = _GRID
    edges = [
        ((y + dy) % height * width + (x + dx) % width, y * width + x)
        for dy, dx in offsets
        for y in range(height)
        for x in range(width)
    ]
    return Graph(torch.tensor(edges).T.reshape(2, -1), num_nodes=height * width)


_OTHERS = Full() - Window(before=0)
_TRIPLES = PerHead([SQUARES, SQUARES.T, _OTHERS])  # first, second, between


@CLAIMS.add(
    "Beyond 7",
    "triples",
    "attention of a token i to pairs (j, k), over the triples with (i, j) in a first relation, (i, k) in a "
    "second and (j, k) in a third, commutes with every permutation that keeps the three, the automorphisms "
    "of a relation per head. It commutes with no other exchange of two tokens, and with no rotation by one",
    relation=_TRIPLES,
    wrong=(
        called("a chain as the first", PerHead([CHAIN, SQUARES.T, _OTHERS])),
        called("Causal() as the second", PerHead([SQUARES, Causal(), _OTHERS])),
        called("Causal() as the third", PerHead([SQUARES, SQUARES.T, Causal()])),
        called("Full() as the third", PerHead([SQUARES, SQUARES.T, Full()])),
        PerHead([Full(), Full(), Full()]),
    ),
    condition="each related pair is part of a triple, for the second half",
)
def _triples(attend: Attend, relation: Relation) -> list[str]:
    tokens = make_tokens()
    exact = _define_triples(*(x.double() for x in tokens))
    rounded = _define_triples(*tokens)
    sizes = [x.double().norm(dim=-1).max().item() for x in tokens]
    score = 1 + sizes[0] * sizes[1] ** 2 * tokens[0].shape[-1] ** -0.5
    # The rule for one layer, as rounded in the definition.
    error = (rounded.double() - exact).abs().max().item()
    step = torch.finfo(torch.float32).eps * (exact.abs().max().item() + score * sizes[2] ** 2)
    bound = 2 * (2 * error + step)
    out = attend(*tokens, relation, run=_attend_to_pairs)
    faults = differences("the definition", out, exact, bound)
    group = automorphisms(_TRIPLES, TOKENS)
    table = _TRIPLES.dense(TOKENS, TOKENS)
    broken = [p for p in [*swaps(), rotation()] if not torch.equal(table[..., p, :][..., p], table)]
    return faults + symmetry_faults(
        attend, relation, group.generators, broken, bound=bound, run=_attend_to_pairs
    )


def _attend_to_pairs(query: Tensor, key: Tensor, value: Tensor, relation: PerHead) -> Tensor:
    """Attend over triples; the second keys and values are other features of the same tokens."""
    return simplicial_attention(query, key, value, key.flip(-1), value.flip(-1), *relation.parts)


def _define_triples(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the same over the claim's own relations by the definition, from all triples."""
    first, second, between = _TRIPLES.dense(TOKENS, TOKENS)[0]
    scores = torch.einsum("bhid,bhjd,bhkd->bhijk", query, key, key.flip(-1)) * query.shape[-1] ** -0.5
    related = first[:, :, None] & second[:, None] & between
    weights = scores.masked_fill(~related, -torch.inf).flatten(3).softmax(-1).view(scores.shape)
    return torch.einsum("bhijk,bhjd,bhkd->bhid", weights, value, value.flip(-1))

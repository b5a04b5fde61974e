"""Trees of tokens, and sequences packed into them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import attnbias as ab


def ancestors(parents: list[int]) -> np.ndarray:
    """Walk up from each token."""
    mask = np.zeros((len(parents),) * 2, bool)
    for token in range(len(parents)):
        at = token
        while at >= 0:
            mask[token, at] = True
            at = parents[at]
    return mask


def draw(seed: int) -> list[int]:
    """Draw a forest: wide or deep, with its tokens in order or shuffled."""
    rng = np.random.default_rng(seed)
    length, near = int(rng.integers(0, 30)), int(rng.choice([2, 40]))
    parents = np.array([max(-1, i - int(rng.integers(1, near + 1))) for i in range(length)], int)
    if seed % 3 == 0:
        order = rng.permutation(length)
        new = np.append(np.argsort(order), -1)
        parents = new[parents[order]]
    return parents.tolist()


@pytest.mark.parametrize("seed", range(30))
def test_a_token_sees_its_ancestors_and_itself(seed: int) -> None:
    parents = draw(seed)
    length, want = len(parents), ancestors(parents)
    tree = ab.Tree(np.array(parents, np.int32))
    assert np.array_equal(tree.dense(length, length), want)
    assert np.array_equal(ab.Layout.build(tree, length, length).to_dense(), want)
    assert tree.depth.tolist() == (want.sum(1) - 1).tolist()
    assert np.array_equal(ab.Layout.build(tree.T, length, length).to_dense(), want.T)
    for first in range(0, length, 7):
        part = ab.Layout.build(tree, length - first, length, q_start=first)
        assert np.array_equal(part.to_dense(), want[first:])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "along", [ab.Window(before=2), ab.Chunks(2), ab.Dilated(2, 3), ab.Columns(2), ab.Prefix(2), ab.Full()]
)
def test_a_relation_along_paths_counts_depth(seed: int, along: ab.Relation) -> None:
    parents = draw(seed)
    length, want = len(parents), ancestors(parents)
    depth = want.sum(1) - 1
    want &= along.dense(length, length).numpy()[np.ix_(depth, depth)]
    relation = ab.Tree(parents).each(along)
    assert np.array_equal(relation.dense(length, length), want)
    assert np.array_equal(ab.Layout.build(relation, length, length).to_dense(), want)


def test_batches_have_trees_of_their_own() -> None:
    rows = [[-1, 0, 1, 0], [-1, -1, 0, 1], [-1, 0, 1, 0]]
    tree = ab.Tree(rows)
    want = np.stack([ancestors(row) for row in rows])[:, None]
    assert np.array_equal(tree.dense(4, 4), want)
    layout = ab.Layout.build(tree, 4, 4)
    assert np.array_equal(layout.to_dense(), want)
    assert layout.groups == 2, "equal trees are held once"


@pytest.mark.parametrize("seed", range(20))
def test_packed_sequences_see_what_they_saw_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 3, rng.integers(0, 7)).tolist() for _ in range(rng.integers(0, 6))]
    packed = ab.Tree.from_sequences(sequences)
    count = len(packed.ids)
    mask = packed.tree.dense(count, count)
    for tokens, place in zip(sequences, packed.index, strict=True):
        assert packed.ids[place].tolist() == tokens
        assert packed.positions[place].tolist() == list(range(len(tokens)))
        assert torch.equal(mask[place][:, place], torch.ones(len(tokens), len(tokens)).tril().bool())
        assert int(mask[place].sum()) == len(tokens) * (len(tokens) + 1) // 2, "and nothing else"
    assert float(packed.weights.sum()) == sum(map(len, sequences))
    assert count == len({tuple(s[: n + 1]) for s in sequences for n in range(len(s))})
    assert (packed.tree.parents < torch.arange(count)).all()
    form = packed.tree.bind(count, count).solid
    assert len(form.start) <= sum(map(len, sequences)) * max(1, len(sequences))


def test_saved_is_the_share_of_shared_tokens() -> None:
    assert ab.Tree.from_sequences([[1, 2, 3, 4], [1, 2, 3, 5]]).saved == 1 - 5 / 8
    assert ab.Tree.from_sequences([]).saved == 0.0


def test_a_large_tree_has_one_range_for_each_branching() -> None:
    rng = np.random.default_rng(0)
    prompt = [0] * 1000
    packed = ab.Tree.from_sequences([[*prompt, 1 + i, *rng.integers(0, 9, 500).tolist()] for i in range(16)])
    form = packed.tree.bind(len(packed.ids), len(packed.ids)).solid
    assert int(np.diff(form.ptr).max()) == 2  # the prompt and the own answer


BAD: list[tuple[Any, str]] = [
    (lambda: ab.Tree([1, 0]), "parents: wanted a tree, got a cycle above token 0"),
    (lambda: ab.Tree([-1, 1]), "parents: wanted a tree, got a cycle above token 1"),
    (lambda: ab.Tree([-1, 2, 3, 1]), "parents: wanted a tree, got a cycle above token 1"),
    (lambda: ab.Tree([-1, 2]), r"parents: wanted -1 \(none\) to 1, got 2"),
    (lambda: ab.Tree([-2]), r"parents: wanted -1 \(none\) to 0, got -2"),
    (lambda: ab.Tree([0.5]), "parents: wanted integers"),
    (lambda: ab.Tree([[[0]]]), "parents: wanted 1 or 2 dimensions"),
    (lambda: ab.Tree(None), "parents: wanted integers in a tensor"),
    (lambda: ab.Tree([-1, 0]).bind(3, 3), "this Tree is for 2 keys, got k_len = 3"),
    (
        lambda: ab.Tree([-1, 0]).bind(2, 2, q_start=1),
        "this Tree is for 2 queries, got q_len = 2 at q_start = 1",
    ),
    (lambda: ab.Tree([-1, 0]).each("x"), "relation: wanted a relation, got 'x'"),
    (lambda: ab.Tree([-1, 0]).each(ab.Tree([-1])), "relation: wanted one that fits paths of any length"),
    (lambda: ab.Tree([-1]).each(ab.PerHead([ab.Causal()] * 2)), "relation: wanted one that fits paths"),
    (
        lambda: ab.Tree.from_sequences(torch.zeros(2, 3)),
        "sequences: wanted a list of token lists, got Tensor",
    ),
    (lambda: ab.Tree.from_sequences(5), "sequences: wanted a list of token lists, got int"),
    (lambda: ab.Tree.from_sequences([[1], [2.5]]), r"sequences\[1\]: wanted integers"),
    (lambda: ab.Tree.from_sequences([[[1]]]), r"sequences\[0\]: wanted 1 dimensions"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[text[:40] for _, text in BAD])
def test_bad_trees_raise_one_sentence(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        make()
    assert "\n" not in str(caught.value)

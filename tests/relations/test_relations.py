"""Each relation against a grid written by hand, its value semantics, and the text of its errors."""

from __future__ import annotations

import pickle

import pytest
import torch

import attnbias as ab
from attnbias.relations import parse
from attnbias.relations.recipe import restore

GRIDS = [
    (ab.Full(), (2, 3), 0, "### ###"),
    (ab.Empty(), (2, 3), 0, "... ..."),
    (ab.Causal(), (3, 4), 0, "#... ##.. ###."),
    (ab.Causal(), (2, 4), "end", "###. ####"),
    (ab.Causal(), (3, 1), "end", ". . #"),
    (ab.Window(before=1), (4, 4), 0, "#... ##.. .##. ..##"),
    (ab.Window(before=1, after=1), (3, 4), 1, "###. .### ..##"),
    (ab.Window(before=None, after=1), (3, 4), 0, "##.. ###. ####"),
    (ab.Window(before=0, after=None), (3, 3), 0, "### .## ..#"),
    (ab.Dilated(2, before=1, after=1), (4, 5), 0, "#.#.. .#.#. #.#.# .#.#."),
    (ab.Dilated(3, before=2), (2, 7), 5, "..#..#. #..#..#"),
    (ab.Columns(2), (4, 4), 0, "#... .#.. #.#. .#.#"),
    (ab.Columns(3), (1, 5), "end", ".#..#"),
    (ab.Chunks(2), (4, 5), 0, "##... ##... ..##. ..##."),
    (ab.Chunks(3), (2, 5), 2, "###.. ...##"),
    (ab.Prefix(2), (3, 4), 0, "##.. ##.. ##.."),
    (ab.Bipartite(2), (4, 4), 0, ".... .... ##.. ##.."),
    (ab.Global([1, 3]), (4, 4), 0, ".#.# #### .#.# ####"),
    (ab.Documents([0, 0, 1, -1]), (4, 4), 0, "##.. ##.. ..#. ...."),
    (ab.Documents([0, 1, 0]), (3, 3), 0, "#.# .#. #.#"),
    (ab.Documents([0, 1], key_ids=[1, 1, 0]), (2, 3), 0, "..# ##."),
    (ab.Documents([0, 0, 1]), (1, 3), 2, "..#"),
    (ab.Documents.from_lengths([1, 0, 2]), (3, 3), 0, "#.. .## .##"),
    (ab.Documents.from_cu_seqlens(torch.tensor([0, 1, 3])), (3, 3), 0, "#.. .## .##"),
    (
        ab.Documents.from_cu_seqlens(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3])),
        (2, 3),
        0,
        "##. ..#",
    ),
    (
        ab.Documents.from_lengths([2, 3]).each(ab.Bipartite(1)),
        (5, 5),
        0,
        "..... #.... ..... ..#.. ..#..",
    ),
    (ab.Documents([0, 1, 0, 1]).each(ab.Causal()), (4, 4), 0, "#... .#.. #.#. .#.#"),
    (ab.Neighborhood((4,), 1), (4, 4), 0, "##.. ###. .### ..##"),
    (ab.Neighborhood((4,), 1, border="clamp"), (4, 4), 0, "###. ###. .### .###"),
    (ab.Neighborhood((4,), 1, causal=True), (4, 4), 0, "#... ##.. .##. ..##"),
    (ab.Neighborhood((5,), 1, dilation=2), (5, 5), 0, "#.#.. .#.#. #.#.# .#.#. ..#.#"),
    (
        ab.Neighborhood((6,), 1, 2, border="clamp"),
        (6, 6),
        0,
        "#.#.#. .#.#.# #.#.#. .#.#.# #.#.#. .#.#.#",
    ),
    (ab.Neighborhood((2, 2), (1, 0)), (4, 4), 0, "#.#. .#.# #.#. .#.#"),
    (ab.Neighborhood((2, 2, 2), (0, 1, 0)), (2, 8), 3, ".#.#.... ....#.#."),
    (ab.Graph([[0, 2, 2], [1, 0, 0]], num_nodes=3), (3, 3), 0, "..# #.. ..."),
    (ab.Graph([[0, 2], [1, 0]], size=(3, 2)), (2, 3), 0, "..# #.."),
    (ab.Neighbors([[2, -1], [0, 1]]), (2, 3), 0, "..# ##."),
    (ab.Where(lambda q, k: q == 2 * k), (3, 3), 0, "#.. ... .#."),
    (ab.Where(lambda b, h, q, k: q > k), (2, 2), 0, ".. #."),
    (ab.Dense(torch.tensor([[True, False], [False, True]])), (2, 2), 0, "#. .#"),
    (~ab.Causal(), (3, 3), 0, ".## ..# ..."),
    (ab.Full() - ab.Prefix(1), (2, 3), 0, ".## .##"),
    (ab.Columns(2).T, (3, 3), 0, "#.# .#. ..#"),
    (ab.Graph([[0], [1]], num_nodes=2).T, (2, 2), 0, ".# .."),
    (ab.Causal().shift(1), (3, 4), 0, "##.. ###. ####"),
    (ab.Causal().shift(-1), (3, 3), 0, "... #.. ##."),
    (ab.Chunks(2).shift(1), (3, 4), 0, ".##. .##. ...#"),
    (ab.Window(before=1).permute([2, 0, 1]), (3, 3), 0, "#.# .#. .##"),
    (ab.Window(before=1) | ab.Global([0]), (4, 4), 0, "#### ##.. ###. #.##"),
]


@pytest.mark.parametrize(("relation", "lengths", "q_start", "grid"), GRIDS, ids=lambda x: repr(x)[:40])
def test_relation_matches_the_grid_drawn_by_hand(relation, lengths, q_start, grid):
    wanted = grid.replace(" ", "\n")
    assert relation.picture(*lengths, q_start) == wanted
    assert relation.count(*lengths, q_start) == wanted.count("#")
    layout = ab.Layout.build(relation, *lengths, q_start=q_start)
    assert torch.equal(layout.to_dense(), relation.dense(*lengths, q_start))


def test_batch_and_head_relations_are_dense_in_four_dimensions():
    per_head = ab.PerHead([ab.Causal(), ab.Full()])
    assert per_head.dense(2, 2).tolist() == [[[[True, False], [True, True]], [[True] * 2] * 2]]
    padding = ab.Padding([1, 2])
    assert padding.dense(1, 2).tolist() == [[[[True, False]]], [[[True, True]]]]
    left = ab.Padding.from_mask(torch.tensor([[False, True], [True, True]]))
    assert left.dense(1, 2).tolist() == [[[[False, True]]], [[[True, True]]]]
    both = per_head & padding
    assert both.dense(2, 2).shape == (2, 2, 2, 2)
    assert both.picture(2, 2, batch=1, head=0) == "#.\n##"
    per_batch = ab.PerBatch([ab.Empty(), ab.Causal()])
    assert per_batch.dense(1, 1).flatten().tolist() == [False, True]
    assert ab.Prefix(torch.tensor([0, 1])).dense(1, 1).flatten().tolist() == [False, True]
    assert ab.Documents([[0, 0], [0, 1]]).dense(2, 2)[:, 0].sum((1, 2)).tolist() == [4, 2]
    assert ab.Neighbors([[[0]], [[1]]]).dense(1, 2).tolist() == [[[[True, False]], [[False, True]]]]


def test_random_blocks_draw_exactly_count_blocks_whatever_the_length():
    relation = ab.RandomBlocks(size=4, count=3, seed=7)
    dense = relation.dense(64, 64)
    assert (dense.sum(1) == 12).all()
    blocks = dense.view(16, 4, 16, 4)
    assert torch.equal(blocks.any(3).any(1), blocks.all(3).all(1))
    assert torch.equal(relation.dense(40, 40), dense[:40, :40])
    assert torch.equal(relation.dense(1, 64, 30), dense[30:31])
    assert not torch.equal(ab.RandomBlocks(4, 3, seed=8).dense(64, 64), dense)
    drawn = ab.RandomBlocks(1, 1, seed=0).dense(4096, 4096)[-2048:].float().argmax(1)
    assert 0.45 < (drawn < 1536).float().mean() < 0.6  # uniform over the earlier keys


def test_values_compare_hash_and_pickle_by_content():
    pairs = [
        (ab.Causal(), ab.Causal()),
        (ab.Documents([0, 0, 1]), ab.Documents(torch.tensor([0, 0, 1]))),
        (ab.Graph([[0], [1]], num_nodes=2), ab.Graph([[0], [1]], num_nodes=2)),
        (ab.Prefix(2) & ab.Chunks(3), ab.Chunks(3) & ab.Prefix(2)),
        (ab.Global(range(100)), ab.Global(list(range(100)))),
    ]
    for one, two in pairs:
        assert one == two
        assert hash(one) == hash(two)
        assert pickle.loads(pickle.dumps(one)) == one
    assert ab.Documents([0, 1]) != ab.Documents([0, 0])
    assert ab.Window(before=1) != ab.Window(before=2)
    assert ab.Causal() != "causal"
    assert len({ab.Causal(), ab.Causal(), ab.Full()}) == 2


def test_where_is_equal_by_function_and_pickles_with_it():
    assert ab.Where(_diagonal) == ab.Where(_diagonal)
    assert ab.Where(_diagonal) != ab.Where(lambda q, k: q == k)
    assert pickle.loads(pickle.dumps(ab.Where(_diagonal))).dense(2, 2).sum() == 2


def _diagonal(q, k):
    return q == k


@pytest.mark.parametrize("relation", [r for r, *_ in GRIDS if "Where" not in repr(r)], ids=repr)
def test_repr_and_recipe_give_the_relation_back(relation):
    assert parse(repr(relation)) == relation
    assert eval(repr(relation), vars(ab).copy()) == relation
    assert restore(relation.recipe.text, relation.recipe.data) == relation


def test_long_data_is_abbreviated_when_printed():
    assert repr(ab.Documents.from_lengths([300, 17, 707])) == "Documents(ids=<[1024]>)"


def test_data_is_copied_at_construction():
    ids = torch.tensor([0, 0, 1])
    relation = ab.Documents(ids)
    ids.fill_(5)
    assert relation.dense(3, 3).sum() == 5
    mask = torch.ones(2, 2, dtype=torch.bool)
    dense = ab.Dense(mask)
    mask.fill_(False)
    assert dense.count(2, 2) == 4


def test_expressions_stay_small():
    causal, window, docs = ab.Causal(), ab.Window(before=5), ab.Documents.from_lengths([3, 5])
    assert (causal & causal) == causal
    assert (ab.Full() & docs) is docs
    assert (ab.Empty() | docs) is docs
    assert (ab.Empty() & docs) == ab.Empty()
    assert (ab.Full() | docs) == ab.Full()
    assert ~~docs is docs
    assert docs.T is docs
    assert (causal & window) == window
    assert (causal | ab.Window(before=2, after=3)) == ab.Window(before=None, after=3)
    assert (causal | causal.T) == ab.Full()
    assert docs.shift(3).shift(-3) is docs
    three = docs & causal & window
    assert len(three.parts) == 2
    assert len(three.bind(8, 8).solid.start) == 8  # one range per row
    assert ~ab.Full() == ab.Empty()


def test_and_keyword_raises_a_clear_error():
    with pytest.raises(TypeError, match=r"neither true nor false: write a & b, a \| b, ~a"):
        _ = ab.Causal() and ab.Full()
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = ab.Causal() & 3


def test_batched_graphs_are_block_diagonal():
    graph = ab.Graph.batch([ab.Graph([[0], [1]], num_nodes=2), ab.Graph([[0], [0]], num_nodes=1)])
    assert graph.picture(3, 3) == "...\n#..\n..#"
    assert ab.Graph.batch([]).dense(0, 0).shape == (0, 0)


def test_duplicate_edges_have_a_multiplicity_which_an_intersection_keeps():
    graph = ab.Graph([[0, 0, 1], [0, 0, 0]], num_nodes=2)
    at = torch.arange(2)
    assert graph.multiplicity(at[:, None], at).tolist() == [[2, 1], [0, 0]]
    assert graph.count(2, 2) == 2
    assert (graph & ab.Full()).multiplicity(at[:, None], at) is not None  # Full() & x is x
    assert (graph & ab.Prefix(1)).count(2, 2) == 1
    assert (graph & ab.Prefix(1)).multiplicity(at[:, None], at).tolist() == [[2, 0], [0, 0]]
    assert (graph | ab.Prefix(1)).multiplicity(at[:, None], at) is None  # a set
    once = ab.Graph([[0, 1, 1], [0, 0, 0]], num_nodes=2)
    for both in (graph & once, once & graph):
        assert both.multiplicity(at[:, None], at).tolist() == [[2, 2], [0, 0]]
        assert both.bind(2, 2).edges.key.tolist() == [0, 0, 1, 1]
    assert (~graph).count(2, 2) == 2
    neighbours = ab.Neighbors([[1, 1]])
    assert neighbours.multiplicity(at[:1, None], at).tolist() == [[0, 2]]
    turned = ab.PerHead([graph.T, ab.Full()])
    assert turned.multiplicity(at[:, None], at, None, torch.tensor(0)).tolist() == [[2, 0], [1, 0]]


ERRORS = [
    (
        lambda: ab.Window(before=-1),
        ValueError,
        "before: wanted 0 or more, or None for no limit, got -1",
    ),
    (lambda: ab.Window(before=1.5), TypeError, "before: wanted an integer, got 1.5"),
    (lambda: ab.Dilated(0, 1), ValueError, "dilation: wanted at least 1, got 0"),
    (lambda: ab.Columns(0), ValueError, "stride: wanted at least 1, got 0"),
    (lambda: ab.Chunks(-2), ValueError, "size: wanted at least 1, got -2"),
    (lambda: ab.Prefix(-1), ValueError, "length: wanted at least 0, got -1"),
    (lambda: ab.Prefix([]), ValueError, "length: wanted at least one length, got none"),
    (lambda: ab.Prefix([2, -1]), ValueError, "^length: wanted 0 or more, got -1"),
    (lambda: ab.Padding(torch.tensor([-3])), ValueError, "^lengths: wanted 0 or more, got -3"),
    (lambda: ab.Padding(3), TypeError, "lengths: wanted one per batch, got 3"),
    (lambda: ab.Padding([1.0]), TypeError, "lengths: wanted integers, got torch.float32"),
    (
        lambda: ab.Padding.from_mask(torch.ones(2)),
        ValueError,
        r"mask: wanted booleans \[batch, keys\], got torch.float32 \[2\]",
    ),
    (lambda: ab.Global([-1]), ValueError, "positions: wanted 0 or more, got -1"),
    (lambda: ab.Documents([0.5]), TypeError, "ids: wanted integers, got torch.float32"),
    (
        lambda: ab.Documents(torch.zeros(1, 1, 1).long()),
        ValueError,
        r"ids: wanted 1 or 2 dimensions, got shape \[1, 1, 1\]",
    ),
    (
        lambda: ab.Documents([-2]).count(1, 1),
        ValueError,
        r"ids: wanted -1 \(padding\) or more, got -2",
    ),
    (
        lambda: ab.Documents(torch.zeros(2, 3).long(), torch.zeros(3, 3).long()),
        ValueError,
        r"key_ids: wanted the batch of ids, got shapes \[3, 3\] and \[2, 3\]",
    ),
    (
        lambda: ab.Documents([0, 1]).each(ab.Documents([0, 1])),
        ValueError,
        "relation: wanted one that fits documents of any length, got Documents",
    ),
    (lambda: ab.Documents.from_lengths([-1]), ValueError, "lengths: wanted 0 or more, got -1"),
    (
        lambda: ab.Documents.from_cu_seqlens(torch.tensor([1, 2])),
        ValueError,
        r"cu_q: wanted offsets that rise from 0, got \[1, 2\]",
    ),
    (
        lambda: ab.Documents.from_cu_seqlens(torch.tensor([0, 2]), torch.tensor([0])),
        ValueError,
        "cu_k: wanted 2 offsets as in cu_q, got 1",
    ),
    (lambda: ab.Neighborhood((), 1), ValueError, r"shape: wanted one to three axes, got \(\)"),
    (
        lambda: ab.Neighborhood((2, 2), (1,)),
        ValueError,
        r"radius: wanted one for each of 2 axes, got \(1,\)",
    ),
    (
        lambda: ab.Neighborhood((4,), 1, border="wrap"),
        ValueError,
        "border: wanted 'cut' or 'clamp', got 'wrap'",
    ),
    (
        lambda: ab.Neighborhood((4,), 2, border="clamp"),
        ValueError,
        r"radius: border='clamp' wants \(2 \* radius \+ 1\) \* dilation <= 4 tokens of the axis, got 5",
    ),
    (
        lambda: ab.Graph([0, 1], num_nodes=2),
        ValueError,
        r"edge_index: wanted 2 dimensions, got shape \[2\]",
    ),
    (
        lambda: ab.Graph([[0]], num_nodes=2),
        ValueError,
        r"edge_index: wanted shape \[2, E\], got \[1, 1\]",
    ),
    (
        lambda: ab.Graph([[0.0], [1.0]], num_nodes=2),
        TypeError,
        "edge_index: wanted integers, got torch.float32",
    ),
    (
        lambda: ab.Graph([[0], [1]]),
        ValueError,
        r"num_nodes: wanted either num_nodes or size=\(num_src, num_dst\)",
    ),
    (
        lambda: ab.Graph([[0], [1]], size=(1, 2, 3)),
        ValueError,
        r"size: wanted \(num_src, num_dst\), got \(1, 2, 3\)",
    ),
    (
        lambda: ab.Graph([[0], [2]], num_nodes=2),
        ValueError,
        "edge_index: num_nodes = 2 but a target is 2",
    ),
    (
        lambda: ab.Graph([[-1], [1]], num_nodes=2),
        ValueError,
        "edge_index: num_nodes = 2 but a source is -1",
    ),
    (lambda: ab.Neighbors([[-2]]), ValueError, r"index: wanted -1 \(none\) or more, got -2"),
    (
        lambda: ab.Neighbors([[5]]).count(1, 3),
        ValueError,
        r"index: wanted keys from -1 \(none\) to 2, got 5",
    ),
    (
        lambda: ab.Neighbors([0]),
        ValueError,
        r"index: wanted 2 or 3 or 4 dimensions, got shape \[1\]",
    ),
    (
        lambda: ab.knn_graph([[0.0], [1.0]], 1, loop="no"),
        TypeError,
        "loop: wanted True or False, got 'no'",
    ),
    (lambda: ab.Where(3), TypeError, r"fn: wanted a function of \(q, k\) or \(b, h, q, k\), got 3"),
    (
        lambda: ab.Where(lambda q: q),
        TypeError,
        r"fn: wanted 2 or 4 arguments, \(q, k\) or \(b, h, q, k\), got 1",
    ),
    (
        lambda: ab.Where(lambda q, k: q - k).dense(2, 2),
        TypeError,
        "fn: wanted a boolean tensor, got torch.int64",
    ),
    (
        lambda: ab.Dense(torch.ones(2, 2)),
        TypeError,
        "mask: wanted booleans, True = may attend, got torch.float32",
    ),
    (
        lambda: ab.Dense(torch.ones(2).bool()),
        ValueError,
        r"mask: wanted \[Q, K\], \[H, Q, K\] or \[B, H, Q, K\], got \[2\]",
    ),
    (lambda: ab.PerHead([]), ValueError, "PerHead: wanted at least one relation, got none"),
    (lambda: ab.PerHead([1]), TypeError, r"PerHead: wanted a sequence of relations, got \[1\]"),
    (
        lambda: ab.PerHead([ab.PerHead([ab.Full()] * 2)]),
        ValueError,
        "PerHead: wanted relations without a head_count of their own, got PerHead",
    ),
    (
        lambda: ab.PerHead([ab.Full()] * 2) & ab.PerHead([ab.Full()] * 3),
        ValueError,
        r"parts for heads \[2, 3\] do not combine",
    ),
    (
        lambda: ab.Full().permute([0, 0]),
        ValueError,
        r"order: wanted each of 0\.\.1 once, got \[0, 0\]",
    ),
    (lambda: ab.Causal().shift(1.5), TypeError, "distance: wanted an integer, got 1.5"),
    (
        lambda: ab.Documents([0, 1]).dense(3, 3),
        ValueError,
        "this Documents is for 2 keys, got k_len = 3",
    ),
    (
        lambda: ab.Documents([0, 1]).dense(2, 2, 1),
        ValueError,
        "this Documents is for 2 queries, got q_len = 2 at q_start = 1",
    ),
    (
        lambda: (ab.Causal() & ab.Documents([0, 1])).count(3, 2),
        ValueError,
        "this Documents is for 2 queries, got q_len = 3",
    ),
    (
        lambda: ab.Graph([[0], [1]], num_nodes=2).T.dense(3, 2),
        ValueError,
        "for 2 queries, got q_len = 3",
    ),
    (
        lambda: ab.Padding([1, 2]).dense(1, 1, batch=3),
        ValueError,
        "this Padding has batch 2, got batch 3",
    ),
    (lambda: ab.Causal().count(-1, 2), ValueError, "q_len: wanted at least 0, got -1"),
    (lambda: ab.Causal().dense(4, 4, 1.5), TypeError, "q_start: wanted an integer or 'end', got 1.5"),
    (
        lambda: ab.Causal().layout(4, 4, q_start="END"),
        TypeError,
        "q_start: wanted an integer or 'end', got 'END'",
    ),
    (lambda: ab.Causal().dense(-1, 4), ValueError, "q_len: wanted at least 0, got -1"),
    (
        lambda: ab.Layout.build(torch.ones(2, 2), 2, 2),
        TypeError,
        r"wanted a relation, got Tensor; wrap a mask in ab\.Dense",
    ),
    (lambda: ab.Global(5), TypeError, "positions: wanted a list of positions, got 5"),
    (lambda: ab.PerHead(3), TypeError, "PerHead: wanted a sequence of relations, got 3"),
    (lambda: ab.Graph([[0], [0]], size=3), ValueError, r"size: wanted \(num_src, num_dst\), got 3"),
    (lambda: ab.Graph([[0], [0]], num_nodes=0), ValueError, "num_nodes = 0 but a source is 0"),
    (lambda: ab.Documents([0]).each(3), TypeError, "relation: wanted a relation, got 3"),
    (lambda: ab.Where(torch.eq), TypeError, "fn: wanted a Python function of"),
    (lambda: parse("import os"), ValueError, "is not an expression"),
    (lambda: parse("__import__('os')"), ValueError, "'__import__' is none of Bipartite, Blocks"),
    (lambda: parse("Causal() & 3"), ValueError, "'3' in 'Causal\\(\\) & 3' is not a relation"),
    (lambda: parse("3"), ValueError, "'3' is not a relation"),
    (lambda: parse("Window(nope=3)"), ValueError, "Window: .*unexpected keyword argument 'nope'"),
    (lambda: parse("Causal().key"), ValueError, "is not allowed"),
    (
        lambda: ab.Relation().related(None, None),
        NotImplementedError,
        "Relation does not define related",
    ),
]


@pytest.mark.parametrize(("make", "error", "words"), ERRORS, ids=[words[:40] for *_, words in ERRORS])
def test_bad_input_raises_a_clear_error(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize("make", [ab.Prefix, ab.Padding])
def test_lengths_on_a_device_are_read_when_they_are_laid_out(make):
    """Only lengths on the host are checked at construction: others would make it wait for their device."""
    assert make(torch.tensor([-1], device="meta")).batch_size == 1
    relation = make([2])
    (relation.length if make is ab.Prefix else relation.lengths_).fill_(-1)
    with pytest.raises(ValueError, match=r"^lengths: wanted 0 or more, got -1"):
        relation.count(1, 1)


@pytest.mark.parametrize("huge", [2**61, 2**63 - 9, 2**63 - 2])
@pytest.mark.parametrize("each", [False, True])
def test_documents_may_have_any_ids(huge, each):
    """Ids near 2^61 gave a wrong mask in a batch, hashed ones crashed, 2^63 - 1 overflowed."""
    small = torch.tensor([[0, 0, 1, 1, 2, -1], [1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 2, -1]])
    named = torch.tensor([5, 2**40 + 1, huge, huge + 1])[small]
    large = torch.where(small < 0, -1, named)
    one, other = ab.Documents(small), ab.Documents(large)
    if each:
        one, other = one.each(ab.Window(before=1)), other.each(ab.Window(before=1))
    assert torch.equal(other.dense(6, 6), one.dense(6, 6))
    assert torch.equal(other.layout(6, 6).to_dense(), one.dense(6, 6))
    assert other.layout(6, 6).groups == 2


@pytest.mark.parametrize(
    "relation",
    [
        ab.Graph([[0, 1, 2], [1, 2, 0]], num_nodes=3),
        ab.Neighbors([[0, 1], [1, -1], [2, 0]]),
        ab.Documents([0, 0, 1]).each(ab.Causal()),
    ],
    ids=repr,
)
def test_related_is_traced_without_a_break(relation):
    """Relations that keep something used a ``cached_property``, whose lock dynamo cannot trace."""
    position = torch.arange(3)
    traced = torch.compile(relation.related, fullgraph=True, backend="eager")
    assert torch.equal(traced(position[:, None], position), relation.dense(3, 3))

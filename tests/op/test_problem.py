"""Every argument error of attention, word for word, and the defaults of Problem."""

import math
import re
import warnings

import numpy as np
import pytest
import torch

import attnbias as ab
from attnbias.op.problem import Problem


def inputs(B=2, H=4, Hk=4, Q=5, K=7, D=8, E=3, dtype=torch.float32):
    return (
        torch.randn(B, H, Q, D).to(dtype),
        torch.randn(B, Hk, K, D).to(dtype),
        torch.randn(B, Hk, K, E).to(dtype),
    )


def refuse(kind, words, *args, **kwargs):
    """Check that both the record and the public function raise this error."""
    for call in (Problem, ab.attention):
        with pytest.raises(kind) as caught:
            call(*args, **kwargs)
        assert str(caught.value) == words


def test_defaults_are_filled_in():
    q, k, v = inputs()
    problem = Problem(q, k, v)
    assert problem.query is q and problem.key is k and problem.value is v
    assert problem.relation == ab.Full() and problem.layout is None
    assert problem.scale == 8**-0.5 and problem.softcap == 0.0 and problem.dropout_p == 0.0
    assert problem.terms == () and problem.sink is None and problem.seed is None
    assert problem.q_start == 0 and problem.squeeze is False


def test_end_is_resolved():
    assert Problem(*inputs(Q=5, K=7), q_start="end").q_start == 2
    assert Problem(*inputs(Q=7, K=5), q_start="end").q_start == -2


@pytest.mark.parametrize("scale", [0, 0.0, -1.5, 3])
def test_any_finite_scale_is_kept(scale):
    assert Problem(*inputs(), scale=scale).scale == scale


def test_seed_is_drawn_from_torchs_generator_and_only_for_dropout():
    q, k, v = inputs()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    plain = Problem(q, k, v)
    plain.draw_seed()
    assert plain.seed is None and torch.equal(before, torch.get_rng_state())
    seeds = []
    for _ in range(2):
        torch.manual_seed(3)
        problem = Problem(q, k, v, dropout_p=0.5)
        problem.draw_seed()
        seeds.append(problem.seed)
    assert seeds[0].dtype == torch.int64 and seeds[0].shape == (1,)
    assert torch.equal(*seeds)


def test_three_dimensions_get_a_batch():
    q, k, v = (x[0] for x in inputs())
    problem = Problem(q, k, v)
    assert problem.squeeze and problem.query.shape == (1, 4, 5, 8)
    out, lse = ab.attention(q, k, v, return_lse=True)
    assert out.shape == (4, 5, 3) and lse.shape == (4, 5)


@pytest.mark.parametrize("size", ["B", "H", "Q", "K"])
def test_zero_sizes_work(size):
    zero = {size: 0, "Hk": 0} if size == "H" else {size: 0}
    q, k, v = (x.requires_grad_() for x in inputs(**zero))
    out, lse = ab.attention(q, k, v, ab.Causal(), return_lse=True)
    assert out.shape == (*q.shape[:3], 3) and lse.shape == q.shape[:3]
    (out.sum() + lse.nan_to_num(neginf=0).sum()).backward()
    if size == "K":
        assert (out == 0).all() and (lse == -math.inf).all() and (q.grad == 0).all()


def test_wrong_kind():
    q, k, v = inputs()
    refuse(TypeError, "query: wanted a tensor, got list [1]", [1], k, v)
    refuse(TypeError, "key: wanted a tensor, got NoneType None", q, None, v)
    refuse(TypeError, "value: wanted a tensor, got int 3", q, k, 3)


def test_wrong_rank():
    q, k, v = inputs()
    words = "query: wanted [B, H, Q, D] or [H, Q, D], got 2 dimensions, [5, 8]"
    refuse(ValueError, words, q[0, 0], k, v)
    refuse(ValueError, "key: wanted 4 dimensions like query, got 3, [4, 7, 8]", q, k[0], v)
    refuse(ValueError, "value: wanted 3 dimensions like query, got 4, [2, 4, 7, 3]", q[0], k[0], v)


def test_wrong_dtype():
    q, k, v = inputs()
    words = "query: wanted float32, float16, bfloat16 or float64, got torch.int64"
    refuse(TypeError, words, q.long(), k, v)
    words = "key: wanted the query's dtype, torch.float32, got torch.float16"
    refuse(TypeError, words, q, k.half(), v)
    words = "value: wanted the query's dtype, torch.float32, got torch.float64"
    refuse(TypeError, words, q, k, v.double())


def test_mixed_devices():
    q, k, v = inputs()
    refuse(ValueError, "key: wanted the query's device, cpu, got meta", q, k.to("meta"), v)
    refuse(ValueError, "value: wanted the query's device, cpu, got meta", q, k, v.to("meta"))


def test_mixed_batches():
    q, k, v = inputs()
    refuse(ValueError, "key: wanted the query's batch size, 2, got 1", q, k[:1], v)
    refuse(ValueError, "value: wanted the query's batch size, 2, got 1", q, k, v[:1])


def test_wrong_head_counts():
    q, k, v = inputs()
    refuse(ValueError, "value: wanted the key's head count, 4, got 2", q, k, v[:, :2])
    words = "key: wanted a head count that divides the query's 4, got 3"
    refuse(ValueError, words, q, k[:, :3], v[:, :3])
    words = "key: wanted a head count that divides the query's 4, got 0"
    refuse(ValueError, words, q, k[:, :0], v[:, :0])
    words = "key: wanted the query's 4 heads because of enable_gqa=False, got 2"
    refuse(ValueError, words, q, k[:, :2], v[:, :2], enable_gqa=False)
    for flag in (None, True):
        assert ab.attention(q, k[:, :2], v[:, :2], enable_gqa=flag).shape == (2, 4, 5, 3)


def test_wrong_lengths_and_sizes():
    q, k, v = inputs()
    refuse(ValueError, "value: wanted the key's length, 7, got 6", q, k, v[:, :, :6])
    refuse(ValueError, "key: wanted the query's head size D, 8, got 7", q, k[..., :7], v)
    words = "query: wanted a head size D of at least 1, got [2, 4, 5, 0]"
    refuse(ValueError, words, q[..., :0], k[..., :0], v)
    words = "value: wanted a value size E of at least 1, got [2, 4, 7, 0]"
    refuse(ValueError, words, q, k, v[..., :0])


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_scale_must_be_finite(scale):
    refuse(ValueError, f"scale: wanted a finite number, got {scale}", *inputs(), scale=scale)


@pytest.mark.parametrize("softcap", [-1.0, math.nan, math.inf])
def test_softcap_must_be_positive(softcap):
    words = f"softcap: wanted a finite number of at least 0, got {softcap}"
    refuse(ValueError, words, *inputs(), softcap=softcap)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5, math.nan])
def test_dropout_must_be_between_0_and_1(dropout_p):
    words = f"dropout_p: wanted a number from 0 to 1, got {dropout_p}"
    refuse(ValueError, words, *inputs(), dropout_p=dropout_p)


def test_numbers_must_be_numbers():
    words = "scale: wanted a finite number, got a tensor []"
    refuse(TypeError, words, *inputs(), scale=torch.tensor(1.0))
    words = "softcap: wanted a finite number of at least 0, got str 'no'"
    refuse(TypeError, words, *inputs(), softcap="no")
    words = "dropout_p: wanted a number from 0 to 1, got bool True"
    refuse(TypeError, words, *inputs(), dropout_p=True)


def test_flags_are_true_or_false():
    """Any object was accepted by its truth value: enable_gqa="no" as True, return_lse=0 as False."""
    for name, flag in (("enable_gqa", "no"), ("return_lse", 0), ("return_lse", None)):
        refuse(TypeError, f"{name}: wanted True or False, got {flag!r}", *inputs(), **{name: flag})
    assert Problem(*inputs(), enable_gqa=None, return_lse=np.bool_(True)).return_lse is True


def test_wrong_sink():
    refuse(TypeError, "sink: wanted a tensor [H], got float 0.0", *inputs(), sink=0.0)
    words = "sink: wanted a logit per query head, [4], got [3]"
    refuse(ValueError, words, *inputs(), sink=torch.zeros(3))
    words = "sink: wanted a logit per query head, [4], got [1, 4]"
    refuse(ValueError, words, *inputs(), sink=torch.zeros(1, 4))
    words = "sink: wanted a floating-point tensor, got torch.int64"
    refuse(TypeError, words, *inputs(), sink=torch.zeros(4, dtype=torch.int64))
    words = "sink: wanted the query's device, cpu, got meta"
    refuse(ValueError, words, *inputs(), sink=torch.zeros(4, device="meta"))


@pytest.mark.parametrize("q_start", ["start", 1.0, None, True])
def test_wrong_q_start(q_start):
    words = f"q_start: wanted an int or 'end', got {q_start!r}"
    refuse(TypeError, words, *inputs(), q_start=q_start)


WANTED = "relation: wanted a Relation, a Layout or None (= Full), got "


def test_wrong_relation_names_the_converter():
    q, k, v = inputs()
    mask = torch.ones(5, 7, dtype=torch.bool)
    words = WANTED + "a tensor [5, 7]; for a boolean mask use ab.Dense(mask)"
    refuse(TypeError, words, q, k, v, mask)
    words = WANTED + "a function; for a predicate or a mask_mod use ab.Where(function)"
    refuse(TypeError, words, q, k, v, lambda b, h, q, k: q >= k)
    words = WANTED + "the class Causal; make a value of it, Causal(...)"
    refuse(TypeError, words, q, k, v, ab.Causal)
    refuse(TypeError, WANTED + "bool False", q, k, v, False)
    edges = torch.zeros(2, 9, dtype=torch.int64)
    words = WANTED + "a tensor [2, 9] of integers; for edges use ab.Graph(edge_index, num_nodes)"
    refuse(TypeError, words, q, k, v, edges)
    matrix = "for an adjacency matrix, row = query, use ab.Graph.from_adjacency(matrix)"
    refuse(TypeError, f"{WANTED}a tensor [5, 5] of integers; {matrix}", q, k, v, edges.new_zeros(5, 5))
    words = f"{WANTED}a tensor [2, 2] of integers; {matrix}; for edges use ab.Graph(edge_index, num_nodes)"
    refuse(TypeError, words, q, k, v, edges[:, :2])
    words = f"{WANTED}a tensor [5, 5]; {matrix}; for a boolean mask use ab.Dense(mask)"
    refuse(TypeError, words, q, k, v, torch.eye(5, dtype=torch.bool))
    bias = "for numbers that are added to the scores use terms=[ab.PairBias(mask)]"
    refuse(TypeError, f"{WANTED}a tensor [5, 5]; {matrix}; {bias}", q, k, v, torch.eye(5))
    refuse(TypeError, f"{WANTED}a tensor [5, 7]; {bias}", q, k, v, mask.float())
    words = f"{WANTED}a NumPy array [5, 7]; for a boolean mask use ab.Dense(mask)"
    refuse(TypeError, words, q, k, v, mask.numpy())
    refuse(
        TypeError,
        f"{WANTED}a tensor [5, 5]; {matrix.replace('an', 'a sparse', 1)}",
        q,
        k,
        v,
        torch.eye(5).to_sparse(),
    )
    data = type("Data", (), {"edge_index": edges, "__call__": None})()
    refuse(TypeError, WANTED + "Data, which has edges; use ab.Graph(data)", q, k, v, data)
    refuse(TypeError, WANTED + "str 'causal'; did you mean ab.Causal()?", q, k, v, "causal")
    refuse(TypeError, WANTED + "str 'globl'; did you mean ab.Global(positions=...)?", q, k, v, "globl")
    refuse(TypeError, WANTED + "str '?'; wanted a value, such as ab.Causal()", q, k, v, "?")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "is_causal",
            "pass ab.Causal() as the relation; attnbias.integrations.sdpa has a function with torch's",
        ),
        (
            "attn_mask",
            "pass ab.Dense(mask) as the relation, or numbers as terms=[ab.PairBias(mask)]; attnbias",
        ),
        ("block_mask", "pass attnbias.integrations.flex.from_block_mask(mask) as the relation"),
        ("window_size", "pass ab.Window(before, after) as the relation"),
        ("alibi_slopes", "pass terms=[ab.ALiBi(slopes)]"),
        ("dropout", "did you mean dropout_p?"),
    ],
)
def test_arguments_of_other_libraries_name_ours(name, words):
    with pytest.raises(
        TypeError, match=re.escape(f"{name}: no such argument; there are terms, score, scale")
    ) as error:
        ab.attention(*inputs(), **{name: True})
    assert f"enable_gqa; {words}" in str(error.value)


def test_an_array_is_named_in_one_line():
    """The message printed all of its numbers, over 8 lines."""
    q, k, v = inputs()
    words = "query: wanted a tensor, got a NumPy array [2, 4, 5, 8]; torch.from_numpy makes a tensor of it"
    refuse(TypeError, words, q.numpy(), k, v)
    with pytest.raises(TypeError, match=r"query: wanted a tensor, got list \[0, 1, 2, .{60,90}\.\.\.$"):
        ab.attention(list(range(1000)), k, v)


def test_tokens_before_heads_are_guessed():
    """[B, L, H, D] in place of [B, H, L, D]: the lengths did not fit, and nothing said why."""
    q = torch.randn(2, 64, 4, 8)
    hint = "; wanted [B, H, L, D], and [2, 64, 4, 8] looks like [B, L, H, D]: x.transpose(1, 2) makes it so"
    relation = ab.Documents.from_lengths([30, 34]) & ab.Causal()
    refuse(ValueError, f"relation: this Documents is for 64 keys, got k_len = 4{hint}", q, q, q, relation)
    k = torch.randn(2, 96, 4, 8)
    words = f"key: wanted a head count that divides the query's 64, got 96{hint.replace('64', '96')}"
    refuse(ValueError, words, q, k, k)
    plain = "key: wanted a head count that divides the query's 4, got 3"
    refuse(ValueError, plain, torch.randn(2, 4, 64, 8), *[torch.randn(2, 3, 64, 8)] * 2)


def test_lengths_given_as_document_numbers_are_noticed():
    q = torch.randn(1, 1, 64, 8)
    words = (
        "relation: this Documents is for 2 keys, got k_len = 64; for documents of these lengths use "
        "Documents.from_lengths([30, 34])"
    )
    refuse(ValueError, words, q, q, q, ab.Documents([30, 34]))
    refuse(ValueError, words, q, q, q, ab.Documents([30, 34]) & ab.Causal())
    refuse(ValueError, words.partition(";")[0], q, q, q, ab.Documents([30, 35]))


def test_global_positions_past_the_end_warn_at_the_callers_line():
    q = torch.randn(1, 1, 64, 8)
    words = "Global: its first position, 100, is past the last token: it relates nothing"
    with pytest.warns(UserWarning, match=words) as caught:
        ab.attention(q, q, q, ab.Global([100, 200]) | ab.Causal(), backend="reference")
    assert {each.filename for each in caught} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ab.attention(q, q, q, ab.Global([0, 100]) | ab.Causal(), backend="reference")
        ab.attention(q, q, q, ab.Global([100]), q_start=40, backend="reference")  # the query at 100 is there
        (ab.Global([]) | ab.Global([5]).shift(-3)).layout(4)


def test_block_mask_names_the_converter():
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    words = WANTED + "a BlockMask; use attnbias.integrations.flex.from_block_mask(mask)"
    refuse(TypeError, words, *inputs(), mask)


def test_layout_that_does_not_fit_the_inputs():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="for 6 queries and 7 keys, query and key have 5 and 7"):
        ab.attention(q, k, v, ab.Causal().layout(6, 7))
    heads = ab.PerHead([ab.Causal(), ab.Full()]).layout(5, 7)
    with pytest.raises(ValueError, match="heads 2, query has 4"):
        ab.attention(q, k, v, heads)
    words = (
        "q_start: this layout was built with q_start=2, got 0; "
        "pass the same value to layout() and attention()"
    )
    layout = ab.Causal().layout(5, 7, q_start="end")
    refuse(ValueError, words, q, k, v, layout)
    assert ab.attention(q, k, v, layout, q_start="end").shape == (2, 4, 5, 3)
    words = (
        "relation: wanted a layout on the query's device, cpu, got one on meta; use layout.to(query.device)"
    )
    refuse(ValueError, words, q, k, v, ab.Causal().layout(5, 7).to("meta"))


def test_relation_that_does_not_fit_the_inputs():
    q, k, v = inputs()
    heads = ab.PerHead([ab.Causal(), ab.Full()])
    refuse(ValueError, "relation: this PerHead has heads 2, got heads 4", q, k, v, heads)
    padding = ab.Padding([3, 4, 5])
    with pytest.raises(ValueError, match="batch 3, got batch 2"):
        Problem(q, k, v, padding)


def test_wrong_terms():
    words = "terms: wanted a list or tuple of score terms, got a tensor [2]"
    refuse(TypeError, words, *inputs(), terms=torch.zeros(2))
    words = "terms[0]: wanted a score term, which has a method value(b, h, q, k), got a tensor [5, 7]"
    refuse(TypeError, words, *inputs(), terms=[torch.zeros(5, 7)])


def test_unknown_score():
    refuse(
        TypeError,
        "score: wanted None (the dot product), an AdditiveScore or a MultiLevel, got str 'gat'",
        *inputs(),
        score="gat",
    )


def test_unknown_backend_lists_the_known():
    words = "backend: wanted one of 'sdpa', 'triton', 'cudnn', 'cpu', 'rows', 'reference', got 'cuda'"
    with pytest.raises(ValueError, match=f"^{words}$"):
        ab.attention(*inputs(), backend="cuda")

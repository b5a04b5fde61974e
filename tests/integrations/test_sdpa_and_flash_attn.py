"""The signatures of torch's SDPA and of flash-attn, against torch's SDPA and sequence by sequence."""

import pytest
import torch
from torch.nn import functional

import attnbias as ab
from attnbias.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from attnbias.integrations.sdpa import scaled_dot_product_attention
from attnbias.testing import assert_no_worse, magnitudes


def draw(*shapes, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng).requires_grad_() for shape in shapes]


def compare(tensors, *given, extra=(), **options):
    """Compare results and gradients of ours and torch's in float32 with torch's in float64."""
    wide = [x.detach().double().requires_grad_() for x in tensors]
    wide_given = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in given]
    runs = []
    for f, inputs, rest in (
        (scaled_dot_product_attention, tensors, given),
        (functional.scaled_dot_product_attention, tensors, given),
        (functional.scaled_dot_product_attention, wide, wide_given),
    ):
        out = f(*inputs, *rest, **options)
        weight = torch.arange(out.numel()).view(out.shape).to(out.dtype).cos()
        runs.append((out, torch.autograd.grad((out * weight).sum(), inputs)))
    assert_no_worse("out", *(out for out, _ in runs))
    four = [x.detach()[(None,) * (4 - x.dim())].flatten(0, -4) for x in tensors]
    ones = torch.ones_like(four[0][..., :1])
    scale = options.get("scale") or tensors[0].shape[-1] ** -0.5
    sizes = magnitudes(*four, ones.expand(*ones.shape[:-1], tensors[2].shape[-1]), 0 * ones[..., 0], scale)
    for name, *grads in zip(("query", "key", "value"), *(grads for _, grads in runs), strict=True):
        assert_no_worse(name, *grads, 3, magnitude=sizes[name])


SHAPES = {
    "2-D": [(5, 8), (7, 8), (7, 8)],
    "3-D": [(3, 5, 8), (3, 7, 8), (3, 7, 6)],
    "4-D": [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)],
    "5-D": [(2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)],
    "broadcast": [(2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_sdpa_agrees_with_torch(shape, options):
    compare(draw(*SHAPES[shape]), **options)


@pytest.mark.parametrize(
    "size", [(5, 7), (1, 7), (5, 1), (3, 5, 7), (1, 5, 7), (2, 1, 5, 7), (2, 3, 5, 7), (2, 1, 1, 7)]
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_sdpa_masks_agree_with_torch(size, kind):
    mask = torch.randn(size, generator=torch.Generator().manual_seed(1))
    if kind == "bool":
        mask = mask > -0.5
        mask[..., 0] = True  # torch differs in rows without a key
    compare(draw(*SHAPES["4-D"]), mask)


def test_sdpa_groups_heads():
    compare(draw((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)), enable_gqa=True)
    with pytest.raises(
        ValueError, match=r"heads that broadcast .*, got \[6\], \[2\], \[2\]; enable_gqa=True"
    ):
        scaled_dot_product_attention(*draw((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)))


def test_sdpa_takes_a_relation():
    q, k, v = draw(*SHAPES["4-D"])
    window = ab.Window(before=2, after=1)
    out = scaled_dot_product_attention(q, k, v, relation=window)
    assert torch.equal(out, ab.attention(q, k, v, window))
    mask = torch.rand(5, 7) > 0.4
    both = scaled_dot_product_attention(q, k, v, mask, relation=window)
    assert_no_worse(
        "both",
        both,
        ab.attention(q, k, v, ab.Dense(mask & window.dense(5, 7)), backend="reference"),
        ab.attention(*(x.double() for x in (q, k, v)), window & ab.Dense(mask), backend="reference"),
    )
    causal = scaled_dot_product_attention(q, k, v, is_causal=True, relation=window)
    assert torch.equal(causal, ab.attention(q, k, v, ab.Window(before=2)))


def test_sdpa_of_a_row_without_a_key_is_zero():
    q, k, v = draw(*SHAPES["4-D"])
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    assert not scaled_dot_product_attention(q, k, v, mask)[:, :, 2].any()


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_sdpa_takes_a_mask_and_is_causal(kind):
    """They were refused together; torch's CPU kernel accepts both, its fallback (3-D here) does not."""
    q, k, v = draw((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    mask = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    mask = torch.where(mask > -0.5, True, torch.eye(5, 7, dtype=torch.bool)) if kind == "bool" else mask
    compare([q, k, v], mask, is_causal=True)
    whole = scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    assert torch.equal(scaled_dot_product_attention(q[0], k[0], v[0], mask, is_causal=True), whole[0])


ODD = {
    "no query": [(2, 3, 0, 8), (2, 3, 7, 8), (2, 3, 7, 6)],
    "no key": [(2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 6)],
    "no head": [(2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 6)],
    "no batch": [(2, 0, 3, 5, 8), (2, 0, 3, 7, 8), (2, 0, 3, 7, 8)],
    "nothing": [(2, 3, 0, 8), (2, 3, 0, 8), (2, 3, 0, 6)],
    "no query, 2-D": [(0, 8), (7, 8), (7, 8)],
    "no key, 3-D": [(3, 5, 8), (3, 0, 8), (3, 0, 8)],
    "a head for all": [(2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)],
    "a key head for all": [(2, 3, 5, 8), (2, 1, 7, 8), (2, 3, 7, 8)],
    "a value head for all": [(2, 3, 5, 8), (2, 3, 7, 8), (2, 1, 7, 8)],
    "a query head for all": [(2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)],
    "grouped": [(2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)],
    "grouped otherwise": [(2, 6, 5, 8), (2, 2, 7, 8), (2, 3, 7, 8)],
    "not grouped": [(2, 6, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)],
    "a batch for all": [(1, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)],
    "other batches": [(2, 3, 5, 8), (3, 3, 7, 8), (3, 3, 7, 8)],
    "3-D and 4-D": [(3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)],
    "2-D and 4-D": [(5, 8), (2, 3, 7, 8), (2, 3, 7, 8)],
    "4-D and 2-D": [(2, 3, 5, 8), (7, 8), (7, 8)],
    "2-D": [(5, 8), (7, 8), (7, 8)],
    "1-D": [(8,), (7, 8), (7, 8)],
    "other D": [(2, 3, 5, 8), (2, 3, 7, 4), (2, 3, 7, 8)],
}
MASKS = [
    (5, 7),
    (7,),
    (),
    (5, 6),
    (1, 1),
    (0, 7),
    (3, 5, 7),
    (2, 5, 7),
    (2, 2, 5, 7),
    (4, 3, 5, 7),
    (1, 2, 3, 5, 7),
]
DTYPES = [torch.bool, torch.float32, torch.float64, torch.float16, torch.int64]


def agree(tensors, *given, **options):
    """Check that results equal torch's, and that we raise, naming the argument, where torch raises."""
    try:
        want = functional.scaled_dot_product_attention(*tensors, *given, **options)
    except (RuntimeError, IndexError):
        with pytest.raises((ValueError, TypeError), match=r"^(query|key|value|attn_mask): wanted .*, got "):
            scaled_dot_product_attention(*tensors, *given, **options)
        return
    got = scaled_dot_product_attention(*tensors, *given, **options)
    exact = functional.scaled_dot_product_attention(
        *(x.double() for x in tensors),
        *(x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in given),
        **options,
    )
    assert got.shape == want.shape
    assert_no_worse("out", got, want, exact)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}], ids=str)
@pytest.mark.parametrize("shapes", ODD)
def test_sdpa_of_odd_shapes_equals_torch(shapes, options):
    """Empty tensors failed in reshape, heads did not broadcast, and torch's errors came through."""
    if shapes == "no query, 2-D" and "enable_gqa" in options:
        pytest.skip("torch looks at heads only where there is something to compute")
    agree([x.detach() for x in draw(*ODD[shapes])], **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_sdpa_of_odd_masks_equals_torch(shape, dtype):
    """Masks that torch refuses, of other dtypes or with batches of their own, were accepted."""
    q, k, v = (x.detach() for x in draw((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)))
    agree((q, k, v), torch.ones(shape).to(dtype))
    if len(shape) == 4:
        with pytest.raises((ValueError, TypeError), match=r"^attn_mask: wanted "):
            scaled_dot_product_attention(q[0], k[0], v[0], torch.ones(shape).to(dtype))


@pytest.mark.parametrize("mask", [torch.ones(5, 0, dtype=torch.bool), torch.ones(5, 0)])
def test_sdpa_without_keys_is_zero_under_a_mask(mask):
    agree([x.detach() for x in draw(*ODD["no key"])], mask)


@pytest.mark.parametrize(
    ("position", "words"),
    [
        (0, "query: wanted a tensor, got list"),
        (2, "value: wanted a tensor, got"),
        (3, "attn_mask: wanted a tensor"),
    ],
)
def test_sdpa_arguments_must_be_tensors(position, words):
    given = [*(x.detach() for x in draw(*SHAPES["4-D"])), torch.zeros(5, 7)]
    given[position] = given[position].tolist()
    with pytest.raises(TypeError, match=f"^{words}"):
        scaled_dot_product_attention(*given)


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda x: x.to_sparse(), "torch.sparse_coo"),
        (lambda x: torch.nested.nested_tensor(list(x)), "a nested one"),
        (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "a nested one"),
    ],
)
def test_sparse_and_nested_tensors_raise_a_clear_error(position, change, got):
    """They failed somewhere inside torch."""
    given = [*(x.detach() for x in draw(*SHAPES["4-D"])), torch.zeros(5, 7)]
    given[position] = change(given[position])
    name = ("query", "key", "value", "attn_mask")[position]
    with pytest.raises(TypeError, match=f"^{name}: wanted a dense tensor, got {got}$"):
        scaled_dot_product_attention(*given)


# -- flash-attn -------------------------------------------------------------------------------------


def by_definition(q, k, v, causal=False, window=(-1, -1), softcap=0.0, slopes=None, scale=None):
    """Compute one sequence by flash-attn's documentation: [Q, H, D], [K, Hk, D], [K, Hk, E]."""
    Q, H, D = q.shape
    K, Hk, _ = k.shape
    k, v = (x.repeat_interleave(H // Hk, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (D**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(Q)[:, None] + K - Q, torch.arange(K)
    if slopes is not None:
        scores = scores - slopes.to(q.dtype)[:, None, None] * (i - j).abs()
    allowed = torch.ones(Q, K, dtype=torch.bool)
    if causal:
        allowed &= j <= i
    if window[0] >= 0:
        allowed &= j >= i - window[0]
    if window[1] >= 0:
        allowed &= j <= i + window[1]
    scores = scores.masked_fill(~allowed, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0)
    return torch.einsum("hqk,khe->qhe", weights, v)


OPTIONS = [
    {},
    {"causal": True},
    {"window": (2, 1)},
    {"window": (-1, 2)},
    {"causal": True, "window": (3, 0)},
    {"causal": True, "window": (3, 5)},
    {"softcap": 0.7, "scale": 0.4},
    {"slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "causal": True},
]


def renamed(options):
    names = {"window": "window_size", "slopes": "alibi_slopes", "scale": "softmax_scale"}
    return {names.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lengths", [(6, 6), (3, 9), (9, 3)])
def test_flash_attn_matches_its_documentation(options, lengths):
    q, k, v = draw((2, lengths[0], 4, 8), (2, lengths[1], 2, 8), (2, lengths[1], 2, 8))
    out = flash_attn_func(q, k, v, **renamed(options))
    eager, exact = (
        torch.stack([by_definition(q[b].to(t), k[b].to(t), v[b].to(t), **options) for b in (0, 1)])
        for t in (torch.float32, torch.float64)
    )
    assert_no_worse("out", out, eager, exact)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "sizes", [((3, 1, 0, 5), (3, 1, 0, 5)), ((3, 1, 2, 5), (6, 4, 2, 5)), ((1, 1), (9, 4))]
)
def test_varlen_equals_flash_attn_of_each_sequence(options, sizes):
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(each).cumsum(0)], dtype=torch.int32) for each in sizes)
    q, k, v = draw((int(cu_q[-1]), 4, 8), (int(cu_k[-1]), 2, 8), (int(cu_k[-1]), 2, 6))
    if "slopes" in options and sizes[0] != sizes[1]:
        with pytest.raises(NotImplementedError, match="alibi_slopes: wanted cu_seqlens_q equal"):
            flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 9, **renamed(options))
        return
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, max(sizes[0]), max(sizes[1]), **renamed(options))

    def each(dtype):
        parts = [
            by_definition(
                *(x[a[i] : a[i + 1]].to(dtype) for x, a in ((q, cu_q), (k, cu_k), (v, cu_k))), **options
            )
            for i in range(len(cu_q) - 1)
        ]
        return torch.cat(parts)

    assert_no_worse("out", out, each(torch.float32), each(torch.float64))


def test_flash_attn_accepts_a_relation():
    q, k, v = draw((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    both = flash_attn_func(q, k, v, causal=True, relation=ab.Columns(2))
    alone = ab.attention(*(x.transpose(1, 2) for x in (q, k, v)), ab.Causal() & ab.Columns(2))
    assert torch.equal(both, alone.transpose(1, 2))


@pytest.mark.parametrize("make", [list, tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_varlen_takes_offsets_as_a_list(make):
    """Lists failed with "'list' object has no attribute 'long'"."""
    q, k, v = draw((9, 4, 8), (9, 2, 8), (9, 2, 8))
    want = flash_attn_varlen_func(
        q, k, v, torch.tensor([0, 4, 9]), torch.tensor([0, 4, 9]), 5, 5, causal=True
    )
    offsets = make([0, 4, 9])
    assert torch.equal(flash_attn_varlen_func(q, k, v, offsets, offsets, 5, 5, causal=True), want)


OFFSETS = [
    (torch.tensor([0.0, 4.0, 9.0]), TypeError, "wanted integers, got torch.float32"),
    ([0.0, 4.5, 9.0], TypeError, "wanted integers, got torch.float32"),
    (torch.tensor([False, True]), TypeError, "wanted integers, got torch.bool"),
    (None, TypeError, "wanted integers in a tensor, an array or lists of equal length, got NoneType"),
    (torch.tensor([[0, 9]]), ValueError, r"wanted 1 dimensions, got shape \[1, 2\]"),
    ([0, 4, 10], ValueError, "wanted offsets that end at the number of tokens, 9, got 10"),
    ([0, 4], ValueError, "wanted offsets that end at the number of tokens, 9, got 4"),
    ([0], ValueError, "wanted offsets that end at the number of tokens, 9, got 0"),
    ([], ValueError, "wanted offsets that end at the number of tokens, 9, got None"),
]


@pytest.mark.parametrize(("wrong", "kind", "words"), OFFSETS)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_wrong_offsets_are_named(name, wrong, kind, words):
    """Floats were truncated to integers, and offsets with a wrong end gave zeros or too many rows."""
    q, k, v = draw((9, 4, 8), (9, 2, 8), (9, 2, 8))
    given = {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": [0, 4, 9], name: wrong}
    with pytest.raises(kind, match=f"^{name}: {words}$"):
        flash_attn_varlen_func(q, k, v, **given, max_seqlen_q=5, max_seqlen_k=5, causal=True)


@pytest.mark.parametrize("wrong", [3, (3,), (3, 0, 1), None, (3.0, 0), (True, 0), "ab"])
def test_a_window_is_a_pair(wrong):
    """An int failed with "'int' object is not iterable"."""
    q, k, v = draw((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    with pytest.raises(TypeError, match=r"^window_size: wanted \(before, after\), -1 for no limit, got"):
        flash_attn_func(q, k, v, window_size=wrong)
    want = flash_attn_func(q, k, v, window_size=(-1, 2))
    assert torch.equal(flash_attn_func(q, k, v, window_size=[None, 2]), want)


def test_tensors_of_another_rank_are_refused():
    """[L, H, D] was read as [B, H, D] and gave numbers."""
    q, k, v = draw((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    with pytest.raises(ValueError, match=r"^q: wanted \[B, L, H, D\], got \[6, 4, 8\]$"):
        flash_attn_func(q[0], k[0], v[0])
    with pytest.raises(ValueError, match=r"^q: wanted \[tokens, H, D\], got \[2, 6, 4, 8\]$"):
        flash_attn_varlen_func(q, k, v, [0, 12], [0, 12], 12, 12)
    with pytest.raises(TypeError, match=r"^k: wanted a tensor, got NoneType"):
        flash_attn_func(q, None, v)
    with pytest.raises(TypeError, match=r"^relation: wanted a Relation or None, got Tensor"):
        flash_attn_func(q, k, v, causal=True, relation=torch.ones(6, 6))


def test_flash_attn_refuses_unsupported_arguments():
    q, k, v = draw((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    with pytest.raises(NotImplementedError, match="return_attn_probs: wanted False"):
        flash_attn_func(q, k, v, return_attn_probs=True)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, 6, 12])
    with pytest.raises(
        NotImplementedError, match="block_table: wanted None, paged keys are not supported, got Tensor"
    ):
        flash_attn_varlen_func(*flat, cu, cu, 6, 6, block_table=torch.zeros(1))
    with pytest.raises(NotImplementedError, match=r"alibi_slopes: wanted \[H\], got \[2, 4\]"):
        flash_attn_varlen_func(*flat, cu, cu, 6, 6, alibi_slopes=torch.zeros(2, 4))

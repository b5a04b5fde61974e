"""The module for torchtitan's models against torch's attention, with the masks that torchtitan makes."""

import sys
from typing import NamedTuple

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

import attnbias as ab
from attnbias.integrations import torchtitan
from attnbias.integrations.torchtitan import InnerAttention
from attnbias.testing import assert_no_worse

B, L = 2, 37
DOCUMENT = torch.tensor([0] * 5 + [1] * 32 + [2] * 20 + [3] + [4] * 16)  # through both rows


class VarlenMetadata(NamedTuple):
    """What torchtitan makes of a batch, by its fields."""

    cu_seq_q: torch.Tensor
    cu_seq_k: torch.Tensor
    max_q: int
    max_k: int


def offsets(*starts):
    each = torch.tensor(starts, dtype=torch.int32)
    return VarlenMetadata(each, each, 32, 32)


def window(length):
    i = torch.arange(length)
    return (i[:, None] >= i) & (i[:, None] - i < 9)


def in_rows(same):
    """Return the pairs of one document, [B, 1, L, L]."""
    rows = DOCUMENT.view(B, L) if same else torch.zeros(B, L)
    return (rows[:, :, None] == rows[:, None])[:, None]


def block_mask():
    rows = DOCUMENT.view(B, L)
    return create_block_mask(lambda b, h, q, k: rows[b, q] == rows[b, k], B, None, L, L, device="cpu")


MASKS = {
    "none": lambda: None,
    "sequences": lambda: offsets(0, 5, 37, 57, 58, 74),
    "blocks": block_mask,
    "relation": lambda: ab.Documents(DOCUMENT.view(B, L)),
}


def run(f, tensors, dtype):
    inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
    out = f(*inputs)
    weight = torch.arange(out.numel()).view(out.shape).to(dtype).cos()
    return out, torch.autograd.grad((out * weight).sum(), inputs)


def draw(*rows):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(*rows, heads, 8, generator=rng) for heads in (4, 2, 2)]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("packed", [False, True])
def test_equals_torch_with_gradients(kind, packed):
    masks, allowed = MASKS[kind](), window(L) & in_rows(kind != "none")
    tensors, inner = draw(B, L), InnerAttention(ab.Window(before=8))
    if packed and kind in ("blocks", "relation"):
        pytest.skip("masks of rows [B, L] do not fit all tokens in one row")

    def ours(q, k, v):
        options = {"attention_masks": masks, "scale": 0.4, "enable_gqa": True}
        if not packed:
            return inner(q, k, v, **options)
        if masks is None:
            return torch.stack([inner(*each, **options) for each in zip(q, k, v, strict=True)])
        return inner(*(x.flatten(0, 1) for x in (q, k, v)), **options).view_as(q)

    def torchs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, allowed, scale=0.4, enable_gqa=True)
        return out.transpose(1, 2)

    runs = (ours, torch.float32), (torchs, torch.float32), (torchs, torch.float64)
    got, eager, exact = (run(f, tensors, dtype) for f, dtype in runs)
    assert_no_worse("out", got[0], eager[0], exact[0])
    for name, *grads in zip("qkv", got[1], eager[1], exact[1], strict=True):
        assert_no_worse(name, *grads, 3)


@pytest.mark.parametrize("rows", [(B, L), (L,)])
def test_epilogue_has_lse_of_each_token_and_head(rows):
    q, k, v = draw(*rows)
    out, lse = InnerAttention()(q, k, v, scale=0.0, enable_gqa=True, out_transform=lambda *both: both)
    assert out.shape == q.shape
    count = torch.arange(1.0, L + 1).view(L, 1).expand(*rows, 4)
    assert torch.equal(lse.exp().round(), count)


def test_layers_share_one_relation_until_masks_change(monkeypatch):
    made = []
    read = torchtitan._to_relation
    monkeypatch.setattr(torchtitan, "_to_relation", lambda masks: made.append(read(masks)) or made[-1])
    causal, (q, k, v) = ab.Causal(), draw(L)
    layers = [InnerAttention(causal) for _ in range(3)]
    masks, others = offsets(0, 5, L), offsets(0, 9, L)
    first = [each(q, k, v, attention_masks=masks, enable_gqa=True) for each in layers]
    second = [each(q, k, v, attention_masks=others, enable_gqa=True) for each in layers]
    assert len(made) == 2
    assert torch.equal(first[0], first[2])
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    "relation",
    [
        ab.Causal() & (ab.Global([0]) | ab.Window(before=2)),
        ab.Chunks(8),
        ab.PerBatch([ab.Causal(), ab.Window(before=3)]),
    ],
)
def test_relation_counts_from_the_first_token_of_each_row(relation):
    masks, inner = offsets(0, 5, 37, 57, 58, 74), InnerAttention(relation)
    allowed = in_rows(True) & relation.dense(L, batch=B).expand(B, 1, L, L)

    def torchs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, allowed, enable_gqa=True).transpose(1, 2)

    tensors = draw(B, L)
    got = inner(*tensors, attention_masks=masks, enable_gqa=True)
    assert_no_worse("out", got, torchs(*tensors), torchs(*(x.double() for x in tensors)))


def test_sequences_through_rows_want_a_stationary_relation():
    tensors, inner = draw(B, L), InnerAttention(ab.Chunks(8))
    with pytest.raises(ValueError, match=r"^attention_masks: wanted sequences that end with their row, "):
        inner(*tensors, attention_masks=offsets(0, 50, 74), enable_gqa=True)
    with pytest.raises(ValueError, match=r"^attention_masks: wanted offsets that end at 74, got Documents"):
        inner(*tensors, attention_masks=offsets(0, 37, 73), enable_gqa=True)


def test_a_call_in_another_thread_changes_nothing():
    inner, (q, k, v) = InnerAttention(), draw(L)
    mine, others = offsets(0, 5, L), offsets(0, 9, L)
    wanted, other = (inner(q, k, v, attention_masks=each, enable_gqa=True) for each in (mine, others))

    def interrupt(frame, event, argument):
        if frame.f_code.co_name != "_read":
            return None
        if event == "line":  # before each line of one call another call runs as a whole
            sys.settrace(None)
            inner(q, k, v, attention_masks=offsets(0, 9, L), enable_gqa=True)
            sys.settrace(interrupt)
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        got = [inner(q, k, v, attention_masks=mine, enable_gqa=True) for _ in range(2)]
    finally:
        sys.settrace(before)
    assert not torch.equal(wanted, other) and all(torch.equal(each, wanted) for each in got)


def test_it_has_no_parameters():
    assert not InnerAttention().state_dict()


def test_wrong_arguments_raise():
    (q, k, v), inner = draw(B, L), InnerAttention()
    with pytest.raises(TypeError, match=r"^relation: wanted a Relation or None, got str$"):
        InnerAttention("causal")
    with pytest.raises(ValueError, match=r"^q: wanted \[B, L, H, D\] or \[T, H, D\], got \[37, 8\]$"):
        inner(q[0, :, 0], k, v)
    with pytest.raises(ValueError, match=r"^k: wanted tokens \[2, 37\] as in q, got \[2, 36, 2, 8\]$"):
        inner(q, k[:, 1:], v)
    with pytest.raises(TypeError, match=r"^attention_masks: wanted None, a Relation, .*, got Tensor$"):
        inner(q, k, v, attention_masks=torch.ones(1))
    with pytest.raises(ValueError, match="enable_gqa=False"):
        inner(q, k, v)

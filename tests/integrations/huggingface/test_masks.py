"""Mask functions of transformers as relations: the same pairs, recognised rather than tested pair by pair."""

import sys

import pytest
import torch

import attnbias as ab

sys.modules.setdefault("kernels", None)  # see cases.huggingface
pytest.importorskip("transformers")
from transformers import masking_utils as masks  # noqa: E402

from attnbias.integrations.huggingface import make_mask  # noqa: E402

BATCH, TOTAL = 3, 20
PADDING = torch.ones(BATCH, TOTAL, dtype=torch.bool)
PADDING[1, :6] = False
PADDING[2, 15:] = False
PACKED = torch.tensor([[0] * 4 + [1] * 9 + [2] * 7, [0] * 20, [0] * 1 + [1] * 19])
BLOCKS = torch.tensor([[-1] * 5 + [0] * 6 + [-1] * 5 + [1] * 4] * BATCH)
LEFT = torch.tensor([0, 6, 0])


def odd(b, h, q, k):
    return (q + k) % 2 == 0


FUNCTIONS = {
    "causal": masks.causal_mask_function,
    "bidirectional": masks.bidirectional_mask_function,
    "sliding": masks.sliding_window_causal_mask_function(5),
    "sliding both ways": masks.sliding_window_bidirectional_mask_function(5),
    "chunked": masks.chunked_causal_mask_function(4, LEFT),
    "chunked alike": masks.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.int64)),
    "blocks": masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(BLOCKS)),
    "packed": masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(PACKED)),
    "padding": masks.and_masks(masks.causal_mask_function, masks.padding_mask_function(PADDING)),
    "unknown": masks.and_masks(masks.causal_mask_function, odd),
}
# queries, keys, positions of the first of each: prefill, a step, several after a cache, a sliding cache.
PLACES = [(20, 20, 0, 0), (1, 20, 19, 0), (4, 20, 16, 0), (1, 5, 19, 15), (3, 7, 17, 13), (8, 20, 0, 0)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pairs_equal_those_of_transformers(name, place, padded):
    q_len, k_len, q_offset, k_offset = place
    arguments = {
        **{"batch_size": BATCH, "q_length": q_len, "kv_length": k_len, "q_offset": q_offset},
        **{"kv_offset": k_offset, "mask_function": FUNCTIONS[name]},
        "attention_mask": PADDING if padded else None,
    }
    truth = masks.sdpa_mask(**arguments, allow_is_causal_skip=False)
    mask = make_mask(**arguments, dtype=torch.float32, config=None, use_vmap=False)
    got = mask.relation.dense(q_len, k_len, mask.q_start, batch=BATCH)
    assert torch.equal(got.expand(BATCH, 1, q_len, k_len), truth)
    layout = mask.relation.layout(q_len, k_len, q_start=mask.q_start, batch=BATCH)
    assert torch.equal(layout.to_dense().bool().expand(BATCH, 1, q_len, k_len), truth)
    assert ("Where" in repr(mask.relation)) == (name == "unknown")
    if name == "unknown":
        assert "odd" in repr(mask)  # the repr shows the function's name


def test_windows_count_as_transformers_does():
    """A causal window of W has W keys; a bidirectional one has W on each side."""
    make = {"batch_size": 1, "q_length": 9, "kv_length": 9}
    causal = make_mask(**make, mask_function=masks.sliding_window_causal_mask_function(4))
    both = make_mask(**make, mask_function=masks.sliding_window_bidirectional_mask_function(4))
    assert causal.relation == ab.Window(before=3)
    assert both.relation == ab.Window(before=4, after=4)


def test_padding_that_hides_nothing_is_left_out():
    full = torch.ones(2, 9, dtype=torch.int64)
    mask = make_mask(2, 9, 9, mask_function=masks.causal_mask_function, attention_mask=full)
    assert mask.relation == ab.Causal()


def test_an_offset_that_is_a_tensor():
    mask = make_mask(1, 1, 9, q_offset=torch.tensor(4), mask_function=masks.causal_mask_function)
    assert mask.q_start == 4


def test_a_model_may_compute_with_its_mask():
    """Such models failed: 'Mask' object has no attribute 'dtype', is not subscriptable, and so on."""
    given = {"batch_size": BATCH, "q_length": 4, "kv_length": 20, "q_offset": 16}
    given |= {"mask_function": FUNCTIONS["sliding"], "attention_mask": PADDING, "dtype": torch.float32}
    mask, truth = make_mask(**given), masks.eager_mask(**given)
    scores = torch.randn(BATCH, 2, 4, 20)
    for got, wanted in (
        (scores + mask, scores + truth),
        (mask + scores, scores + truth),
        (mask[:, 0, 1:], truth[:, 0, 1:]),
        (mask == 0, truth == 0),
        (-mask, -truth),
        (torch.cat([mask, scores[:, :1]], dim=-1), torch.cat([truth, scores[:, :1]], dim=-1)),
        (torch.where(mask < 0, 1, 0), torch.where(truth < 0, 1, 0)),
        (scores.masked_fill(mask != 0, 3), scores.masked_fill(truth != 0, 3)),
        (mask.to(torch.float64), truth.double()),
        (mask.expand(-1, 2, -1, -1), truth.expand(-1, 2, -1, -1)),
    ):
        assert type(got) is torch.Tensor and torch.equal(got, wanted)
    assert mask.dtype == torch.float32 and mask.dim() == mask.ndim == 4 and mask.shape == truth.shape
    with pytest.raises(AttributeError, match="'Mask' object has no attribute 'relations'"):
        _ = mask.relations


def test_mask_that_is_only_moved_is_the_same():
    mask = make_mask(1, 4, 4, mask_function=masks.causal_mask_function)
    assert mask.contiguous() is mask
    assert mask.to("cpu") is mask and mask.to(torch.device("cpu"), non_blocking=True) is mask

"""The helpers that the other tests trust."""

import math
import random

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import attnbias
from attnbias.backends.philox import keep_mask
from attnbias.testing import assert_no_worse, eager, lengths, make_inputs, random_relation

EPS = torch.finfo(torch.float32).eps


def test_lengths_surround_the_tile():
    assert lengths(128) == [1, 127, 128, 129, 97]


def test_assert_no_worse_allows_twice_the_error_of_eager_and_one_rounding_step():
    oracle = torch.tensor([1.0, 4.0], dtype=torch.float64)
    same = torch.tensor([1.0 + 2**-10, 4.0])
    bound = 2 * 2**-10 + 4 * EPS
    assert_no_worse("x", torch.tensor([1.0, 4.0 - 2**-9]), same, oracle)
    assert_no_worse("x", torch.tensor([1.0, 4.0 + bound]), same, oracle)
    with pytest.raises(AssertionError, match=r"x: error 1.95\de-03 > 2.0 x eager's 9.7.* \[\[1\]\]"):
        assert_no_worse("x", torch.tensor([1.0, 4.0 + bound + 4 * EPS]), same, oracle)
    assert_no_worse("x", torch.tensor([1.0, 4.0 + bound + 4 * EPS]), same, oracle, factor=3.0)


def test_assert_no_worse_takes_the_rounding_step_of_the_results_dtype():
    oracle = torch.tensor([1.0], dtype=torch.float64)
    assert_no_worse("x", (oracle + 2**-7).bfloat16(), oracle.bfloat16(), oracle)
    with pytest.raises(AssertionError, match="error"):
        assert_no_worse("x", (oracle + 2**-7).float(), oracle.float(), oracle)


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ([0.0, 1.0], r"x: -inf does not match the oracle's at \[\[0\]\]"),
        ([-math.inf, -math.inf], r"x: -inf does not match the oracle's at \[\[1\]\]"),
        ([-math.inf, math.nan], r"x: not finite at \[\[1\]\]"),
        ([-math.inf, math.inf], r"x: not finite at \[\[1\]\]"),
        ([-math.inf, 1.0, 2.0], r"x: got has the shape \[3\], the oracle \[2\]"),
    ],
)
def test_assert_no_worse_compares_nonfinite_values_exactly(got, words):
    oracle = torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    same = oracle.float()
    assert_no_worse("x", same, same, oracle)
    with pytest.raises(AssertionError, match=words):
        assert_no_worse("x", torch.tensor(got), same, oracle)


def test_assert_no_worse_refuses_a_bad_yardstick():
    oracle = torch.ones(5, dtype=torch.float64)
    bad = torch.full((5,), math.inf)
    with pytest.raises(AssertionError, match=r"x: same_precision .* \[2\]\] and 2 more"):
        assert_no_worse("x", oracle.float(), bad, oracle)
    with pytest.raises(AssertionError, match="same_precision has the shape"):
        assert_no_worse("x", oracle.float(), bad[0], oracle)


def test_assert_no_worse_requires_exactly_0_in_empty_rows():
    oracle = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    same = oracle.float() + 1e-3
    empty = torch.tensor([[True], [False]])
    assert_no_worse("x", oracle.float(), same, oracle, empty=empty)
    with pytest.raises(AssertionError, match=r"x: not exactly 0 at \[\[0, 1\]\]"):
        assert_no_worse("x", oracle.float() + torch.tensor([0, 1e-9]), same, oracle, empty=empty)


def test_assert_no_worse_accepts_empty_and_all_minus_inf_tensors():
    nothing = torch.empty(0, 3, dtype=torch.float64)
    assert_no_worse("x", nothing.float(), nothing.float(), nothing)
    gone = torch.full((2,), -math.inf, dtype=torch.float64)
    assert_no_worse("x", gone.float(), gone.float(), gone)


@pytest.mark.parametrize("order", ["BHLD", "BLHD", "LBHD", "BHDL"])
@pytest.mark.parametrize("strided", [False, True])
def test_make_inputs_lie_between_nans(order, strided):
    sizes = {"B": 2, "H": 4, "Hk": 2, "Q": 5, "K": 3, "D": 6, "E": 7}
    made = make_inputs(1, **sizes, dtype=torch.bfloat16, order=order, strided=strided)
    shapes = [(2, 4, 5, 6), (2, 2, 3, 6), (2, 2, 3, 7)]
    for x, shape in zip(made, shapes, strict=True):
        assert x.shape == shape
        assert x.dtype == torch.bfloat16
        assert x.isfinite().all()
        base = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        assert base.isfinite().sum() == x.numel()
        assert base[:2].isnan().all()
        assert base[-2:].isnan().all()
        by_stride = sorted(range(4), key=lambda d, x=x: -x.stride(d))
        assert "".join("BHLD"[d] for d in by_stride) == order
        assert x.permute(by_stride).is_contiguous() != strided
    again = make_inputs(1, **sizes, dtype=torch.bfloat16)
    assert all(torch.equal(x, y) for x, y in zip(made, again, strict=True))


def test_make_inputs_draws_on_from_a_generator_and_makes_leaves():
    rng = torch.Generator().manual_seed(0)
    one = make_inputs(rng, 1, 1, 1, 2, 2, 2, 2, strided=True, requires_grad=True)
    two = make_inputs(rng, 1, 1, 1, 2, 2, 2, 2)
    assert not torch.equal(one[0], two[0])
    assert all(x.is_leaf and x.requires_grad for x in one)
    assert not any(x.requires_grad for x in two)


def test_make_inputs_names_a_wrong_order():
    with pytest.raises(ValueError, match="order: wanted a permutation of the letters BHLD, got 'BH'"):
        make_inputs(0, 1, 1, 1, 1, 1, 1, 1, order="BH")


def test_eager_is_scaled_dot_product_attention():
    query, key, value = make_inputs(0, 2, 4, 2, 9, 7, 5, 3, torch.float64)
    mask = torch.rand(2, 4, 9, 7, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = True
    wanted = scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(eager(query, key, value, mask, scale=0.3)[0], wanted)
    wanted = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(eager(query, key, value)[0], wanted)


class Slope:
    """A term that depends on every index, and removes the pairs of key 2 in head 1."""

    def value(self, b, h, q, k):
        value = 0.1 * b - 0.2 * h + 0.03 * q * k
        return torch.where((h == 1) & (k == 2), -math.inf, value)


def by_loops(query, key, value, counts, sink, scale, softcap, dropout_p, seed, q_start):
    """Compute attention pair by pair, in Python floats."""
    (B, H, Q, _), K = query.shape, key.shape[2]
    out, lse = torch.zeros(B, H, Q, value.shape[3]), torch.zeros(B, H, Q)
    out, lse = out.double(), lse.double()
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in (B, H, Q))).tolist():
        head, total = h // (H // key.shape[1]), math.exp(sink[h])
        for k in range(K):
            if counts[b, h, i, k] == 0 or (h == 1 and k == 2):
                continue
            score = softcap * math.tanh(scale * float(query[b, h, i] @ key[b, head, k]) / softcap)
            score += 0.1 * b - 0.2 * h + 0.03 * (i + q_start) * k
            weight = int(counts[b, h, i, k]) * math.exp(score)
            total += weight
            place = (torch.tensor(x) for x in (b, h, i + q_start, k))
            if keep_mask(seed, dropout_p, *place):
                out[b, h, i] += weight / (1 - dropout_p) * value[b, head, k]
        out[b, h, i] /= max(total, 1e-300)
        lse[b, h, i] = math.log(total) if total else -math.inf
    return out, lse


@pytest.mark.parametrize("last", [0.5, -math.inf])
def test_eager_is_the_definition_written_in_loops(last):
    query, key, value = make_inputs(3, 2, 4, 2, 5, 6, 3, 2, torch.float64)
    counts = torch.randint(0, 3, (2, 4, 5, 6), generator=torch.Generator().manual_seed(1))
    counts[0, 0, 1] = 0
    counts[1, 1, 3] = 0
    counts[1, 1, 3, 2] = 1  # removed by the term: the row is empty
    sink = torch.tensor([0.1, last, -0.3, 2.0], dtype=torch.float64)
    options = {"scale": -0.7, "softcap": 1.5, "dropout_p": 0.4, "q_start": 3, "sink": sink}
    options["seed"] = torch.tensor([99])
    out, lse = eager(query, key, value, counts=counts, terms=[Slope()], **options)
    wanted_out, wanted_lse = by_loops(query, key, value, counts, **options)
    torch.testing.assert_close(out, wanted_out)
    torch.testing.assert_close(lse, wanted_lse)
    assert lse[0, 0, 1] == sink[0]
    assert lse[1, 1, 3] == last
    assert not out[0, 0, 1].any()
    also, _ = eager(query, key, value, counts > 0, counts=counts, terms=[Slope()], **options)
    assert torch.equal(also, out)


def test_eager_has_zero_gradients_in_empty_rows():
    query, key, value = made = make_inputs(0, 1, 2, 1, 3, 4, 2, 2, torch.float64, requires_grad=True)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1], mask[:, 3] = False, False
    out, lse = eager(query, key, value, mask)
    loss = out.square().sum() + lse.masked_fill(lse == -math.inf, 0).sum()
    grad_query, grad_key, grad_value = torch.autograd.grad(loss, made)
    assert lse[0, :, 1].tolist() == [-math.inf] * 2
    assert not grad_query[:, :, 1].any()
    assert grad_query[:, :, 0].all()
    assert not grad_key[:, :, 3].any()
    assert not grad_value[:, :, 3].any()


def test_eager_accepts_zero_lengths_and_drops_everything():
    query, key, value = make_inputs(0, 2, 2, 1, 3, 0, 4, 5)
    out, lse = eager(query, key, value, sink=torch.tensor([0.5, -1.0]))
    assert out.shape == (2, 2, 3, 5)
    assert not out.any()
    assert torch.equal(lse[0, :, 0], torch.tensor([0.5, -1.0]))
    assert eager(*make_inputs(0, 2, 2, 1, 0, 3, 4, 5))[0].shape == (2, 2, 0, 5)
    made = make_inputs(0, 2, 2, 1, 3, 4, 4, 5)
    assert not eager(*made, dropout_p=1.0, seed=torch.tensor([1]))[0].any()
    assert torch.equal(eager(*made, dropout_p=1.0, seed=torch.tensor([1]))[1], eager(*made)[1])


def test_eager_needs_a_seed_for_dropout():
    with pytest.raises(ValueError, match="seed: wanted an int64 tensor because dropout_p is set, got None"):
        eager(*make_inputs(0, 1, 1, 1, 2, 2, 2, 2), dropout_p=0.5)


def test_eager_works_in_the_dtype_of_the_inputs():
    made = make_inputs(0, 1, 2, 2, 33, 65, 16, 16, torch.bfloat16)
    out, lse = eager(*made)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    exact, exact_lse = eager(*(x.double() for x in made))
    assert exact_lse.dtype == torch.float64
    assert (out - exact).abs().max() > 1e-4


def test_random_relation_takes_any_generator_and_repeats():
    for make in (lambda: 5, lambda: random.Random(5), lambda: np.random.default_rng(5)):
        assert random_relation(make(), 2) == random_relation(make(), 2)
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    assert random_relation(generators[0], 1) == random_relation(generators[1], 1)


def test_random_relations_draw_every_public_one():
    drawn = " ".join(repr(random_relation(seed, 1, batch=2, heads=2)) for seed in range(400))
    for name in attnbias.relations.__all__:
        kind = getattr(attnbias.relations, name)
        if isinstance(kind, type) and issubclass(kind, attnbias.Relation) and kind is not attnbias.Relation:
            assert f"{name}(" in drawn or f"{name}." in drawn, name

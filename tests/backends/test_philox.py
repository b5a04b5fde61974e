"""Dropout bits against plain Python integers and the published vectors of Random123."""

import math
import random

import pytest
import torch

from attnbias.backends.philox import keep_mask, philox

VECTORS = [  # counter, key, words: kat_vectors of Random123, "philox4x32 7"
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


def words_by_hand(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second % 2**32,
            (first >> 32) ^ c3 ^ k1,
            first % 2**32,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def kept_by_hand(seed, p, b, h, q, k):
    key = (seed % 2**32, (seed % 2**64) >> 32)
    word = words_by_hand((k // 4, q % 2**32, h, b), key)[k % 4]
    return word >= math.floor(p * 2**32)


def tensors(*numbers):
    return tuple(torch.tensor(number) for number in numbers)


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_philox_matches_the_published_vectors(counter, key, words):
    assert words_by_hand(counter, key) == words
    assert tuple(word.item() for word in philox(tensors(*counter), tensors(*key))) == words


def test_keep_mask_matches_python_integers():
    rng = random.Random(0)
    seeds = [0, -1, 2**63 - 1, -(2**63), *(rng.randrange(-(2**63), 2**63) for _ in range(20))]
    for seed in seeds:
        p = rng.random()
        sizes = (2**20, 2**10, 2**31, 2**31)
        places = [tuple(rng.randrange(n) for n in sizes) for _ in range(50)]
        places += [(b, h, -q, k) for b, h, q, k in places[:5]]  # q_start may be negative
        b, h, q, k = torch.tensor(places).unbind(1)
        got = keep_mask(torch.tensor([seed]), p, b, h, q, k)
        assert got.tolist() == [kept_by_hand(seed, p, *place) for place in places]


def test_keep_mask_keeps_from_the_threshold_on():
    word = words_by_hand((3, 5, 2, 1), (77, 0))[2]  # key position 14
    place = tensors(1, 2, 5, 14)
    assert keep_mask(torch.tensor([77]), word / 2**32, *place)
    assert not keep_mask(torch.tensor([77]), (word + 1) / 2**32, *place)


def grid(B=2, H=3, Q=97, K=130):
    b, h, q, k = (torch.arange(n) for n in (B, H, Q, K))
    return b[:, None, None, None], h[:, None, None], q[:, None], k


def test_keep_mask_broadcasts():
    seed = torch.tensor([12345])
    whole = keep_mask(seed, 0.4, *grid())
    assert whole.shape == (2, 3, 97, 130)
    assert whole.dtype == torch.bool
    b, h, q, k = (x.reshape(-1) for x in torch.broadcast_tensors(*grid()))
    assert torch.equal(keep_mask(seed, 0.4, b, h, q, k), whole.reshape(-1))


def test_keep_mask_keeps_all_at_0_and_none_at_1():
    for seed in (0, 1, -77):
        assert keep_mask(torch.tensor([seed]), 0.0, *grid()).all()
        assert not keep_mask(torch.tensor([seed]), 1.0, *grid()).any()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_mask_drops_the_given_share_along_every_axis(p):
    kept = keep_mask(torch.tensor([2024]), p, *grid(8, 8, 128, 128)).double()

    def sigmas(mean, n):
        return (mean - (1 - p)).abs().max().item() / math.sqrt(p * (1 - p) / n)

    assert sigmas(kept.mean(), kept.numel()) < 4
    for axis in range(4):
        means = kept.transpose(0, axis).flatten(1).mean(1)
        assert sigmas(means, kept.numel() / len(means)) < 5
    for lane in range(4):
        assert sigmas(kept[..., lane::4].mean(), kept.numel() / 4) < 4
    for axis in range(4):  # neighbours are independent: both are kept with probability (1 - p)^2
        n = kept.shape[axis]
        both = kept.narrow(axis, 0, n - 1) * kept.narrow(axis, 1, n - 1)
        share = (1 - p) ** 2
        assert abs(both.mean() - share) < 6 * math.sqrt(share * (1 - share) / both.numel())


def test_keep_mask_depends_on_both_halves_of_the_seed():
    masks = [keep_mask(torch.tensor([seed]), 0.5, *grid()) for seed in (0, 1, 2**32)]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert 0.45 < (one == other).double().mean() < 0.55


def test_keep_mask_drops_a_superset_when_p_grows():
    seed = torch.tensor([5])
    assert not (keep_mask(seed, 0.6, *grid()) & ~keep_mask(seed, 0.3, *grid())).any()

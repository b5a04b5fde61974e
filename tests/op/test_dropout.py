"""Dropout: the pairs that backends drop, bit by bit, and the results at p = 0 and p = 1."""

import math

import pytest
import torch

import attnbias as ab
from attnbias.backends import cpu
from attnbias.backends.philox import keep_mask
from attnbias.testing import make_inputs

without = pytest.mark.skipif(bool(cpu.missing()), reason="no C++ library")
BACKENDS = ["reference", "rows", pytest.param("cpu", marks=without)]
B, H, Q, K = 2, 3, 75, 139
RELATIONS = {
    "full": ab.Full(),
    "causal": ab.Causal(),
    "edges": ab.Where(lambda q, k: (q * 31 + k * 17) % 23 == 0),
    "mixed": ab.Window(before=8) | (ab.Prefix(64) & ab.Where(lambda q, k: q < 100)),
    "per head": ab.PerHead([ab.Causal(), ab.Full(), ab.Window(before=7)]),
}


@pytest.fixture(params=[] if cpu.missing() else cpu.isas())
def on_isa(request):
    cpu.force_isa(request.param)
    yield request.param
    cpu.force_isa(None)


def weights(relation, p, q_len=Q, seed=5, backend="cpu", heads=H, key_size=4, **options):
    """Return the matrix of weights: all scores are 0, the values are the identity."""
    query, key = torch.zeros(B, heads, q_len, key_size), torch.zeros(B, heads, K, key_size)
    value = torch.eye(K).expand(B, heads, K, K)
    torch.manual_seed(seed)
    given = {"q_start": "end", "dropout_p": p, "backend": backend, **options}
    return ab.attention(query, key, value, relation, **given)


def kept(p, q_len=Q, seed=5, heads=H, q_start=None):
    """Return the bits for the seed that ``attention`` draws."""
    torch.manual_seed(seed)
    drawn = torch.randint(0, 2**63 - 1, (1,))
    start = K - q_len if q_start is None else q_start
    b, h, q, k = (torch.arange(n) for n in (B, heads, q_len, K))
    return keep_mask(drawn, p, b[:, None, None, None], h[:, None, None], q[:, None] + start, k)


def check_dropped(relation, p, q_len, backend):
    got = weights(relation, p, q_len, backend=backend)
    related = relation.dense(q_len, K, "end", batch=B, heads=H).expand(B, H, q_len, K)
    assert torch.equal(got != 0, related & kept(p, q_len))
    share = 1 / (related.sum(-1, keepdim=True).clamp(min=1) * (1 - p))
    torch.testing.assert_close(got, torch.where(got != 0, share, 0.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("relation", RELATIONS)
def test_which_pairs_are_dropped(relation, backend):
    for q_len in (1, 6, Q, K):
        check_dropped(RELATIONS[relation], 0.37, q_len, backend)


@pytest.mark.parametrize("relation", RELATIONS)
def test_which_pairs_every_level_drops(relation, on_isa):
    for q_len in (1, 6, Q, K):
        for p in (0.1, 0.9):
            check_dropped(RELATIONS[relation], p, q_len, "cpu")


@pytest.mark.usefixtures("on_isa")
def test_eight_heads_of_an_edge_at_a_time():
    """Edges of small heads have heads in lanes, so values of size 16 show 16 keys at a time."""
    relation, heads = RELATIONS["edges"], 8
    related = relation.dense(Q, K, "end")
    got = torch.zeros(B, heads, Q, K)
    query, key = torch.zeros(B, heads, Q, 16), torch.zeros(B, heads, K, 16)
    for first in range(0, K, 16):
        torch.manual_seed(5)
        value = torch.eye(K)[:, first : first + 16]
        some = torch.nn.functional.pad(value, (0, 16 - value.shape[1])).expand(B, heads, K, 16)
        out = ab.attention(query, key, some, relation, dropout_p=0.4, q_start="end", backend="cpu")
        got[..., first : first + 16] = out[..., : value.shape[1]]
    assert torch.equal(got != 0, related & kept(0.4, heads=heads))


@pytest.mark.usefixtures("on_isa")
def test_gradients_drop_the_same_pairs():
    """dV of a uniform softmax is the transposed matrix if the gradient of out is the identity."""
    for relation, q_len in ((RELATIONS["causal"], 139), (RELATIONS["mixed"], 139), (ab.Full(), 5)):
        query, key, value = make_inputs(1, B, H, H, q_len, K, 4, q_len, requires_grad=True)
        torch.manual_seed(5)
        out = ab.attention(0 * query, key, value, relation, dropout_p=0.3, q_start="end", backend="cpu")
        (grad,) = torch.autograd.grad(out, value, torch.eye(q_len).expand(B, H, q_len, q_len))
        related = relation.dense(q_len, K, "end").expand(B, H, q_len, K)
        assert torch.equal(grad.mT != 0, related & kept(0.3, q_len))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_frequency_and_independence(backend, p):
    """A share p of all pairs is dropped, independently of the neighbours along every axis."""
    alive = (weights(ab.Full(), p, K, backend=backend) != 0).double()

    def is_near(x, share, n):
        return (x - share).abs().max() < 5 * math.sqrt(share * (1 - share) / n)

    assert is_near(alive.mean(), 1 - p, alive.numel())
    for axis in (2, 3):
        means = alive.transpose(0, axis).flatten(1).mean(1)
        assert is_near(means, 1 - p, alive.numel() / len(means))
    for axis in range(4):
        for step in (1, 4) if axis > 1 else (1,):
            n = alive.shape[axis] - step
            pairs = alive.narrow(axis, 0, n) * 2 + alive.narrow(axis, step, n)
            counts = torch.stack([(pairs == i).sum() for i in range(4)])
            wanted = pairs.numel() * torch.tensor([p * p, p * (1 - p), (1 - p) * p, (1 - p) ** 2])
            chi_square = ((counts - wanted) ** 2 / wanted).sum()
            assert chi_square < 25  # 3 degrees of freedom: exceeded once in 60,000


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("relation", RELATIONS)
def test_p_of_0_and_1_are_exact(backend, relation):
    inputs = make_inputs(1, B, H, H, Q, K, 8, 8, requires_grad=True)

    def results(p):
        out, lse = ab.attention(
            *inputs, RELATIONS[relation], q_start="end", dropout_p=p, return_lse=True, backend=backend
        )
        return out, lse, *torch.autograd.grad(out.sum(), inputs)

    none = results(0.0)
    tiny = results(1e-12)  # the threshold is 0: nothing is dropped
    for x, y in zip(none, tiny, strict=True):
        torch.testing.assert_close(x, y)
    out, lse, *grads = results(1.0)
    assert not out.any() and not any(grad.any() for grad in grads)
    torch.testing.assert_close(lse, none[1])


@without
@pytest.mark.parametrize("relation", RELATIONS)
def test_threads_do_not_change_a_bit(relation):
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            inputs = make_inputs(1, B, H, H, K, K, 8, 8, requires_grad=True)
            torch.manual_seed(7)
            out = ab.attention(*inputs, RELATIONS[relation], dropout_p=0.4, backend="cpu")
            results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(result, results[0], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_decoding_drops_what_prefill_dropped(backend):
    whole = weights(ab.Causal(), 0.5, K, backend=backend)
    for t in (0, 63, 64, K - 1):
        step = weights(ab.Causal(), 0.5, 1, backend=backend, q_start=t)
        torch.testing.assert_close(step[:, :, 0], whole[:, :, t])

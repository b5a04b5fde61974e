"""The Triton kernels as compiled, against float64: every access in bounds, no race, late copies.

The bodies are those of the other backends' tests; the `gpu` fixture makes the backend run on CPU tensors. Few
head sizes and options are used: a new one takes seconds to compile, a new relation or length does not.
"""

import itertools

import pytest
import torch
from cases.tiles import RELATIONS, check, make_call

import attnbias as ab
from attnbias.backends import triton
from attnbias.testing import make_inputs, random_relation, soak
from attnbias.testing.draw import draw_problem

SHAPE = (2, 4, 2, 97, 129, 24, 16)  # B, H, Hk, Q, K, D, E
SMALL = (1, 2, 1, 130, 140, 16, 16)


# Kernels compiled for one odd problem only; they are left out of the coverage.
odd = pytest.mark.odd_problem


@pytest.fixture(autouse=True)
def counted(request, gpu, coverage):
    """Record which blocks of the shipped kernels run."""
    gpu.coverage = None if request.node.get_closest_marker("odd_problem") else coverage


def run(relation, shape=SHAPE, **how):
    """Compare out, lse and all gradients with eager code in the same dtype and in float64."""
    check(triton, make_call(relation, shape, **how))


def cluttered(Q, K):
    """Draw edges in no order, some twice; some nodes have none, a row and a column exceed a piece."""
    rng = torch.Generator().manual_seed(0)
    least = min(Q, K) - 7
    ends = torch.randint(0, least, (2, 3 * Q), generator=rng)
    many, one = torch.randint(0, least, (600,), generator=rng), torch.full((600,), 5)
    hubs = torch.stack((torch.cat((many, one)), torch.cat((one, many))))
    return ab.Graph(torch.cat((ends, ends[:, :9], hubs), 1), size=(K, Q))


@pytest.mark.parametrize("relation", RELATIONS)
def test_relations(gpu, relation):
    run(RELATIONS[relation])
    assert {launch.name for launch in gpu.launches} >= {"forward_kernel", "backward_key_kernel"}


@pytest.mark.parametrize("relation", ["strictly past", "empty"])
def test_lists_with_room_to_spare(gpu, relation):
    """Layouts made with a capacity end with entries that no bound names."""
    run(RELATIONS[relation], capacity=90)


@pytest.mark.parametrize("form", ["auto", "edges"])
@pytest.mark.parametrize("seed", range(3))
def test_random_relations(gpu, seed, form):
    B, H, _, Q, K, _, _ = SHAPE
    run(random_relation(seed, q_len=Q, k_len=K, batch=B, heads=H), form=form)


@odd
@pytest.mark.parametrize("seed", range(2))
def test_through_attention(gpu, seed):
    """Lengths, strides, groups and scale at random; `attention` chooses the layout."""
    drawn = draw_problem(seed, plain=True)
    assert not soak.find_faults(drawn, "triton"), str(drawn)


@odd
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_random_problems(gpu, seed):
    """Any options, score terms and dropout among them, on any layout."""
    drawn, faults, _ = soak.check(seed, "triton", small=True)
    assert not faults, str(drawn)


@odd
@pytest.mark.parametrize(("Q", "K"), [(1, 65), (63, 64), (200, 130)])
def test_ragged_lengths(gpu, Q, K):
    for relation in ("full", "causal"):
        run(RELATIONS[relation], (1, 2, 1, Q, K, 24, 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(gpu, dtype):
    for relation in ("causal", "scattered", "empty"):
        run(RELATIONS[relation], (1, 2, 1, 130, 140, 64, 64), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_list_tiles_of_128(gpu, dtype):
    D = 16 if dtype == torch.float32 else 64
    run(RELATIONS["causal"], (1, 2, 1, 257, 300, D, D), tile=128, dtype=dtype)


@pytest.mark.parametrize("order", ["BLHD", "BHDL"])
def test_strides(gpu, order):
    run(RELATIONS["strictly past"], (2, 4, 2, 130, 129, 24, 16), order=order, strided=order == "BLHD")


def test_groups(gpu):
    heads = ab.PerHead([ab.Causal(), ab.Full(), ab.Empty(), ab.Causal() & ab.Window(before=7)])
    run(heads)
    run(ab.PerBatch([ab.Causal(), ab.Full()]) & heads)


OPTIONS = [
    {"scale": 0.0},
    {"sink": True},
    {"softcap": 1.5, "scale": -1.0},
    pytest.param({"scale": -0.7}, marks=pytest.mark.slow),
    pytest.param({"softcap": 1.5, "sink": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(gpu, options):
    run(RELATIONS["strictly past"], SMALL, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs(gpu, dtype):
    run(cluttered(97, 97), (1, 4, 2, 97, 97, 16, 16), form="edges", dtype=dtype)
    if dtype == torch.float32:
        run(cluttered(*SHAPE[3:5]), form="edges")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"sink": True}, {"softcap": 1.5, "scale": -1.0}], ids=str)
def test_options_on_edges(gpu, options):
    run(cluttered(97, 97), (1, 4, 2, 97, 97, 16, 16), form="edges", **options)


def test_tiles_and_edges_in_one_layout(gpu):
    """Lanes without a row read the lse of another program's row while that program wrote it."""
    relation = cluttered(300, 300) | (ab.Causal() & ab.Prefix(128))
    layout = ab.Layout.build(relation, 300, 300, form="auto")
    assert layout.tiles and layout.edges
    run(relation, (1, 2, 1, 300, 300, 16, 16), form="auto", tile=None)


@pytest.mark.parametrize("needs", [(0,), (1,), (2,)], ids=str)
def test_only_wanted_gradients(gpu, needs):
    B, H, Hk, Q, K, D, E = SMALL
    made = make_inputs(0, B, H, Hk, Q, K, D, E, requires_grad=True)
    layout = ab.Layout.build(ab.Causal(), Q, K, form="tiles", tile=64)
    whole = torch.autograd.grad(ab.attention(*made, layout, backend="triton").sum(), made)
    some = [x.detach().requires_grad_(i in needs) for i, x in enumerate(made)]
    out = ab.attention(*some, layout, backend="triton")
    for i, grad in zip(needs, torch.autograd.grad(out.sum(), [some[i] for i in needs]), strict=True):
        assert torch.equal(grad, whole[i])


@odd
@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)], ids=str)
def test_zero_lengths(gpu, sizes):
    B, H, Q, K = sizes
    run(ab.Full(), (B, H, H, Q, K, 24, 16))


def test_bits_do_not_depend_on_what_runs_together(gpu):
    """With one CTA at a time or many, no result depends on which comes first."""
    B, H, Hk, Q, K, D, E = SMALL
    made = make_inputs(3, B, H, Hk, Q, K, D, E, requires_grad=True)
    layout = ab.Layout.build(ab.Causal(), Q, K, form="tiles", tile=64)
    results = []
    for gpu.batch in (None, 1):
        out, lse = ab.attention(*made, layout, return_lse=True, backend="triton")
        results.append([out, lse, *torch.autograd.grad((out, lse), made, (out, lse))])
    for one, other in itertools.pairwise(results):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("D", "E"), [(1, 3), (80, 96), (128, 128), (256, 256), (200, 40)])
def test_head_sizes(gpu, D, E, dtype):
    for relation in ("scattered", "causal"):
        run(RELATIONS[relation], (1, 2, 1, 97, 129, D, E), dtype=dtype)
    if D == E == 128:
        run(RELATIONS["causal"], (1, 2, 1, 257, 300, D, E), tile=128, dtype=dtype)

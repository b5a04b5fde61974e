"""Long lists cut into parts, in the kernels as compiled: every access in bounds, no race, the same bits."""

import pytest
import torch
from cases.tiles import RELATIONS, check, compute, make_call, make_grads

import attnbias as ab
from attnbias.backends import triton
from attnbias.kernels.launch import split
from attnbias.testing import make_inputs


@pytest.fixture(autouse=True)
def shortest(monkeypatch):
    """Cut the shortest lists."""
    monkeypatch.setattr(split, "SHORTEST", 1)
    monkeypatch.setattr(split, "LEAST", 32)


def joined(gpu):
    return [launch.name for launch in gpu.launches if launch.name in ("merge_kernel", "add_up_kernel")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding(gpu, dtype):
    check(triton, make_call(RELATIONS["full"], (1, 4, 2, 1, 300, 24, 16), sink=True, dtype=dtype))
    assert joined(gpu) == ["merge_kernel"] + ["add_up_kernel"] * 3


def test_some_tiles_are_cut_and_others_not(gpu):
    relation = ab.Global([70]) | (ab.Window(before=9) & ~ab.Window(before=0))
    check(triton, make_call(relation, (1, 2, 1, 257, 257, 16, 16)))
    assert joined(gpu)


def test_bits_do_not_depend_on_what_runs_together(gpu):
    call = make_call(RELATIONS["causal"], (1, 2, 1, 130, 260, 16, 16))
    results = []
    for gpu.batch in (None, 1):
        results.append(compute(triton, call, *make_grads(call)))
    assert joined(gpu)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.odd_problem
@pytest.mark.parametrize("name", ["dropout", "levels", "terms"])
def test_options(gpu, name):
    options = {
        "dropout": {"dropout_p": 0.3, "softcap": 2.0},
        "levels": {"score": ab.MultiLevel([8, 4, 4], [None, 100, 20])},
        "terms": {"terms": [ab.ALiBi(torch.rand(2, requires_grad=True))]},
    }[name]
    given = make_inputs(1, 1, 2, 1, 33, 130, 16, 8, requires_grad=True)
    found = ab.verify(*given, ab.Full(), return_max=True, backend="triton", **options)
    assert found.ok, f"\n{found}"
    assert joined(gpu)


@pytest.mark.slow
def test_decoding_as_shipped(gpu):
    """One query of one head over 32,768 keys: no limit is changed."""
    made = make_inputs(0, 1, 1, 1, 1, 32768, 16, 16, torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "SHORTEST", 2048)
        patch.setattr(split, "LEAST", 256)
        found = ab.verify(*made, ab.Full(), backend="triton")
    assert found.ok, f"\n{found}"
    assert [launch.name for launch in gpu.launches] == ["forward_kernel", "merge_kernel"]

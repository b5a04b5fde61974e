"""Peers compute the same as a case, or give a reason why they cannot run it."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnbias as ab
from attnbias.benchmarks.cases import tokens
from attnbias.benchmarks.measure.race import race
from attnbias.benchmarks.peers import libraries
from attnbias.benchmarks.peers.registry import PEERS
from attnbias.benchmarks.report import tables

SMALL = {
    "full": lambda: tokens.full(96),
    "cross": lambda: tokens.full(96, 32),
    "causal": lambda: tokens.causal(96),
    "window": lambda: tokens.window(96, width=16),
    "documents": lambda: tokens.documents(96, 3),
    "prefix": lambda: tokens.prefix(96),
    "bipartite": lambda: tokens.bipartite(96),
    "chunks": lambda: replace(tokens.chunks(96), relation=ab.Chunks(32), mask_mod=None),
    "dilated": lambda: tokens.dilated(96),
    "bigbird": lambda: tokens.bigbird(256),
    "grid 2": lambda: tokens.neighborhood((8, 12), 2),
    "grid 3": lambda: tokens.neighborhood((4, 5, 6), 1),
    "knn": lambda: tokens.nearest(96),
    "decoding": lambda: tokens.decoding(96),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", SMALL)
def test_case_means_the_same_to_every_peer(name):
    """Its mask_mod and every peer in plain torch agree with the relation."""
    case = SMALL[name]()
    assert case.fault == ""
    if case.mask_mod is not None:
        q, k = torch.arange(case.tokens - case.q_len, case.tokens)[:, None], torch.arange(case.tokens)
        zero = torch.zeros((), dtype=torch.long)
        dense = case.relation.dense(case.q_len, case.tokens, "end")
        assert torch.equal(case.mask_mod(zero, zero, q, k).expand_as(dense), dense)
    names = [peer for peer in PEERS if not peer.startswith("Flex")]
    found = race(case, names, backward=False, rounds=1)
    assert not [why for why in found.refused.values() if "other results" in why or "failed" in why]
    assert len(found.ratios) >= 1


def test_a_peer_with_another_relation_is_not_timed(monkeypatch):
    monkeypatch.setitem(PEERS, "SDPA", lambda case: sdpa)
    found = race(tokens.causal(96), ["SDPA"], backward=False, rounds=1)
    assert found.refused == {"SDPA": "gives other results, so it is not timed"} and not found.ratios


def test_failing_peer_reports_its_error(monkeypatch):
    def fail(case):
        raise RuntimeError("no such kernel\nand a trace")

    monkeypatch.setitem(PEERS, "SDPA", fail)
    found = race(tokens.causal(96), ["SDPA"], backward=False, rounds=1)
    assert found.refused == {"SDPA": "failed: RuntimeError: no such kernel | and a trace"}


def test_peer_that_fails_in_backward_does_not_affect_others(monkeypatch):
    """Only forward passes ran before the timing, so one failing backward pass ended the benchmark."""

    class OnlyForward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return sdpa(q, k, v, is_causal=True)

        @staticmethod
        def backward(ctx, d_out):
            raise RuntimeError("out of shared memory: only 99 KB")

    monkeypatch.setitem(PEERS, "SDPA, mask", lambda case: OnlyForward.apply)
    found = race(tokens.causal(96), ["SDPA, mask", "SDPA"], backward=True, rounds=1, with_memory=True)
    why = "failed: RuntimeError: out of shared memory: only 99 KB"
    assert found.refused == {"SDPA, mask": why}
    assert found.times.keys() == found.bytes.keys() == {"attnbias", "SDPA"}
    assert not tables._is_plain(why)  # it is printed


def _fake_flash():
    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
        rel = ab.Causal() if causal else ab.Full()
        if window_size[0] >= 0:
            rel = rel & ab.Window(before=window_size[0], after=max(window_size[1], 0))
        return ab.attention(*(x.transpose(1, 2) for x in (q, k, v)), rel).transpose(1, 2)

    def flash_attn_varlen_func(q, k, v, starts_q, starts_k, most_q, most_k, causal=False):
        assert starts_q.dtype == torch.int32 and most_q == int(starts_q.diff().max())
        rel = ab.Documents.from_cu_seqlens(starts_q) & ab.Causal()
        return ab.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), rel)[0].transpose(0, 1)

    return types.SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )


def _fake_xformers():
    class Bias:
        def __init__(self, *given):
            self.relation = ab.Window(before=given[0] - 1) if given else ab.Causal()

        @classmethod
        def from_seqlens(cls, lengths):
            made = cls()
            made.relation = ab.Documents.from_lengths(lengths) & ab.Causal()
            return made

    def memory_efficient_attention(q, k, v, attn_bias=None):
        rel = ab.Full() if attn_bias is None else attn_bias.relation
        return ab.attention(*(x.transpose(1, 2) for x in (q, k, v)), rel).transpose(1, 2)

    names = (
        "BlockDiagonalCausalMask",
        "LowerTriangularFromBottomRightLocalAttentionMask",
        "LowerTriangularMask",
    )
    biases = types.SimpleNamespace(**dict.fromkeys(names, Bias))
    ops = types.SimpleNamespace(memory_efficient_attention=memory_efficient_attention)
    return {
        "xformers": types.SimpleNamespace(),
        "xformers.ops": ops,
        "xformers.ops.fmha": types.SimpleNamespace(),
        "xformers.ops.fmha.attn_bias": biases,
    }


def _fake_natten():
    def neighbours(q, k, v, kernel_size):
        grid = tuple(q.shape[1:-2])
        rel = ab.Neighborhood(grid, kernel_size[0] // 2, border="clamp")
        flat = (x.flatten(1, -3).transpose(1, 2) for x in (q, k, v))
        return ab.attention(*flat, rel).transpose(1, 2).reshape(q.shape)

    return types.SimpleNamespace(functional=types.SimpleNamespace(na2d=neighbours, na3d=neighbours))


def _fake_flashinfer():
    def single_prefill_with_kv_cache(q, k, v, causal, window_left):
        rel = ab.Causal() if causal else ab.Full()
        if window_left >= 0:
            rel = rel & ab.Window(before=window_left)
        out = ab.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), rel, q_start="end")
        return out[0].transpose(0, 1)

    return types.SimpleNamespace(single_prefill_with_kv_cache=single_prefill_with_kv_cache)


@pytest.mark.parametrize(
    ("peer", "names"),
    [
        ("flash-attn", ("full", "causal", "window", "documents")),
        ("xFormers", ("full", "causal", "window", "documents")),
        ("NATTEN", ("grid 2", "grid 3")),
        ("flashinfer", ("full", "causal", "window")),
    ],
)
def test_libraries_are_called_as_they_document(monkeypatch, peer, names):
    fakes = {"flash_attn": _fake_flash(), "natten": _fake_natten(), "flashinfer": _fake_flashinfer()}
    for name, fake in {**fakes, **_fake_xformers()}.items():
        monkeypatch.setitem(sys.modules, name, fake)
    for name in names:
        case = replace(SMALL[name](), dtype=torch.bfloat16)
        found = race(case, [peer], backward=False, rounds=1)
        assert found.refused == {peer: "runs only on CUDA devices"}
        with monkeypatch.context() as patch:  # as if the tensors were on a GPU
            patch.setattr(libraries, "is_on_gpu", lambda case: True)
            inputs = case.inputs()
            out = PEERS[peer](case)(*inputs[:3])
            assert (out - case.attend(*inputs[:3])).norm() < 0.02 * out.norm(), name
            with pytest.raises(libraries.CannotRunError, match="only"):
                PEERS[peer](SMALL["knn"]())

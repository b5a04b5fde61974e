"""Peers compute the same as a case, or give a reason why they cannot run it."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnbias as ab
from attnbias.benchmarks.cases import tokens
from attnbias.benchmarks.measure.race import peer_step, race
from attnbias.benchmarks.peers import reasons
from attnbias.benchmarks.peers import sdpa as sdpa_peers
from attnbias.benchmarks.peers.reasons import CannotRunError
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


def _fake_flash(with_lse=False):
    """Flash-attn 2, or 3 and 4, whose results may come with the lse."""

    def give(out):
        return (out, None) if with_lse else out

    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
        rel = ab.Causal() if causal else ab.Full()
        if window_size[0] >= 0:
            rel = rel & ab.Window(before=window_size[0], after=max(window_size[1], 0))
        return give(ab.attention(*(x.transpose(1, 2) for x in (q, k, v)), rel).transpose(1, 2))

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
        assert cu_seqlens_q.dtype == torch.int32 and max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert all(x.is_contiguous() for x in (q, k, v))
        rel = ab.Documents.from_cu_seqlens(cu_seqlens_q) & ab.Causal()
        return give(ab.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), rel)[0].transpose(0, 1))

    return types.SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )


def _fake_cudnn():
    """Endpoints [1, n, B * Q] in a plan, as cuDNN documents; they are read back as ranges."""

    def create_mask_plan(mask_func, q, k, v, build_backward):
        assert mask_func.dtype == torch.int32 and mask_func.is_contiguous() and build_backward
        assert mask_func.shape[1] % 2 == 1 and mask_func.shape[2] == q.shape[0] * q.shape[1]
        return ab.Ranges.from_cudnn(mask_func, batch=q.shape[0])

    def flex_attn_func(q, k, v, *, mask_plan):
        assert all(x.is_contiguous() for x in (q, k, v))
        return ab.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask_plan).transpose(1, 2)

    return types.SimpleNamespace(create_mask_plan=create_mask_plan, flex_attn_func=flex_attn_func)


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


FLASH = ("full", "causal", "window", "documents")
KNOWN = {
    "flash-attn": FLASH,
    "FA3": FLASH,
    "FA4": FLASH,
    "cuDNN Flex": (*FLASH, "cross", "prefix", "bipartite", "chunks", "decoding"),
    "xFormers": FLASH,
    "NATTEN": ("grid 2", "grid 3"),
    "flashinfer": ("full", "causal", "window"),
}
BATCHED = ("flash-attn", "FA3", "FA4", "cuDNN Flex")


@pytest.fixture
def installed(monkeypatch):
    """Install stand-ins for every library."""
    fakes = {
        "flash_attn": _fake_flash(),
        "flash_attn.cute": _fake_flash(with_lse=True),
        "flash_attn_interface": _fake_flash(with_lse=True),
        "cudnn": types.SimpleNamespace(),
        "cudnn.flex_attention": _fake_cudnn(),
        "natten": _fake_natten(),
        "flashinfer": _fake_flashinfer(),
    }
    for name, fake in {**fakes, **_fake_xformers()}.items():
        monkeypatch.setitem(sys.modules, name, fake)


def _on_gpu(monkeypatch, capability=(9, 0)):
    """Take CPU tensors for those of a GPU."""
    monkeypatch.setattr(reasons, "is_on_gpu", lambda case: True)
    monkeypatch.setattr(reasons, "capability", lambda case: capability)


@pytest.mark.parametrize("peer", KNOWN)
def test_libraries_are_called_as_they_document(monkeypatch, installed, peer):
    """They get contiguous [B, N, H, D]: a copy in the call would be timed."""
    for name in KNOWN[peer]:
        case = replace(SMALL[name](), dtype=torch.bfloat16, batch=2 if peer in BATCHED else 1)
        found = race(case, [peer], backward=False, rounds=1)
        assert found.refused == {peer: "runs only on CUDA devices"}
        with monkeypatch.context() as patch:
            _on_gpu(patch)
            peer_step(case, peer, case.inputs(), backward=False)()  # raises for other results
            with pytest.raises(CannotRunError, match="only"):
                PEERS[peer](replace(SMALL["knn"](), dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("peer", "capability", "why"),
    [
        ("FA3", (8, 0), "runs only on sm_90 to sm_99, this is sm_80"),
        ("FA3", (10, 0), "runs only on sm_90 to sm_99, this is sm_100"),
        ("FA4", (8, 9), "runs only on sm_90 or newer, this is sm_89"),
        ("Flex FLASH", (8, 6), "runs only on sm_90 or newer, this is sm_86"),
        ("cuDNN Flex", (12, 0), "runs only on sm_90 to sm_119, this is sm_120"),
        ("SDPA flash", (7, 5), "runs only on sm_80 or newer, this is sm_75"),
    ],
)
def test_peers_name_the_gpu_that_they_need(monkeypatch, installed, peer, capability, why):
    _on_gpu(monkeypatch, capability)
    monkeypatch.setattr(sdpa_peers, "is_on_gpu", lambda case: True)
    with pytest.raises(CannotRunError, match=f"^{why}$"):
        PEERS[peer](replace(tokens.causal(96), dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        ("FA3", "is not installed"),
        ("FA4", "is not installed"),
        ("Flex FLASH", "is not installed"),
        ("cuDNN Flex", "is not installed"),
        ("Flex max-autotune", "runs only on CUDA devices"),
        ("SDPA flash", "runs only on CUDA devices"),
        ("SDPA cuDNN", "runs only on CUDA devices"),
        ("SDPA efficient", "runs only on CUDA devices"),
    ],
)
def test_peers_for_gpus_are_refused_without_one(peer, why):
    found = race(tokens.causal(96), [peer], backward=False, rounds=1)
    assert found.refused == {peer: why}


def test_peers_in_half_precision_refuse_float32(monkeypatch, installed):
    _on_gpu(monkeypatch)
    for peer in ("flash-attn", "FA3", "FA4", "cuDNN Flex", "Flex FLASH", "Flex max-autotune"):
        with pytest.raises(CannotRunError, match=r"^takes only half precision$"):
            PEERS[peer](tokens.causal(96))


def test_cudnn_refuses_rows_of_many_ranges(monkeypatch, installed):
    _on_gpu(monkeypatch)
    start = (8 * torch.arange(9)).expand(96, 9)
    case = replace(tokens.causal(96), relation=ab.Ranges(start, start + 4), dtype=torch.bfloat16)
    with pytest.raises(CannotRunError, match="takes only 8 ranges of keys a query here, which has 9"):
        PEERS["cuDNN Flex"](case)
    predicate = ab.Where(lambda q, k: k <= q)
    with pytest.raises(CannotRunError, match=r"^knows only ranges of keys$"):
        PEERS["cuDNN Flex"](replace(case, relation=predicate))
    with pytest.raises(CannotRunError, match="knows only ranges of keys, not scattered pairs"):
        PEERS["cuDNN Flex"](replace(SMALL["knn"](), dtype=torch.bfloat16))


def test_sdpa_is_called_with_the_kernel_of_its_name(monkeypatch):
    """As dispatched, the quickest of torch's kernels may be missed."""
    chosen = []
    monkeypatch.setattr(sdpa_peers, "is_on_gpu", lambda case: True)
    _on_gpu(monkeypatch)
    monkeypatch.setattr(sdpa_peers, "sdpa_kernel", lambda kernel: nullcontext(chosen.append(kernel.name)))
    plain = torch.nn.functional.scaled_dot_product_attention

    def call(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        chosen.append((k.shape[1], enable_gqa))
        return plain(q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)

    monkeypatch.setattr(sdpa_peers, "scaled_dot_product_attention", call)
    case = replace(tokens.causal(96, heads=8, key_heads=2), dtype=torch.bfloat16)
    for peer in ("SDPA flash", "SDPA cuDNN", "SDPA efficient"):
        peer_step(case, peer, case.inputs(), backward=False)
    flash, efficient = (2, True), (8, False)
    names = ("FLASH_ATTENTION", flash, "CUDNN_ATTENTION", flash, "EFFICIENT_ATTENTION", efficient)
    assert tuple(chosen) == names
    chosen.clear()
    masked = replace(tokens.window(96, width=16, heads=8, key_heads=2), dtype=torch.bfloat16)
    peer_step(masked, "SDPA, mask", masked.inputs(), backward=False)
    assert chosen == [(8, False)]


def test_flex_is_given_its_backend_and_mode(monkeypatch, installed):
    _on_gpu(monkeypatch)
    given = []

    def compiled(function, dynamic=None, mode=None):
        return lambda *inputs, **options: given.append((mode, options.get("kernel_options")))

    monkeypatch.setattr(torch, "compile", compiled)
    case = replace(tokens.causal(96), dtype=torch.bfloat16)
    for peer in ("Flex", "Flex FLASH", "Flex max-autotune"):
        PEERS[peer](case)(*case.inputs()[:3])
    assert given == [(None, None), (None, {"BACKEND": "FLASH"}), ("max-autotune-no-cudagraphs", None)]

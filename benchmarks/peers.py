"""The same attention done by others; a peer that cannot run a case says why, in words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .cases import Attend, Case
from .graph_cases import GraphCase

MOST_PAIRS = 4096 * 4096  # that a peer without sparsity is asked to compute


class CannotRunError(Exception):
    """A peer has no way to compute a case."""


def sdpa(case: Case) -> Attend:
    """Torch's dense kernel, where it knows the relation."""
    if not (case.is_full or case.is_causal):
        raise CannotRunError("knows only full and causal")
    grouped = case.key_heads is not None
    return partial(scaled_dot_product_attention, is_causal=case.is_causal, enable_gqa=grouped)


def sdpa_mask(case: Case) -> Attend:
    """Torch's dense kernel with a boolean mask: every pair is computed."""
    if case.is_full or case.is_causal:
        raise CannotRunError("needs no mask for it")
    if case.q_len * case.tokens > MOST_PAIRS:
        raise CannotRunError(f"computes all {case.q_len * case.tokens:,} pairs, which takes minutes")
    mask = case.relation.dense(case.q_len, case.tokens, "end")
    return partial(scaled_dot_product_attention, attn_mask=mask)


def sdpa_chunks(case: Case, *, keep_mask: bool = False) -> Attend:
    """A window by hand: each chunk of queries with its own and the previous chunk of keys.

    As it is written in models, where the mask is made in the call; ``keep_mask`` makes it once.
    """
    width = case.window
    if not width or case.tokens % width:
        raise CannotRunError("cuts windows into chunks, nothing else")
    count = case.tokens // width

    def make_mask() -> Tensor:
        q, k = torch.arange(width, 2 * width)[:, None], torch.arange(2 * width)
        mask = ((k <= q) & (q - k < width)).repeat(count, 1, 1)  # [count, width, 2 width]
        mask[0, :, :width] = False  # nothing comes before the first chunk
        return mask.repeat(case.heads, 1, 1)[:, None]

    kept = make_mask() if keep_mask else None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        B, H, L, D = query.shape

        def pairs(x: Tensor) -> Tensor:
            chunks = pad(x, (0, 0, width, 0)).unfold(2, 2 * width, width)  # [B, H, count, D, 2 width]
            return chunks.mT.reshape(H * count, 1, 2 * width, D)

        queries = query.reshape(H * count, 1, width, D)
        mask = make_mask() if kept is None else kept
        out = scaled_dot_product_attention(queries, pairs(key), pairs(value), attn_mask=mask)
        return out.reshape(B, H, L, D)

    return attend


def sdpa_documents(case: Case) -> Attend:
    """A Python loop over the documents, each one causal call."""
    if not case.documents:
        raise CannotRunError("loops over documents, and there are none")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(x.split(case.documents, dim=2) for x in (query, key, value)), strict=True)
        outs = [scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts]
        return torch.cat(outs, dim=2)

    return attend


def gather(case: Case) -> Attend:
    """Gather the neighbours' keys and values, then a dense softmax; takes and gives [1, N, H, D]."""
    index = case.neighbours
    if index is None:
        raise CannotRunError("needs the same number of neighbours for every query")
    scale = case.size**-0.5

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.einsum("nhd,nkhd->nhk", query[0], key[0][index]) * scale
        return torch.einsum("nhk,nkhd->nhd", scores.softmax(-1), value[0][index])[None]

    return attend


def flex(case: Case, block: int = 128) -> Attend:
    """FlexAttention compiled: on CPUs forward only."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Anew for each case: past eight of them torch.compile would give up and run it in eager, pair by pair.
    torch._dynamo.reset()
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)

    mask_mod = case.mask_mod
    if case.neighbours is not None:
        table = case.relation.dense(case.q_len, case.tokens)
        mask_mod = lambda b, h, q, k: table[q, k]  # noqa: E731
    if mask_mod is None and not case.is_full:
        raise CannotRunError("has no mask_mod for it")
    if not mask_mod:
        return compiled
    mask = create_block_mask(mask_mod, None, None, case.q_len, case.tokens, device="cpu", BLOCK_SIZE=block)
    return partial(compiled, block_mask=mask)


def pyg(case: Case) -> Attend:
    """TransformerConv of PyG without its linear layers: gather, softmax, scatter; takes [1, N, H, D]."""
    if not isinstance(case, GraphCase):
        raise CannotRunError("knows only graphs")
    if not find_spec("torch_geometric"):
        raise CannotRunError("torch_geometric is not installed")
    from torch_geometric.nn import TransformerConv

    layer = TransformerConv(case.size, case.size, heads=case.heads)
    edge_index = case.edge_index

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = layer.propagate(edge_index, query=query[0], key=key[0], value=value[0], edge_attr=None)
        return out[None]

    return attend


def torch_sparse(case: Case) -> Attend:
    """Torch's sparse products and a softmax by scattering, head by head; takes dense heads [1, H, N, D]."""
    if not isinstance(case, GraphCase):
        raise CannotRunError("knows only graphs")
    nodes = case.tokens
    key, query = case.edge_index[:, case.edge_index[1].argsort(stable=True)]
    ptr = torch.searchsorted(query.contiguous(), torch.arange(nodes + 1))
    pattern = torch.sparse_csr_tensor(ptr, key.contiguous(), torch.zeros(len(key)), (nodes, nodes))
    scale = case.size**-0.5

    def softmax(scores: Tensor) -> Tensor:
        most = scores.new_full((nodes,), -torch.inf).scatter_reduce_(0, query, scores, "amax")
        weights = torch.exp(scores - most[query])
        return weights / scores.new_zeros(nodes).index_add_(0, query, weights)[query]

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.sparse.sampled_addmm(pattern, q, k.T, beta=0.0, alpha=scale)
        weights = softmax(scores.values())
        return torch.sparse_csr_tensor(ptr, pattern.col_indices(), weights, (nodes, nodes)) @ v

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.stack([head(*each) for each in zip(query[0], key[0], value[0], strict=True)])[None]

    return attend


PEERS: dict[str, Callable[[Case], Attend]] = {
    "SDPA": sdpa,
    "SDPA, mask": sdpa_mask,
    "SDPA, chunks": sdpa_chunks,
    "SDPA, chunks, mask kept": partial(sdpa_chunks, keep_mask=True),
    "SDPA, loop": sdpa_documents,
    "gather": gather,
    "Flex": flex,
    "Flex 64": partial(flex, block=64),
    "PyG": pyg,
    "torch.sparse": torch_sparse,
}
FORWARD_ONLY = ("Flex", "Flex 64", "torch.sparse")
BY_NODE = ("gather", "PyG")  # takes [B, N, H, D]
BY_HEAD = ("torch.sparse",)  # takes [B, H, N, D], each head dense

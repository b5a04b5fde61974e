"""Peers made of torch and PyG, and the table of all; one that cannot run a case raises with a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..cases.graphs import GraphCase
from ..cases.tokens import Attend, Case
from . import masks
from .libraries import LIBRARIES, CannotRunError

__all__ = ["BY_HEAD", "BY_NODE", "DENSE", "FORWARD_ONLY", "PEERS", "CannotRunError"]

# Most pairs that a peer without sparsity is given, by type of device.
MOST_PAIRS = {"cpu": 4096 * 4096, "cuda": 16384 * 16384}


def sdpa(case: Case) -> Attend:
    """Call torch's dense kernel, for the masks that it knows."""
    if not (masks.is_full(case) or masks.is_causal(case)):
        raise CannotRunError("knows only full and causal")
    return partial(
        scaled_dot_product_attention, is_causal=masks.is_causal(case), enable_gqa=case.key_heads is not None
    )


def sdpa_dense(case: Case) -> Attend:
    """Call torch's dense kernel without a mask, as if the relation were dropped."""
    if masks.is_full(case):
        raise CannotRunError("is SDPA itself here")
    _check_pairs(case)
    return partial(scaled_dot_product_attention, enable_gqa=case.key_heads is not None)


def sdpa_mask(case: Case) -> Attend:
    """Call torch's dense kernel with a mask: every pair is computed.

    The mask holds 0 and -inf, which torch's CPU kernels read faster than booleans.
    """
    if masks.is_full(case) or masks.is_causal(case):
        raise CannotRunError("needs no mask for it")
    _check_pairs(case)
    related = case.relation.dense(case.q_len, case.tokens, "end")
    mask = torch.zeros(related.shape, dtype=case.dtype).masked_fill(~related, -torch.inf)
    grouped = case.key_heads is not None
    return partial(scaled_dot_product_attention, attn_mask=mask.to(case.device), enable_gqa=grouped)


def _check_pairs(case: Case) -> None:
    pairs = case.q_len * case.tokens
    if pairs > MOST_PAIRS[torch.device(case.device).type]:
        raise CannotRunError(f"computes all {pairs:,} pairs, which takes too long")


def sdpa_cut(case: Case) -> Attend:
    """Call torch's dense kernel on the blocks of a relation."""
    size, split = masks.chunk(case), masks.split(case)
    if size and case.tokens % size == 0:
        return partial(_cut_chunks, size)
    if split:
        return partial(_cut_halves, split, case.key_heads is not None)
    raise CannotRunError("cuts only chunks and two halves")


def _cut_chunks(size: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    B, H, L, D = query.shape
    share = H // key.shape[1]
    if share > 1:
        key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    q, k, v = (x.reshape(B, H * (L // size), size, D) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v).reshape(B, H, L, D)


def _cut_halves(split: int, grouped: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = scaled_dot_product_attention(
        query[:, :, split:], key[:, :, :split], value[:, :, :split], enable_gqa=grouped
    )
    return pad(out, (0, 0, split, 0))


def sdpa_chunks(case: Case, *, keep_mask: bool = False) -> Attend:
    """Compute a window by hand: each chunk of queries with its own and the previous chunk of keys.

    Models write it like this, with a new mask in every call; ``keep_mask`` makes it once.
    """
    width, device = masks.window(case), case.device
    if case.key_heads is not None or case.batch > 1:
        raise CannotRunError("needs a batch of one whose heads have their own keys")
    if not width or case.tokens % width:
        raise CannotRunError("cuts only windows into chunks")
    count = case.tokens // width

    def make_mask() -> Tensor:
        q = torch.arange(width, 2 * width, device=device)[:, None]
        k = torch.arange(2 * width, device=device)
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
    """Loop over the documents, one causal call each."""
    documents = masks.documents(case)
    if not documents:
        raise CannotRunError("loops only over documents")
    call = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=case.key_heads is not None)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(x.split(documents, dim=2) for x in (query, key, value)), strict=True)
        return torch.cat([call(q, k, v) for q, k, v in parts], dim=2)

    return attend


def gather(case: Case) -> Attend:
    """Gather the neighbours' keys and values, then a dense softmax; takes and gives [1, N, H, D]."""
    listed = masks.neighbours(case)
    if listed is None or case.batch > 1 or case.key_heads is not None:
        raise CannotRunError("needs the same number of neighbours for every query of one batch element")
    scale, index = case.size**-0.5, listed.to(case.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.einsum("nhd,nkhd->nhk", query[0], key[0][index]) * scale
        return torch.einsum("nhk,nkhd->nhd", scores.softmax(-1), value[0][index])[None]

    return attend


def flex(case: Case, block: int = 128) -> Attend:
    """Compile FlexAttention; on CPUs it has only a forward pass."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Compile again for each case: after eight, torch.compile would fall back to eager, pair by pair.
    torch._dynamo.reset()
    compiled: Callable[..., Tensor] = partial(
        torch.compile(flex_attention, dynamic=False), enable_gqa=case.key_heads is not None
    )
    mask_mod = case.mask_mod
    if masks.neighbours(case) is not None:
        table = case.relation.dense(case.q_len, case.tokens).to(case.device)
        mask_mod = lambda b, h, q, k: table[q, k]  # noqa: E731
    if mask_mod is None and not masks.is_full(case):
        raise CannotRunError("has no mask_mod for it")
    if not mask_mod:
        return compiled
    # On a GPU, compile this too, as its documentation advises: eager code would make every pair in memory.
    make = torch.compile(create_block_mask) if case.device != "cpu" else create_block_mask
    mask = make(mask_mod, None, None, case.q_len, case.tokens, device=case.device, BLOCK_SIZE=block)
    return partial(compiled, block_mask=mask)


def _edges(case: Case) -> Tensor:
    """Return sources and targets [2, E] of a graph or of lists of neighbours."""
    if case.batch > 1 or case.key_heads is not None:
        raise CannotRunError("takes one graph, whose heads have their own keys")
    if isinstance(case, GraphCase):
        return case.edge_index
    listed = masks.neighbours(case)
    if listed is None:
        raise CannotRunError("knows only graphs")
    target = torch.arange(case.tokens).repeat_interleave(listed.shape[1])
    return torch.stack((listed.reshape(-1), target))


def pyg(case: Case) -> Attend:
    """Call PyG's TransformerConv without its linear layers: gather, softmax, scatter; takes [1, N, H, D]."""
    edge_index = _edges(case).to(case.device)
    if not find_spec("torch_geometric"):
        raise CannotRunError("is not installed")
    from torch_geometric.nn import TransformerConv

    layer = TransformerConv(case.size, case.size, heads=case.heads)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = layer.propagate(edge_index, query=query[0], key=key[0], value=value[0], edge_attr=None)
        return out[None]

    return attend


def torch_sparse(case: Case) -> Attend:
    """Use torch's sparse products and a softmax by scattering, per head; takes dense heads [1, H, N, D]."""
    if case.device != "cpu":
        raise CannotRunError("runs only on CPUs")
    nodes, edge_index = case.tokens, _edges(case)
    column, row = (x.contiguous() for x in edge_index[:, edge_index[1].argsort(stable=True)])
    ptr, scale = torch.searchsorted(row, torch.arange(nodes + 1)), case.size**-0.5

    def matrix(values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(ptr, column, values, (nodes, nodes), check_invariants=False)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        pattern = matrix(torch.zeros(len(column)))

    def softmax(scores: Tensor) -> Tensor:
        most = scores.new_full((nodes,), -torch.inf).scatter_reduce_(0, row, scores, "amax")
        weights = torch.exp(scores - most[row])
        return weights / scores.new_zeros(nodes).index_add_(0, row, weights)[row]

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.sparse.sampled_addmm(pattern, q, k.T, beta=0.0, alpha=scale)
        return matrix(softmax(scores.values())) @ v

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.stack([head(*each) for each in zip(query[0], key[0], value[0], strict=True)])[None]

    return attend


PEERS: dict[str, Callable[[Case], Attend]] = {
    "SDPA": sdpa,
    "SDPA, mask": sdpa_mask,
    "SDPA, chunks": sdpa_chunks,
    "SDPA, chunks, mask kept": partial(sdpa_chunks, keep_mask=True),
    "SDPA, loop": sdpa_documents,
    "SDPA, cut": sdpa_cut,
    "SDPA, all pairs": sdpa_dense,
    "gather": gather,
    "PyG": pyg,
    "Flex": flex,
    "Flex 64": partial(flex, block=64),
    "torch.sparse": torch_sparse,
    **LIBRARIES,
}
DENSE = "SDPA, all pairs"  # a bound, not a peer: it computes something else
# By type of device.
FORWARD_ONLY = {"Flex": "cpu", "Flex 64": "cpu", "torch.sparse": "cpu", "flashinfer": "cuda"}
BY_NODE = ("gather", "PyG")  # take [B, N, H, D]
BY_HEAD = ("torch.sparse",)  # takes [B, H, N, D], each head dense

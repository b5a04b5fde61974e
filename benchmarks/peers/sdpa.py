"""Torch's dense kernels: as dispatched, by name, with a mask, and on parts cut out by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from ..cases.tokens import Attend, Case
from . import masks
from .reasons import CannotRunError, check_device, is_on_gpu

# Most pairs that a peer without sparsity is given, by type of device.
MOST_PAIRS = {"cpu": 4096 * 4096, "cuda": 16384 * 16384}


def sdpa(case: Case) -> Attend:
    """Call torch's dense kernel, for the masks that it knows."""
    if not (masks.is_full(case) or masks.is_causal(case)):
        raise CannotRunError("knows only full and causal")
    return partial(
        scaled_dot_product_attention, is_causal=masks.is_causal(case), enable_gqa=case.key_heads is not None
    )


def sdpa_by(case: Case, backend: SDPBackend) -> Attend:
    """Call one of torch's kernels for GPUs; its choice of one is a rule, not a measurement."""
    if not is_on_gpu(case):
        raise CannotRunError("runs only on CUDA devices")
    attend = sdpa(case)
    if backend == SDPBackend.EFFICIENT_ATTENTION:  # it does not take shared key heads
        attend = partial(scaled_dot_product_attention, is_causal=masks.is_causal(case))
        attend = partial(_with_keys_for_all, attend)
    else:
        check_device(case)

    def only(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return attend(query, key, value)

    return only


def sdpa_dense(case: Case) -> Attend:
    """Call torch's dense kernel without a mask, as if the relation were dropped."""
    if masks.is_full(case):
        raise CannotRunError("is SDPA itself here")
    _check_pairs(case)
    return partial(scaled_dot_product_attention, enable_gqa=case.key_heads is not None)


def sdpa_mask(case: Case) -> Attend:
    """Call torch's dense kernel with a mask: every pair is computed.

    The mask holds 0 and -inf, which torch's CPU kernels read faster than booleans. On a GPU no fused kernel
    takes a mask with shared key heads, so each query head gets its own copy of its keys.
    """
    if masks.is_full(case) or masks.is_causal(case):
        raise CannotRunError("needs no mask for it")
    _check_pairs(case)
    related = case.relation.dense(case.q_len, case.tokens, "end")
    mask = torch.zeros(related.shape, dtype=case.dtype).masked_fill(~related, -torch.inf).to(case.device)
    if is_on_gpu(case):
        return partial(_with_keys_for_all, partial(scaled_dot_product_attention, attn_mask=mask))
    return partial(scaled_dot_product_attention, attn_mask=mask, enable_gqa=case.key_heads is not None)


def _with_keys_for_all(call: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Copy shared key heads to each of their query heads, then call."""
    share = query.shape[1] // key.shape[1]
    if share > 1:
        key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    return call(query, key, value)


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

    def by_chunk(*given: Tensor) -> Tensor:
        q, k, v = (x.reshape(B, H * (L // size), size, D) for x in given)
        return scaled_dot_product_attention(q, k, v).reshape(B, H, L, D)

    return _with_keys_for_all(by_chunk, query, key, value)


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

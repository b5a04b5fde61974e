"""FlexAttention: by default, on the kernels of FlashAttention 4, and tuned by torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..cases.tokens import Attend, Case
from . import masks
from .reasons import CannotRunError, check_device, load


def flex_flash(case: Case) -> Attend:
    """Compile FlexAttention for FlashAttention 4, which takes its mask and its lists of blocks."""
    load(case, "flash_attn.cute", least=90)
    return flex(case, kernel_options={"BACKEND": "FLASH"})


def flex_tuned(case: Case) -> Attend:
    """Let torch measure configurations of FlexAttention, which takes minutes."""
    check_device(case)
    return flex(case, mode="max-autotune-no-cudagraphs")


def flex(case: Case, block: int = 128, mode: str | None = None, **options: Any) -> Attend:
    """Compile FlexAttention, with its mask made before; on CPUs it has only a forward pass."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Compile again for each case: after eight, torch.compile would fall back to eager, pair by pair.
    torch._dynamo.reset()
    compiled: Callable[..., Tensor] = partial(
        torch.compile(flex_attention, dynamic=False, mode=mode),
        enable_gqa=case.key_heads is not None,
        **options,
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

"""The same work done by others."""

from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from .cases import NODES


def block_mask(tokens: int) -> BlockMask:
    """Build FlexAttention's mask for ``Causal() & Window(before=255)``, by its default."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k <= 255)

    return create_block_mask(mask_mod, None, None, tokens, tokens, device="cpu")


def csr_both_ways(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Sort edges by target, then by source, with the edge's number as value.

    The transpose is taken from the first result, which is quicker than sorting the edges again.
    """
    from scipy.sparse import coo_matrix

    number = np.arange(len(source), dtype=np.int32)
    by_target = coo_matrix((number, (target, source)), shape=(NODES, NODES)).tocsr()
    return by_target, by_target.T.tocsr()

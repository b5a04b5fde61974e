"""The five classes of appendix B of "Relational inductive biases on attention mechanisms", as printed there.

They have the appendix's names, arguments and parameters, so its state dicts load, and return ``(h, att)``:
the new tokens and the weights of all pairs. Two differences are deliberate:

- A token without neighbours gets zeros, and its weights are zeros, as Lemma 1 of the paper says. The appendix
  gives it the mean of all tokens.
- An unrelated score is -inf, not -1e9, so float16 works, and scores below -1e9 do not reach other tokens.

Tokens are ``[n, d_model]`` or ``[B, n, d_model]``. The same mechanisms with heads, score terms and without
the dense weights are in ``attnbias.nn``. There ``SparseAttention`` takes any relation, and the appendix's
class of this name is ``StridedAttention`` with ``p = stride - 1``.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..arguments import as_count
from ..attention import attention
from ..op.weights import attention_weights
from ..relations import Causal, Full, Graph, Relation, Window

__all__ = ["EncDecAttention", "GraphAttention", "MaskAttention", "SelfAttention", "SparseAttention"]


class _Listed(nn.Module):
    """The part that the listings share: three matrices, one head, weights of all pairs."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.Q = nn.Linear(d_model, d_model, bias=False)
        self.K = nn.Linear(d_model, d_model, bias=False)
        self.V = nn.Linear(d_model, d_model, bias=False)

    def _attend(self, x: Tensor, memory: Tensor, relation: Relation) -> tuple[Tensor, Tensor]:
        query, key, value = (each.unsqueeze(-3) for each in (self.Q(x), self.K(memory), self.V(memory)))
        h, att = attention(query, key, value, relation), attention_weights(query, key, relation)
        return h.squeeze(-3), att.squeeze(-3)


class SelfAttention(_Listed):
    """Every token attends to every token (B.1).

    Args:
        d_model: features per token.

    Example:
        >>> import torch
        >>> h, att = SelfAttention(8)(torch.randn(5, 8))
        >>> h.shape, att.shape
        (torch.Size([5, 8]), torch.Size([5, 5]))
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new tokens and the weights."""
        return self._attend(x, x, Full())


class MaskAttention(_Listed):
    """Each token attends to itself and all before it (B.2). Arguments as in :class:`SelfAttention`."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new tokens and the weights."""
        return self._attend(x, x, Causal())


class EncDecAttention(_Listed):
    """Each decoder token attends to all encoder tokens (B.3). Arguments as in :class:`SelfAttention`."""

    def forward(self, x: Tensor, encoder: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new tokens of the decoder and their weights over those of the encoder."""
        return self._attend(x, encoder, Full())


class SparseAttention(_Listed):
    """Each token attends to itself and those before it, ``stride`` tokens in all (B.4, stride attention).

    Args:
        d_model: features per token.
        stride: keys of a token, at least 1; Definition 8 counts ``stride - 1`` previous ones.
    """

    def __init__(self, d_model: int, stride: int = 3) -> None:
        super().__init__(d_model)
        self.stride = as_count("stride", stride, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new tokens and the weights."""
        return self._attend(x, x, Window(before=self.stride - 1))


class GraphAttention(_Listed):
    """Each node attends to its neighbours in a graph that is passed to each call (B.5).

    Arguments as in :class:`SelfAttention`.

    Example:
        >>> import torch
        >>> ring = torch.tensor([[0, 1, 0], [0, 0, 1], [1, 0, 0]])
        >>> h, att = GraphAttention(8)(torch.randn(3, 8), ring)
        >>> bool((att == ring).all())  # one neighbour each
        True
    """

    def forward(self, x: Tensor, adj: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new nodes and the weights.

        Args:
            x: nodes.
            adj: [n, n], the row is the query; what is not zero is an edge.
        """
        return self._attend(x, x, Graph.from_adjacency(adj))

"""The attention mechanisms of "Relational inductive biases on attention mechanisms", by their names there.

Each is ``RelationalAttention`` with a relation. With one head they compute what the paper's appendix does,
but for three differences: ``StridedAttention`` counts the previous tokens as Definition 8 does (the
appendix's ``stride=s`` is ``p = s - 1``), a token without neighbours gets zeros, not the mean of all tokens,
and a score outside the relation is -inf, not -1e9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from torch import Tensor

from ..arguments import as_flag
from ..layouts.layout import Layout
from ..relations import Causal, Full, Relation, Window
from ..terms import Term
from .relational import RelationalAttention


class SelfAttention(RelationalAttention):
    """Every token attends to every token: the complete graph (BERT).

    Args:
        d_model: features of a token.
        heads: attentions side by side.
        **options: those of :class:`RelationalAttention`.
    """

    def __init__(self, d_model: int, heads: int = 1, **options: Any) -> None:
        super().__init__(d_model, heads, Full(), **options)


class MaskedAttention(RelationalAttention):
    """A token attends to itself and all before it: a total order (GPT).

    Args:
        d_model: features of a token.
        heads: attentions side by side.
        **options: those of :class:`RelationalAttention`.
    """

    def __init__(self, d_model: int, heads: int = 1, **options: Any) -> None:
        super().__init__(d_model, heads, Causal(), **options)


class StridedAttention(RelationalAttention):
    """A token attends to itself and the ``p`` before it (Definition 8).

    Args:
        d_model: features of a token.
        p: previous tokens, so that a token has ``p + 1`` keys; the appendix's ``stride=s`` is ``p = s - 1``.
        heads: attentions side by side.
        **options: those of :class:`RelationalAttention`.

    Example:
        >>> StridedAttention(8, p=2).relation
        Window(before=2)
    """

    def __init__(self, d_model: int, p: int, heads: int = 1, **options: Any) -> None:
        super().__init__(d_model, heads, Window(before=p), **options)


class SparseAttention(RelationalAttention):
    """A token attends to those that a relation names (Unlimiformer: its nearest keys).

    Args:
        d_model: features of a token.
        relation: which token attends to which.
        heads: attentions side by side.
        **options: those of :class:`RelationalAttention`.
    """

    def __init__(self, d_model: int, relation: Relation, heads: int = 1, **options: Any) -> None:
        super().__init__(d_model, heads, relation, **options)


class EncoderDecoderAttention(RelationalAttention):
    """Tokens of a decoder attend to all of an encoder: a complete bipartite graph (T5).

    Call it as ``layer(decoder, encoder)``.

    Args:
        d_model: features of a token.
        heads: attentions side by side.
        **options: those of :class:`RelationalAttention`.
    """

    def __init__(self, d_model: int, heads: int = 1, **options: Any) -> None:
        super().__init__(d_model, heads, Full(), **options)

    def forward(self, x: Tensor, memory: Tensor | None = None, **options: Any) -> Any:
        """See :class:`RelationalAttention`; ``memory`` is the encoder's.

        Raises:
            TypeError: without ``memory``.
        """
        if memory is None:
            raise TypeError("memory: wanted the encoder's tokens, got None")
        return super().forward(x, memory, **options)


class GraphAttention(RelationalAttention):
    """A node attends to its neighbours in a graph that comes with each call; scores are dot products.

    (For the additive scores of Velickovic et al. give ``attention`` its ``score``.) Self-loops are not added.

    Args:
        d_model: features of a node.
        heads: attentions side by side.
        **options: those of :class:`RelationalAttention`.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> ring = ab.Graph([[0, 1, 2], [1, 2, 0]], num_nodes=3)
        >>> GraphAttention(8)(torch.randn(3, 8), ring).shape
        torch.Size([3, 8])
    """

    def __init__(self, d_model: int, heads: int = 1, **options: Any) -> None:
        super().__init__(d_model, heads, **options)

    @overload  # type: ignore[override]  # the second argument is the graph: there is no memory
    def forward(
        self,
        x: Tensor,
        relation: Relation | Layout | None = ...,
        *,
        terms: Sequence[Term] = ...,
        return_weights: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        relation: Relation | Layout | None = ...,
        *,
        terms: Sequence[Term] = ...,
        return_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...
    def forward(
        self,
        x: Tensor,
        relation: Relation | Layout | None = None,
        *,
        terms: Sequence[Term] = (),
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend along the edges.

        Args:
            x: nodes, [n, d_model] or [B, n, d_model].
            relation: a Graph; a 0/1 adjacency matrix (row = query) is ``Dense(matrix != 0)``. None is the
                one that the layer was made with.
            terms: score terms, such as an ``EdgeBias``.
            return_weights: return the weights too; dense, so for small graphs (else ``edge_weights``).

        Raises:
            TypeError: if there is no graph.
        """
        if relation is None and self.relation is None:
            raise TypeError("relation: wanted a graph, got None; Full() relates all nodes")
        if as_flag("return_weights", return_weights):
            return super().forward(x, relation=relation, terms=terms, return_weights=True)
        return super().forward(x, relation=relation, terms=terms)

"""The attention mechanisms of "Relational inductive biases on attention mechanisms", by their names there.

Each is ``RelationalAttention`` with a fixed relation, and takes its other arguments. With one head it
computes what the paper's appendix does, with three differences: ``StridedAttention`` counts previous tokens
as Definition 8 does (the appendix's ``stride=s`` is ``p = s - 1``); a token without neighbours gets zeros,
not the mean of all tokens; a score outside the relation is -inf, not -1e9. The appendix's own classes
are in ``attnbias.nn.appendix``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..layouts.layout import Layout
from ..relations import Causal, Full, Relation, Window
from ..scores.terms import Term
from ..sharding import Shard
from .relational import RelationalAttention

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class SelfAttention(RelationalAttention):
    """Every token attends to every token: the complete graph (BERT). Arguments as in the base class.

    Example:
        >>> SelfAttention(8).relation
        Full()
    """

    def __init__(self, d_model: int, heads: int = 1, **options: Any) -> None:
        super().__init__(d_model, heads, Full(), **options)


class MaskedAttention(RelationalAttention):
    """Each token attends to itself and all before it: a total order (GPT). Arguments as in the base class.

    Example:
        >>> MaskedAttention(8).relation
        Causal()
    """

    def __init__(self, d_model: int, heads: int = 1, **options: Any) -> None:
        super().__init__(d_model, heads, Causal(), **options)


class StridedAttention(RelationalAttention):
    """Each token attends to itself and to the ``p`` tokens before it (Definition 8).

    Args:
        p: previous tokens; a token has ``p + 1`` keys. The appendix's ``stride=s`` is ``p = s - 1``.
            Other arguments are as in the base class.

    Example:
        >>> StridedAttention(8, p=2).relation
        Window(before=2)
    """

    def __init__(self, d_model: int, p: int, heads: int = 1, **options: Any) -> None:
        super().__init__(d_model, heads, Window(before=p), **options)


class SparseAttention(RelationalAttention):
    """Each token attends to the tokens that a relation names (Unlimiformer: its nearest keys).

    Args:
        relation: which token attends to which. Other arguments are as in the base class.

    Example:
        >>> import attnbias as ab
        >>> SparseAttention(8, ab.Dilated(2, before=4)).relation
        Dilated(dilation=2, before=4)
    """

    def __init__(self, d_model: int, relation: Relation, heads: int = 1, **options: Any) -> None:
        super().__init__(d_model, heads, relation, **options)


class EncoderDecoderAttention(RelationalAttention):
    """Each decoder token attends to all encoder tokens: a complete bipartite graph (T5).

    Call it as ``layer(decoder, encoder)``. Arguments are as in the base class.

    Example:
        >>> import torch
        >>> EncoderDecoderAttention(8)(torch.randn(3, 8), torch.randn(5, 8)).shape
        torch.Size([3, 8])
    """

    def __init__(self, d_model: int, heads: int = 1, **options: Any) -> None:
        super().__init__(d_model, heads, Full(), **options)

    def forward(self, x: Tensor, memory: Tensor | None = None, **options: Any) -> Any:
        """Attend from decoder tokens ``x`` to encoder tokens ``memory``; see :class:`RelationalAttention`.

        Raises:
            TypeError: without ``memory``.
        """
        if memory is None:
            raise TypeError("memory: wanted the encoder's tokens, got None")
        return super().forward(x, memory, **options)


class GraphAttention(RelationalAttention):
    """Each node attends to its neighbours in a graph that is passed to each call; scores are dot products.

    For the additive scores of Velickovic et al. use ``attention`` with ``score=AdditiveScore(...)``.
    Self-loops are not added. Arguments are as in the base class.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> ring = ab.Graph([[0, 1, 2], [1, 2, 0]], num_nodes=3)
        >>> GraphAttention(8)(torch.randn(3, 8), ring).shape
        torch.Size([3, 8])
    """

    def __init__(self, d_model: int, heads: int = 1, **options: Any) -> None:
        super().__init__(d_model, heads, **options)

    def forward(  # type: ignore[override]  # the second argument is the graph, not memory
        self,
        x: Tensor,
        relation: Relation | Layout | Shard | None = None,
        *,
        terms: Sequence[Term] = (),
        return_weights: bool = False,
        mesh: DeviceMesh | ProcessGroup | None = None,
        length: int | tuple[int, int] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend along the edges.

        Args:
            x: nodes, [n, d_model] or [B, n, d_model].
            relation: a Graph; of an adjacency matrix (row = query) it is ``Graph.from_adjacency(matrix)``.
                None uses the relation that the layer was made with.
            terms: score terms, such as an ``EdgeBias``.
            return_weights: also return the weights, as a dense matrix; for large graphs use ``edge_weights``.
            mesh: as in the base class.
            length: as in the base class.

        Raises:
            TypeError: if there is no graph.
        """
        if relation is None and self.relation is None:
            raise TypeError("relation: wanted a graph, got None; Full() relates all nodes")
        return super().forward(
            x, relation=relation, terms=terms, return_weights=return_weights, mesh=mesh, length=length
        )

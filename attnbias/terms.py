"""Score terms: what is added to the score of a related pair."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Term(Protocol):
    """A relation that is not binary: a number for each related pair, added to its score.

    With ``s = softcap(scale * q @ k)`` the score of a pair is ``s`` plus the value of every term.
    -inf removes the pair. A term that holds tensors gets their gradients through ``value``.

    Example:
        >>> import torch
        >>> class Distance:
        ...     def value(self, b, h, q, k):
        ...         return -0.5 * (q - k).abs()
        >>> isinstance(Distance(), Term)
        True
        >>> Distance().value(0, 0, torch.tensor([[3], [4]]), torch.tensor([[2, 3]]))
        tensor([[-0.5000, -0.0000],
                [-1.0000, -0.5000]])
    """

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the term's value at pairs given by index.

        Args:
            b: batch index, int64; ``b, h, q, k`` broadcast together.
            h: query head, int64.
            q: query position (row + q_start), int64.
            k: key position, int64.

        Returns:
            Floating point, of a shape that broadcasts to that of ``b, h, q, k`` together.
        """
        ...

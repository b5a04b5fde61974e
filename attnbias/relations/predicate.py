"""Relations given by a function or by a boolean tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import check_dense
from ..sets.bound import MOST_PER_ROW, Bound, Place
from ..sets.intervals import Intervals, make_groups
from .pointwise import is_elementwise, map_pairs, reads_index
from .relation import Relation
from .tables import Tabled
from .value import hashable


class Where(Relation):
    """Pairs for which a function of positions is true.

    Args:
        fn: ``fn(q, k)``, or a FlexAttention ``mask_mod(b, h, q, k)``: a boolean for one pair of positions,
            each an int64 scalar. It is called for whole tiles at once: on tensors that broadcast together if
            it consists of elementwise operations and look-ups (``ids[q] == ids[k]``), else under
            ``torch.vmap``, as FlexAttention does. Every pair is tested: prefer a named relation that fits.

    Example:
        >>> import attnbias as ab
        >>> print(ab.Where(lambda q, k: (q - k) % 3 == 0).picture(3, 6))
        #..#..
        .#..#.
        ..#..#
    """

    fn: Callable[..., Tensor]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"fn: wanted a function of (q, k) or (b, h, q, k), got {self.fn!r}")
        if self._arity not in (2, 4):
            raise TypeError(f"fn: wanted 2 or 4 arguments, (q, k) or (b, h, q, k), got {self._arity}")
        super().__post_init__()

    @property
    def _arity(self) -> int:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        try:
            parameters = inspect.signature(self.fn).parameters.values()
        except ValueError:
            raise TypeError(
                f"fn: wanted a Python function of (q, k) or (b, h, q, k), got {self.fn!r}"
            ) from None
        return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)

    @property
    def batch_size(self) -> int | None:
        return 1 if self._arity == 2 else None

    @property
    def head_count(self) -> int | None:
        return self.batch_size

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        index = [zero if x is None else x for x in (b, h, q, k)][-self._arity :]
        is_elementwise, *reads = self._kind(q.device)
        if is_elementwise:
            result = self.fn(*index)
        else:
            index = [x if read else zero for x, read in zip(index, reads, strict=True)]
            result = map_pairs(self.fn, *index)
        if not isinstance(result, Tensor) or result.dtype != torch.bool:
            raise TypeError(f"fn: wanted a boolean tensor, got {getattr(result, 'dtype', result)!r}")
        # A function may ignore an argument; the result has to span all pairs.
        return result & torch.ones_like(q + k, dtype=torch.bool)

    def _kind(self, device: torch.device) -> tuple[bool, ...]:
        """Return whether ``fn`` is elementwise and, if it is not, which of its arguments it reads."""
        known: tuple[bool, ...] | None = self.__dict__.get("_kind_")
        if known is None:
            if torch.compiler.is_compiling():  # which cannot watch a function: right in any case
                return False, *[True] * self._arity
            if is_elementwise(self.fn, self._arity, device):
                known = (True,)
            else:
                before = range(self._arity - 2)  # batch and head: who reads them makes a group for each
                known = False, *(reads_index(self.fn, i, self._arity, device) for i in before), True, True
            object.__setattr__(self, "_kind_", known)
        return known

    @property
    def _content(self) -> Any:
        return Where, hashable(self.fn)

    def __repr__(self) -> str:
        return f"Where({getattr(self.fn, '__qualname__', type(self.fn).__name__)})"  # dynamo traces no more


class Dense(Tabled):
    """A boolean tensor, True where the query may attend to the key.

    Args:
        mask: [Q, K], [H, Q, K] or [B, H, Q, K] (B and H may be 1).

    Example:
        >>> import torch
        >>> print(Dense(torch.tensor([[True, False], [True, True]])).picture(2))
        #.
        ##
    """

    mask: Tensor
    _field = "mask"

    def __post_init__(self) -> None:
        mask = self.mask if isinstance(self.mask, Tensor) else torch.as_tensor(self.mask, device="cpu")
        check_dense("mask", mask)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask: wanted booleans, True = may attend, got {mask.dtype}")
        if mask.dim() not in (2, 3, 4):
            raise ValueError(f"mask: wanted [Q, K], [H, Q, K] or [B, H, Q, K], got {list(mask.shape)}")
        object.__setattr__(self, "mask", mask.detach().clone())
        super().__post_init__()

    @property
    def lengths(self) -> tuple[int, int]:
        return self._table.shape[2], self._table.shape[3]

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        table = self._table.to(q.device)
        queries, keys = self.lengths
        exists = (q >= 0) & (q < queries) & (k >= 0) & (k < keys)
        if not table.numel():
            return exists & False
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        index = [zero if x is None or size == 1 else x for x, size in zip((b, h), table.shape, strict=False)]
        found = table[index[0], index[1], q.clamp(0, queries - 1), k.clamp(0, keys - 1)]
        return found & exists

    def _bind(self, at: Place) -> Bound:
        group = make_groups(self.batch_size, self.head_count)
        table = self._table[:, :, at.q_start : at.q_start + at.q_len].cpu().numpy()
        flat = np.ascontiguousarray(table).reshape(group.size * at.q_len, at.k_len)
        form = Intervals.from_dense(flat, at.q_len, group, MOST_PER_ROW)
        if form is not None:
            return Bound(form)
        if int(flat.sum()) <= at.most_listed * flat.size:
            row, key = np.nonzero(flat)
            return at.bind_pairs(row, key, group)
        return super()._bind(at)

    @property
    def T(self) -> Relation:
        return Dense(self.mask.transpose(-1, -2))

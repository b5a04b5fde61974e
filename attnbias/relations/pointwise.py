"""Call a function of one pair for many pairs at once, with the result that one call a pair would give.

FlexAttention calls a ``mask_mod`` under ``torch.vmap``: on scalars. A function made of elementwise operations
and whole look-ups gives the same on tensors that broadcast together, faster. The operations that it runs tell
whether it is one; every other function goes through ``torch.vmap`` here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

_PAIRS_AT_ONCE = 1 << 18  # bounds memory: each pair may hold a whole row of a captured table

_aten = torch.ops.aten
# Elementwise operations that PyTorch does not tag as such.
_ELEMENTWISE = {
    _aten._to_copy.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.floor_divide.default,
    _aten.full_like.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
}
# Operations that are elementwise in one argument, and read another as a whole.
_ELEMENTWISE_IN = {
    _aten.bucketize.Tensor: 0,
    _aten.isin.Tensor_Tensor: 0,
    _aten.searchsorted.Tensor: 1,
    _aten.take.default: 1,
}


class _Watch(TorchDispatchMode):
    """Watches what is computed from the indices, and notes when an operation mixes pairs."""

    def __init__(self, indices: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.from_indices = {id(x): x for x in indices}  # held, so that no other tensor gets the same id
        self.is_elementwise = True

    def has(self, x: object) -> bool:
        return id(x) in self.from_indices

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(self.has(x) for x in tensors):
            self.is_elementwise &= self._keeps_pairs_apart(func, args, tensors)
            made = [x for x in _pytree.tree_leaves(out) if isinstance(x, Tensor)]
            self.from_indices |= {id(x): x for x in made}
        return out

    def _keeps_pairs_apart(self, func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
        if func is _aten.index.Tensor:
            # A whole look-up: m[q, k] of a table that the function holds, and not m[q] or m[q > 3].
            table, places = args
            return (
                not self.has(table)
                and len(places) == table.dim()
                and all(
                    isinstance(x, Tensor) and x.dtype != torch.bool and (self.has(x) or x.dim() == 0)
                    for x in places
                )
            )
        if func in _ELEMENTWISE_IN:
            place = _ELEMENTWISE_IN[func]
            whole = args[1 - place]
            return self.has(args[place]) and not self.has(whole) and whole.dim() < 2
        if torch.Tag.pointwise not in func.tags and func not in _ELEMENTWISE:
            return False
        # A scalar of another dtype decides the result's dtype next to scalars, but not next to a tensor.
        dtypes = {x.dtype for x in tensors if self.has(x)}
        scalars = [x for x in tensors if not self.has(x)]
        return not func._schema.is_mutable and all(x.dim() == 0 and x.dtype in dtypes for x in scalars)


def is_elementwise(function: Callable[..., Any], count: int, device: torch.device) -> bool:
    """Return whether a function of ``count`` indices may be called on tensors that broadcast together."""
    # One axis for each index, of sizes that do not fit each other by chance.
    indices = [
        torch.zeros(2 + number, *(1,) * (count - 1 - number), dtype=torch.int64, device=device)
        for number in range(count)
    ]
    try:
        with _Watch(indices) as watch:
            result = function(*indices)
    except Exception:  # it needs scalars; what else may be wrong shows when it gets them
        return False
    return watch.is_elementwise and isinstance(result, Tensor) and (watch.has(result) or result.dim() == 0)


def reads_index(function: Callable[..., Any], place: int, count: int, device: torch.device) -> bool:
    """Return whether the result of a function of ``count`` indices depends on one of them."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    found = False

    def call(index: Tensor) -> Any:
        nonlocal found
        given = [zero] * count
        given[place] = index
        result = function(*(x.clone() for x in given))
        found = isinstance(result, Tensor) and torch._C._functorch.is_batchedtensor(result)
        return result

    try:
        _run(torch.vmap(call), zero.expand(2))
    except TypeError:  # it may not be defined at 0
        return True
    return found


def map_pairs(function: Callable[..., Any], *indices: Tensor) -> Tensor:
    """Call a function of one pair for all pairs of indices that broadcast together.

    Raises:
        TypeError: if it cannot run under ``torch.vmap``, or gives more than one value a pair.
    """
    shape = torch.broadcast_shapes(*(x.shape for x in indices))
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.bool, device=indices[0].device)
    padded = [x.reshape((1,) * (len(shape) - x.dim()) + x.shape) for x in indices]
    axes = [axis for axis, size in enumerate(shape) if size > 1]

    def mapped(*given: Tensor) -> Any:
        return function(*(x.clone() for x in given))  # which may write into them

    for axis in reversed(axes):
        chunk = max(1, _PAIRS_AT_ONCE * shape[axis] // shape.numel()) if axis == axes[0] else None
        over = tuple(0 if x.shape[axis] > 1 else None for x in padded)
        mapped = torch.vmap(mapped, over, chunk_size=chunk)
    result = _run(mapped, *(x.squeeze() for x in padded))
    if not isinstance(result, Tensor) or result.numel() != shape.numel():
        got = list(result.shape[len(axes) :]) if isinstance(result, Tensor) else type(result).__name__
        raise TypeError(f"fn: wanted one boolean for one pair, got {got}")
    return result.reshape(shape)


def _run(mapped: Callable[..., Any], *indices: Tensor) -> Any:
    try:
        return mapped(*indices)
    except Exception:
        # FlexAttention's own way to index by scalars, which torch.vmap needs before torch 2.13.
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    try:
        with TransformGetItemToIndex():
            return mapped(*indices)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise TypeError(
            "fn: wanted a function that torch.vmap can call on one pair at a time, as FlexAttention calls a "
            f"mask_mod, got {type(error).__name__} from it: {first}"
        ) from error

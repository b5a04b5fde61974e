"""The PyTorch op ``attnbias::forward``, its derivative, and the way around it for eager calls.

Eager calls pass a ``Call`` straight to the backend: the way through the dispatcher takes longer than the rest
of the call. Traced calls, and calls that a profiler or a dispatch mode watches, go through the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends.call import Call, Grads, Inputs, Needs, empty_row_numbers
from ..backends.places import NO_PLACES
from ..backends.strides import empty_like_query
from ..layouts.layout import Layout
from . import dispatch
from .codec import SCHEMA, Rest, decode, encode_call, join, split

_library = torch.library.Library("attnbias", "DEF")
_library.define(f"forward({SCHEMA}) -> (Tensor out, Tensor lse, Tensor row_max)")
_library.define(
    f"backward({SCHEMA}, Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse, bool[] needs) "
    "-> Tensor[]"
)
forward_op = torch.ops.attnbias.forward.default
_backward_op = torch.ops.attnbias.backward.default
_INPUTS = len(Inputs._fields)
_NOTHING = nullcontext()


def run_eager(call: Call, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run a call on the named backend, differentiably; return out, lse and, where it is wanted, row_max."""
    if _is_watched():
        out, lse, row_max = forward_op(*join(call.inputs, encode_call(call, name)))
        return out, lse, None if call.row_max is None else row_max
    if _needs_grad(call.inputs):
        return _Eager.apply(call, name, *call.given)  # type: ignore[no-untyped-call, no-any-return]
    return *_forward(call, dispatch.IN_OP[name]), call.row_max


def _forward(call: Call, backend: dispatch.InOp) -> tuple[Tensor, Tensor]:
    with _without_autocast(call.query.device.type):
        return backend.forward(call)


def _backward(
    call: Call,
    backend: dispatch.InOp,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    needs: Needs,
) -> Grads:
    with _without_autocast(out.device.type):
        if grad_out is None:
            grad_out = out.new_zeros(()).expand_as(out)
        return backend.backward(call, out, lse, grad_out, grad_lse, needs)


class _Eager(torch.autograd.Function):
    """A call on a backend, and its derivative."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, name: str, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute, and save what the derivative reads; ``inputs`` are those given, for autograd to see."""
        out, lse = _forward(call, dispatch.IN_OP[name])
        layout = call.layout
        ctx.set_materialize_grads(False)
        places = NO_PLACES if call.places is None else call.places
        given = call.slopes, call.seed, layout.buffer, layout.where, places.queries, places.keys
        ctx.save_for_backward(*inputs, out, lse, *given, *call.codes)
        numbers = None if call.places is None else places._replace(queries=None, keys=None)
        ctx.rest = (len(inputs), name, call.scale, call.softcap, call.dropout_p, call.score, numbers)
        if call.row_max is not None:
            ctx.mark_non_differentiable(call.row_max)
        return out, lse, call.row_max

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients that are needed and no others."""
        saved = ctx.saved_tensors
        count, name, scale, softcap, dropout_p, score, places = ctx.rest
        out, lse, slopes, seed, buffer, where, queries, keys, *codes = saved[count:]
        if places is not None:
            places = places._replace(queries=queries, keys=keys)
        inputs, layout = Inputs(*saved[:count]), Layout(buffer, where)
        call = Call(inputs, layout, scale, softcap, dropout_p, score, seed, codes, slopes, places=places)
        needs = Needs(*ctx.needs_input_grad[2:])
        results = (out, lse, grad_out, grad_lse)
        if _is_watched():
            grads = _call_backward(call.inputs, encode_call(call, name), *results, needs)
            return None, None, *grads[:count]

        def run() -> Grads:
            return _backward(call, dispatch.IN_OP[name], *results, needs)

        return None, None, *_differentiate_once(run, (*saved[:count], *results))[:count]


class _Traced(torch.autograd.Function):
    """The forward op, with the backward op as its derivative."""

    @staticmethod
    def forward(ctx: Any, rest: Rest, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute, and save what the derivative reads."""
        out, lse, row_max = _below_autograd(forward_op, _forward_real, join(inputs, rest))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            *inputs, out, lse, rest.slopes, rest.seed, *rest.codes, *rest.positions, *rest.layout
        )
        ctx.rest = rest._replace(slopes=None, seed=None, codes=[], layout=[], positions=[], return_max=False)
        ctx.codes, ctx.positions = len(rest.codes), len(rest.positions)
        ctx.mark_non_differentiable(row_max)
        return out, lse, row_max

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients that are needed and no others."""
        saved = ctx.saved_tensors
        out, lse, slopes, seed, *more = saved[_INPUTS:]
        more = iter(more)
        codes, positions = (list(islice(more, count)) for count in (ctx.codes, ctx.positions))
        rest = ctx.rest._replace(
            slopes=slopes, seed=seed, codes=codes, positions=positions, layout=list(more)
        )
        needs = Needs(*ctx.needs_input_grad[1:])
        return None, *_call_backward(Inputs(*saved[:_INPUTS]), rest, out, lse, grad_out, grad_lse, needs)


def _call_backward(
    inputs: Inputs,
    rest: Rest,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    needs: Needs,
) -> Grads:
    """Call the backward op, which returns the gradients that are needed."""

    def run() -> Grads:
        arguments = (*join(inputs, rest), out, lse, grad_out, grad_lse, list(needs))
        grads = iter(_below_autograd(_backward_op, _backward_real, arguments))
        return Grads(*(next(grads) if need else None for need in needs))

    return _differentiate_once(run, (*inputs, out, lse, grad_out, grad_lse))


class _Once(torch.autograd.Function):
    """A backward pass whose derivative is refused: without this PyTorch takes it to be zero."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Grads], *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute; ``tensors`` are what ``run`` reads, for autograd to see."""
        return tuple(run())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        """Refuse."""
        raise NotImplementedError("second derivatives: use backend='reference'")


def _differentiate_once(run: Callable[[], Grads], tensors: Sequence[Tensor | None]) -> Grads:
    if _needs_grad(tensors):
        return Grads(*_Once.apply(run, *tensors))  # type: ignore[no-untyped-call]
    return run()


def _needs_grad(tensors: Sequence[Tensor | None]) -> bool:
    if torch.is_grad_enabled():
        for x in tensors:  # not any(), which takes twice as long
            if x is not None and x.requires_grad:
                return True
    return False


def _forward_autograd(*arguments: Any) -> Any:
    query, key, value, extras = arguments[:4]
    tensors = (query, key, value, *(extras or ()))
    refuse_transformed(tensors)
    if _needs_grad(tensors):
        inputs, rest = split(arguments)
        return _Traced.apply(rest, *inputs)  # type: ignore[no-untyped-call]
    return _below_autograd(forward_op, _forward_real, arguments)


def _backward_autograd(*arguments: Any) -> Any:
    *of_forward, out, lse, grad_out, grad_lse, needs = arguments
    grads = _call_backward(*split(of_forward), out, lse, grad_out, grad_lse, Needs(*needs))
    return _needed(grads, needs)


def _below_autograd(op: Callable[..., Any], real: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call the op or, where nothing would see that, the function that it runs: that takes 8 us less."""
    if not (is_traced(arguments[0]) or _is_watched()):
        return real(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def _forward_real(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, backend = decode(*split(arguments))
    out, lse = _forward(call, backend)
    # An op returns as many tensors in every call.
    return out, lse, lse.new_empty(0) if call.row_max is None else call.row_max


def _backward_real(*arguments: Any) -> list[Tensor]:
    *of_forward, out, lse, grad_out, grad_lse, needs = arguments
    grads = _backward(*decode(*split(of_forward)), out, lse, grad_out, grad_lse, Needs(*needs))
    return _needed(grads, needs)


def _needed(grads: Grads, needs: Sequence[bool]) -> list[Any]:
    return [grad for grad, need in zip(grads, needs, strict=True) if need]


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = empty_row_numbers(query)
    return (
        empty_like_query(query, value.shape[3]),
        lse,
        empty_row_numbers(query) if rest[-1] else lse.new_empty(0),
    )


def _backward_fake(*arguments: Any) -> list[Tensor]:
    inputs, _ = split(arguments[:-5])
    return [
        torch.empty_like(x) for x, need in zip(inputs, arguments[-1], strict=True) if need and x is not None
    ]


def is_traced(query: Tensor) -> bool:
    """Return whether there may be no data, or lengths that are symbols."""
    ordinary = type(query) is Tensor or type(query) is torch.nn.Parameter
    return torch.compiler.is_compiling() or not ordinary or query.is_meta


def _is_watched() -> bool:
    """Return whether a dispatch mode, the profiler or a transform of torch.func looks at the ops that run."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._autograd._profiler_enabled()
        or torch._C._are_functorch_transforms_active()
    )


def refuse_transformed(values: Iterable[object]) -> None:
    """Raise where the kernels would see through a transform of a tensor: its derivative would be zero."""
    if not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0:
        return
    func = torch._C._functorch
    for x in values:
        if isinstance(x, Tensor):
            # A transform wraps tensors that it does not ask about, too: those need no gradient.
            if func.is_batchedtensor(x) or (func.is_gradtrackingtensor(x) and x.requires_grad):
                raise NotImplementedError("transforms of torch.func: use backend='reference'")
            if forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError("forward-mode derivatives: use backend='reference'")


def is_autocast(device_type: str) -> bool:
    """Return whether autocast is on."""
    # Asking raises for a device type without autocast; meta is the one that users meet.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Turn autocast off; entering ``torch.autocast`` takes longer than asking whether it is on."""
    return torch.autocast(device_type, enabled=False) if is_autocast(device_type) else _NOTHING


for _op, _real, _fake, _autograd in (
    ("forward", _forward_real, _forward_fake, _forward_autograd),
    ("backward", _backward_real, _backward_fake, _backward_autograd),
):
    _library.impl(_op, _real, "CompositeExplicitAutograd")
    _library.impl(_op, _autograd, "Autograd")
    torch.library.register_fake(f"attnbias::{_op}", _fake, lib=_library)

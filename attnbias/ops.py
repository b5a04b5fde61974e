"""The public function and the PyTorch op behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import dispatch
from .backends.strides import empty_like_query
from .layouts.layout import Layout
from .multilevel import MultiLevel
from .problem import Call, Problem, fit_edges
from .relations.recipe import restore
from .scores import read_score
from .terms import MadePart, make_parts

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .layouts.layout import Form
    from .problem import Options
    from .relations.relation import Relation
    from .scores import Score
    from .terms import Term

# ``layout``: the two tensors of a layout. A call traced with a relation has the tensors of its recipe there,
# and the layout is made when the op runs.
# ``spec``: its first line is for the backend: a score that is not the dot product, then the parts of the
# terms. A call traced with a relation adds two, the layout's form and the text of the relation's recipe.
# ``backend``: a name; a leading "?" means that it has yet to be asked whether it can run ("?" only: choose).
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor[] layout, Tensor[] terms, Tensor? sink, "
    "Tensor? seed, SymInt q_start, float scale, float softcap, float dropout_p, str spec, "
    "str backend"
)
_library = torch.library.Library("attnbias", "DEF")
_library.define(f"forward({_ARGUMENTS}) -> (Tensor out, Tensor lse)")
_library.define(
    f"backward({_ARGUMENTS}, Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse, "
    "bool[] needs) -> Tensor[]"
)
# How operations are dispatched outside of an op.
_ORDINARY = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
_forward_op = torch.ops.attnbias.forward.default
_backward_op = torch.ops.attnbias.backward.default


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Relation | Layout | None = ...,
    *,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Relation | Layout | None = ...,
    *,
    return_lse: Literal[True],
    backend: str | None = ...,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Relation | Layout | None = None,
    *,
    terms: Sequence[Term] = (),
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0,  # dynamo makes a symbol of a float default, then finds it cannot be one
    q_start: int | Literal["end"] = 0,
    enable_gqa: bool | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from each query to the keys that it is related to, and compute nothing else.

    It equals this PyTorch, without the [Q, K] scores in memory or the unrelated ones computed::

        scores = scale * query @ key.mT                                # [B, H, Q, K], or by ``score``
        scores = softcap * tanh(scores / softcap) + sum of the terms
        scores = scores.masked_fill(~relation.dense(Q, K), -inf)
        lse = logsumexp([scores, sink], dim=-1)                        # [B, H, Q]
        out = dropout(exp(scores - lse)) @ value                       # [B, H, Q, E]

    except that a query without a key gets out 0, lse -inf (with a sink the sink's logit, as the formula
    says) and gradients 0 but the sink's, never NaN. It runs in eager, ``torch.compile``, ``torch.export``
    and autocast, and can be differentiated once (with ``backend="reference"`` as often as you like).

    Args:
        query: [B, H, Q, D] or [H, Q, D]; float32, float16, bfloat16 or float64, any strides.
        key: [B, Hk, K, D] or [Hk, K, D]; query head h reads key head ``h // (H // Hk)``.
        value: [B, Hk, K, E] or [Hk, K, E]; E may differ from D.
        relation: which query attends to which key; a Layout is a relation made ready for these
            lengths. None relates every pair.
        terms: values added to the scores of related pairs, such as a bias by distance.
        score: None, the dot product, or an ``AdditiveScore`` or ``MultiLevel`` in its place.
        scale: factor of the score; if None, D**-0.5 for the dot product and 1 for others.
        softcap: bound on the scores; None or 0 is off.
        sink: [H], a logit that takes its share of each softmax and has no value.
        dropout_p: share of the probabilities to drop, with torch's generator.
        q_start: position of the first query among the keys; "end" puts the last query at the last
            key, as in decoding with a cache.
        enable_gqa: False refuses fewer key heads than query heads; they are accepted otherwise.
        return_lse: return the logarithm of each row's softmax sum, too.
        backend: run on this one, or raise with its reasons; None takes the first that can.

    Returns:
        out [B, H, Q, E] (or [H, Q, E]) in the query's dtype and stride order; with ``return_lse``
        a pair of it and lse [B, H, Q], float32 (float64 for float64).

    Raises:
        TypeError: if an argument is of the wrong kind or dtype.
        ValueError: if shapes, devices, numbers or lengths do not fit.
        NotImplementedError: if the named backend cannot run this.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> q, k, v = torch.ones(3, 2, 4, 5, 8)  # 2 sequences, 4 heads, 5 tokens, D = 8
        >>> out = ab.attention(q, k, v, ab.Causal() & ab.Window(before=1))
        >>> out.shape
        torch.Size([2, 4, 5, 8])
        >>> out, lse = ab.attention(q, k, v, ab.Causal(), scale=0.0, return_lse=True)
        >>> lse[0, 0].exp().round()  # the number of keys of each query
        tensor([1., 2., 3., 4., 5.])
    """
    if isinstance(query, Tensor) and _is_autocast(query.device.type):
        query, key, value = _autocast(query, key, value)
    problem = Problem(
        query,
        key,
        value,
        relation,
        terms=terms,
        score=score,
        scale=scale,
        softcap=softcap,
        sink=sink,
        dropout_p=dropout_p,
        q_start=q_start,
        enable_gqa=enable_gqa,
        return_lse=return_lse,
    )
    problem.draw_seed()
    out, lse = attend(problem, dispatch.asked_for(backend))
    if problem.squeeze:
        out, lse = out.squeeze(0), lse if lse is None else lse.squeeze(0)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def attend(problem: Problem, name: str | None) -> tuple[Tensor, Tensor | None]:
    """Run a problem on the named backend, or on the first that can."""
    if _is_traced(problem.query):
        in_place = dispatch.choose_traced(problem, name)
        return _call_traced(problem, name) if in_place is None else in_place.attend(problem)
    name = dispatch.choose(problem, name)
    if name in dispatch.IN_PLACE:
        return dispatch.IN_PLACE[name].attend(problem)
    given = (vars(part).values() for part in (*problem.terms, problem.score) if part is not None)
    _refuse_transformed(problem.query, problem.key, problem.value, problem.sink, *chain(*given))
    # Straight to the op's autograd implementation: the way through the dispatcher takes 6 us more.
    layout = layout_of(problem)
    return _call(_forward_autograd, problem, [layout.buffer, layout.where], "", name)


def layout_of(problem: Problem) -> Layout:
    """The layout of a problem, from the relation's cache unless it was given."""
    relation, query = problem.relation, problem.query
    if relation is None:
        assert problem.layout is not None
        return problem.layout
    B, H, Q, _ = query.shape
    form, score = problem.form, problem.score
    return relation.layout(
        Q,
        problem.key.shape[2],
        q_start=problem.q_start,
        device=query.device,
        form=form,
        batch=B,
        heads=H,
        score=score if isinstance(score, MultiLevel) and form != "edges" else None,  # edges have no levels
    )


def _is_traced(query: Tensor) -> bool:
    """Whether there may be no data, or lengths that are symbols."""
    ordinary = type(query) is Tensor or type(query) is torch.nn.Parameter
    return torch.compiler.is_compiling() or not ordinary or query.is_meta


def _call_traced(problem: Problem, name: str | None) -> tuple[Tensor, Tensor]:
    """Call the op in a way that holds for every length: nothing about the layout is read."""
    backend = "?" if name is None else f"?{name}"
    if problem.layout is not None:
        return _call(_forward_op, problem, [problem.layout.buffer, problem.layout.where], "", backend)
    assert problem.relation is not None
    recipe = problem.relation.recipe
    # Not is_exporting(): before torch 2.13 dynamo takes that for True whenever it compiles.
    if torch.compiler._is_exporting_flag and not recipe.is_portable:
        raise ValueError(
            "relation: an exported program cannot carry a Python function or object; "
            f"pass the layout of {problem.relation!r}, relation.layout(q_len, k_len), as an argument"
        )
    return _call(_forward_op, problem, list(recipe.data), f"\n{problem.form}\n{recipe.text}", backend)


def _call(
    op: Callable[..., tuple[Tensor, Tensor]],
    problem: Problem,
    layout: list[Tensor],
    wanted: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    names, parts = make_parts(problem.terms, problem.sizes) if problem.terms else ("", [])
    if problem.score is not None:
        word, tensors = problem.score.make(problem.sizes, problem.query.shape[3])
        names, parts = f"{word} {names}".rstrip(), tensors + parts
    return op(
        problem.query,
        problem.key,
        problem.value,
        layout,
        parts,
        problem.sink,
        problem.seed,
        problem.q_start,
        problem.scale,
        problem.softcap,
        problem.dropout_p,
        names + wanted,
        backend,
    )


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for scaled_dot_product_attention: all but float64."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: Sequence[Tensor],
    terms: Sequence[Tensor],
    sink: Tensor | None,
    seed: Tensor | None,
    q_start: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    spec: str,
    backend: str,
) -> tuple[Call, dispatch.InOp]:
    """Make what the backend gets from the op's arguments; a traced call is checked only now."""
    words, _, wanted = spec.partition("\n")
    score, _ = read_score(words, terms)
    relation: Relation | None = None
    if wanted:
        form, _, text = wanted.partition("\n")
        relation = restore(text, tensors)
        B, H, Q, _ = query.shape
        with torch._C._ForceDispatchKeyGuard(*_ORDINARY):  # a function may need what is above
            layout = relation.layout(
                Q,
                key.shape[2],
                q_start=q_start,
                device=query.device,
                form=cast("Form", form),
                batch=B,
                heads=H,
                score=score if isinstance(score, MultiLevel) else None,
            )
    else:
        layout = Layout(*tensors)
    call = Call(query, key, value, layout, tuple(terms), sink, seed, scale, softcap, dropout_p, words)
    if backend[:1] == "?":
        problem = Problem(
            query,
            key,
            value,
            layout,
            score=call.score,
            scale=scale,
            softcap=softcap,
            sink=sink,
            dropout_p=dropout_p,
            q_start=q_start,
        )
        problem.terms = tuple(map(MadePart, call.parts))
        if problem.form == "edges":
            counts = [len(part) for name, part in call.parts.items() if name == "edge"]
            fit_edges(problem, counts, relation)
        backend = dispatch.choose(problem, backend[1:] or None, dispatch.IN_OP)
    return call, dispatch.IN_OP[backend]


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    with _without_autocast(arguments[0].device.type):
        call, backend = _prepare(*arguments)
        return backend.forward(call)


def _backward(*arguments: Any) -> list[Tensor]:
    *of_forward, out, lse, grad_out, grad_lse, needs = arguments
    with _without_autocast(out.device.type):
        call, backend = _prepare(*of_forward)
        if grad_out is None:
            grad_out = out.new_zeros(()).expand_as(out)
        grads = backend.backward(call, out, lse, grad_out, grad_lse, needs)
        return [grad for grad, need in zip(grads, needs, strict=True) if need]


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_empty(query.shape[:3], dtype=precision)
    return empty_like_query(query, value.shape[3]), lse


def _fake_backward(*arguments: Any) -> list[Tensor]:
    query, key, value, _, terms, sink = arguments[:6]
    inputs, needs = (query, key, value, sink, *terms), arguments[-1]
    return [torch.empty_like(x) for x, need in zip(inputs, needs, strict=True) if need]


class _Forward(torch.autograd.Function):
    """The forward op, with the backward op as its derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: list[Tensor],
        sink: Tensor | None,
        seed: Tensor | None,
        numbers: tuple[Any, ...],
        *terms: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute, and keep what the derivative reads."""
        tensors = (query, key, value, layout, list(terms), sink, seed)
        out, lse = _below_autograd(_forward_op, _forward, *tensors, *numbers)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, sink, seed, out, lse, *layout, *terms)
        ctx.layout_size = len(layout)
        ctx.numbers = numbers
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients that are asked for and no others."""
        query, key, value, sink, seed, out, lse, *rest = ctx.saved_tensors
        layout, terms = rest[: ctx.layout_size], rest[ctx.layout_size :]
        asked = ctx.needs_input_grad
        needs = [*asked[:3], asked[4], *asked[7:]]
        tensors = (query, key, value, layout, terms, sink, seed)
        grads = iter(_backward_autograd(*tensors, *ctx.numbers, out, lse, grad_out, grad_lse, needs))
        dq, dk, dv, dsink, *dterms = (next(grads) if need else None for need in needs)
        return dq, dk, dv, None, dsink, None, None, *dterms


class _Backward(torch.autograd.Function):
    """The backward op, whose derivative is refused: without this PyTorch takes it to be zero."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute; ``tensors`` are those among the arguments, for autograd to see."""
        return tuple(_below_autograd(_backward_op, _backward, *arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        """Refuse."""
        raise NotImplementedError("second derivatives: use backend='reference'")


def _forward_autograd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: list[Tensor],
    terms: list[Tensor],
    sink: Tensor | None,
    seed: Tensor | None,
    *numbers: Any,
) -> Any:
    layout, terms = layout or [], terms or []  # AOTInductor hands an empty list over as None
    inputs = (query, key, value, sink, *terms)
    _refuse_transformed(*inputs)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _Forward.apply(  # type: ignore[no-untyped-call]
            query, key, value, layout, sink, seed, numbers, *terms
        )
    tensors = (query, key, value, layout, terms, sink, seed)
    return _below_autograd(_forward_op, _forward, *tensors, *numbers)


def _backward_autograd(*arguments: Any) -> Any:
    if torch.is_grad_enabled():
        tensors = [x for x in (*arguments, *arguments[4]) if isinstance(x, Tensor)]
        if any(x.requires_grad for x in tensors):
            return list(_Backward.apply(arguments, *tensors))  # type: ignore[no-untyped-call]
    return _below_autograd(_backward_op, _backward, *arguments)


def _below_autograd(op: Callable[..., Any], real: Callable[..., Any], *arguments: Any) -> Any:
    """Call the op, or ``real``, what it does, where nothing would see the op: that takes 8 us less."""
    if not (_is_traced(arguments[0]) or _is_watched()):
        return real(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def _is_watched() -> bool:
    """Whether a dispatch mode, the profiler or a transform of torch.func looks at the ops that run."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._autograd._profiler_enabled()
        or torch._C._are_functorch_transforms_active()
    )


def _refuse_transformed(*values: object) -> None:
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


def _is_autocast(device_type: str) -> bool:
    # Asking raises for a device type without autocast; meta is the one that users meet.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Turn autocast off; entering ``torch.autocast`` takes longer than asking whether it is on."""
    return torch.autocast(device_type, enabled=False) if _is_autocast(device_type) else _NOTHING


_NOTHING = nullcontext()

for _op, _real, _fake, _autograd in (
    ("forward", _forward, _fake_forward, _forward_autograd),
    ("backward", _backward, _fake_backward, _backward_autograd),
):
    _library.impl(_op, _real, "CompositeExplicitAutograd")
    _library.impl(_op, _autograd, "Autograd")
    torch.library.register_fake(f"attnbias::{_op}", _fake, lib=_library)

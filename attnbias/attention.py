"""The public function: check the arguments, choose a backend, run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import torch
from torch import Tensor

from .op import dispatch
from .op.library import is_autocast
from .op.problem import DEFAULTS, Options, Problem
from .op.run import attend

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .layouts.layout import Layout
    from .relations.relation import Relation
    from .scores.additive import Score
    from .scores.terms import Term


# Functions that take calls on tensors of another class, by its name: ``attnbias.sharding`` adds DTensor's.
TAKERS: dict[str, Callable[..., Any]] = {}


class Sharded(Protocol):
    """Takes a call itself, as an :class:`attnbias.Shard` does: this module knows no processes."""

    def attend_sharded(self, query: Tensor, key: Tensor, value: Tensor, /, **given: Any) -> Any:
        """Run ``attention`` with these arguments."""


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Relation | Layout | Sharded | None = ...,
    *,
    return_lse: Literal[False] = ...,
    return_max: Literal[False] = ...,
    backend: str | None = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Relation | Layout | Sharded | None = ...,
    *,
    return_lse: Literal[True],
    return_max: Literal[False] = ...,
    backend: str | None = ...,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Relation | Layout | Sharded | None = ...,
    *,
    return_lse: Literal[False] = ...,
    return_max: Literal[True],
    backend: str | None = ...,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Relation | Layout | Sharded | None = ...,
    *,
    return_lse: Literal[True],
    return_max: Literal[True],
    backend: str | None = ...,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relation: Relation | Layout | Sharded | None = None,
    *,
    return_lse: bool = False,
    return_max: bool = False,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, ...]:
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

    DTensors are computed where they lie: sharded by batch or by heads each rank computes its own, sharded by
    sequence it fetches the keys that its queries are related to. The relation, the terms and the sink are
    those of the whole, and so are the results, DTensors placed as the query is.

    Args:
        query: [B, H, Q, D] or [H, Q, D]; float32, float16, bfloat16 or float64, any strides.
        key: [B, Hk, K, D] or [Hk, K, D]; query head h reads key head ``h // (H // Hk)``.
        value: [B, Hk, K, E] or [Hk, K, E]; E may differ from D.
        relation: which query attends to which key; a Layout is a relation made ready for these
            lengths. A Shard is one over several processes, of which each passes its own queries,
            keys and values. None relates every pair.
        terms: values added to the scores of related pairs, such as a bias by distance.
        score: None, the dot product, or an ``AdditiveScore`` or ``MultiLevel`` in its place.
        scale: factor of the score; if None, D**-0.5 for the dot product and 1 for others.
        softcap: bound on the scores; None or 0 is off.
        sink: [H], a logit that takes its share of each softmax and has no value.
        dropout_p: share of the probabilities to drop, with torch's generator.
        q_start: position of the first query among the keys; "end" puts the last query at the last
            key, as in decoding with a cache. With the default, 0, a single query stands at the first key,
            and ``Causal()`` lets it see that key alone.
        enable_gqa: False refuses fewer key heads than query heads; they are accepted otherwise.
        return_lse: return the logarithm of each row's softmax sum, too.
        return_max: return the largest score of each row, too; it has no gradient.
        backend: run on this one, or raise with its reasons; None takes the first that can.

    Returns:
        out [B, H, Q, E] (or [H, Q, E]) in the query's dtype and stride order; with ``return_lse``
        or ``return_max`` a tuple of it, lse and max, as wanted, [B, H, Q] each, float32 (float64
        for float64). max is ``scores.amax(-1)``, -inf for a query without a key; the sink is no
        score.

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
    if isinstance(query, Tensor) and is_autocast(query.device.type):
        query, key, value = _autocast(query, key, value)
    for x in (query, key, value):
        if type(x) is not Tensor and type(x).__name__ in TAKERS:
            take = TAKERS[type(x).__name__]
            given = {"return_lse": return_lse, "return_max": return_max, "backend": backend, **options}
            taken: Tensor | tuple[Tensor, ...] = take(query, key, value, relation, **given)
            return taken
    if relation is not None and hasattr(relation, "attend_sharded"):
        given = {"return_lse": return_lse, "return_max": return_max, "backend": backend, **options}
        sharded: Tensor | tuple[Tensor, ...] = relation.attend_sharded(query, key, value, **given)
        return sharded
    problem = Problem(query, key, value, relation, return_lse=return_lse, return_max=return_max, **options)
    problem.draw_seed()
    out, lse, row_max = attend(problem, dispatch.asked_for(backend))
    if problem.squeeze:
        out = out.squeeze(0)
    if not (return_lse or return_max):
        return out
    wanted = [x for x, want in ((lse, return_lse), (row_max, return_max)) if want and x is not None]
    return out, *(x.squeeze(0) if problem.squeeze else x for x in wanted)


def max_logit(
    query: Tensor,
    key: Tensor,
    relation: Relation | Layout | Sharded | None = None,
    *,
    terms: Sequence[Term] = (),
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    q_start: int | Literal["end"] = 0,
    backend: str | None = None,
) -> Tensor:
    """Return the largest score of each head, without a gradient: to monitor training, or for QK-clip.

    It is the largest number that enters a softmax of ``attention`` with these arguments, over the batch, the
    queries and their keys. To have it along with the result, use ``attention(..., return_max=True)``.

    Args:
        query: [B, H, Q, D] or [H, Q, D].
        key: [B, Hk, K, D] or [Hk, K, D].
        relation: as for ``attention``, as are the others.
        terms: values added to the scores.
        score: None for the dot product.
        scale: factor of the score.
        softcap: bound on the scores before the terms.
        q_start: position of the first query among the keys.
        backend: run on this one.

    Returns:
        [H], float32 (float64 for float64); -inf for a head without a related pair.

    Raises:
        TypeError: as ``attention`` does.
        ValueError: as ``attention`` does.
        NotImplementedError: if the named backend cannot run this.

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> q = k = torch.tensor([[[1.0], [2.0], [4.0]]])  # 1 head, 3 tokens, D = 1
        >>> ab.max_logit(q, k, ab.Causal())
        tensor([16.])
        >>> most = ab.max_logit(q, k, ab.Causal())
        >>> clip = torch.where(most > 4, 4 / most, 1.0).sqrt()  # for QK-clip at 4
        >>> ab.max_logit(q * clip, k * clip, ab.Causal())
        tensor([4.])
    """
    nothing = key.detach()[..., :1] if isinstance(key, Tensor) else key  # a value that no score depends on
    with torch.no_grad():
        _, row_max = attention(
            *(query, key, nothing, relation),
            return_max=True,
            backend=backend,
            terms=terms,
            score=score,
            scale=scale,
            softcap=softcap,
            q_start=q_start,
        )
        by_head = row_max.movedim(-2, 0).flatten(1)  # [H, B * Q]
        # One more: there may be none.
        largest = torch.nn.functional.pad(by_head, (0, 1), value=-torch.inf).amax(1)
        reduce_max: Callable[[Tensor], Tensor] | None = getattr(relation, "reduce_max", None)
        return largest if reduce_max is None else reduce_max(largest)  # of all ranks, for a shard


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for scaled_dot_product_attention: all but float64."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def _spell_out(function: Callable[..., object]) -> inspect.Signature:
    """Return a signature with the options by name, for ``help`` and editors."""
    parameters = inspect.signature(function).parameters
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for (name, default), kind in zip(DEFAULTS.items(), Options.__annotations__.values(), strict=True)
    ]
    fixed = [each for name, each in parameters.items() if name != "options"]
    place = list(parameters).index("return_lse")
    return inspect.Signature([*fixed[:place], *options, *fixed[place:]])


attention.__signature__ = _spell_out(attention)  # type: ignore[attr-defined]

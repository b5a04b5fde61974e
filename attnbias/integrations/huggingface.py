"""Hugging Face models on attnbias: their masks become relations, never [Q, K] tensors.

    from attnbias.integrations import huggingface

    model = huggingface.attach(model)                                    # same results, its own masks
    huggingface.set_relation(model, ab.Window(before=255))               # and now sparse, in every layer
    huggingface.set_relation(model, lambda layer: ab.Full() if layer % 4 == 3 else ab.Window(before=255))

For transformers 5.x; tested with 5.22.2. What a model passes that cannot be honoured is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, Union

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import dispatch
from ..ops import attention
from ..relations import Causal, Dense, Full, Global, Graph, Neighborhood, Neighbors, Relation, Window
from ..terms import KernelTerm, PairBias, RelativeBias, Term, t5_buckets
from ..weights import attention_weights
from .huggingface_masks import Mask, make_mask

NAME = "attnbias"
_RELATION = "attnbias_relation"  # a module's own, set by set_relation

# What models hand to every attention function and ours has no use for: the mask has it, or others read it.
_IGNORED = frozenset(
    (
        *("cache_position", "is_causal", "num_items_in_batch", "output_hidden_states", "past_key_values"),
        *("position_embeddings", "position_ids", "return_dict", "sliding_window", "use_cache"),
        *("output_router_logits", "deterministic", "output_attentions", "logits_to_keep"),
    )
)
# Names of attention that looks at other tokens than its own.
_CROSS = ("cross", "encdec", "encoder_attn")


Chosen = Union[Relation, "NearestKeys"]

# Where transformers notes what the call at hand records of its layers, such as "attentions".
_recorded: Any = None


def register() -> None:
    """Make ``attn_implementation="attnbias"`` known to transformers; once is enough.

    Raises:
        ImportError: without transformers 5.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("huggingface: wanted transformers 5 (pip install 'transformers>=5,<6')") from error
    if int(transformers.__version__.split(".")[0]) != 5:
        raise ImportError(f"huggingface: wanted transformers 5, got {transformers.__version__}")
    global _recorded  # noqa: PLW0603 - known once transformers is
    with suppress(ImportError, AttributeError):
        _recorded = import_module("transformers.utils.output_capturing")._active_collector
    transformers.AttentionInterface.register(NAME, attention_forward)
    transformers.AttentionMaskInterface.register(NAME, make_mask)


def attach(model: Any, relation: Chosen | Callable[[int], Chosen | None] | None = None) -> Any:
    """Let a model run on attnbias, and return it; ``model.set_attn_implementation("eager")`` undoes it.

    Args:
        model: a ``PreTrainedModel`` whose attention goes through transformers' interface.
        relation: as for :func:`set_relation`.

    Raises:
        ValueError: if it is no such model, or its attention is its own and cannot be replaced.
    """
    register()
    wanted = "model: wanted a model of transformers whose attention can be replaced"
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"{wanted}, got {type(model).__name__}")
    if not model._can_set_attn_implementation():
        raise ValueError(f"{wanted}, got {type(model).__name__}, which has its own; it is left as it was")
    model.set_attn_implementation(NAME)
    for module in model.modules():
        has_table = hasattr(module, "compute_bias") and hasattr(module, "relative_attention_max_distance")
        if has_table and "key_length" in signature(type(module).compute_bias).parameters:
            # T5 and its kin: a table of biases by distance, made a [Q, K] tensor only where others need one.
            # Without a table (cross-attention) the model adds zeros of that size; it asks here instead.
            module.compute_bias = partial(_position_bias, module)  # not a method: those do not pickle
            module.has_relative_attention_bias = True
    if relation is not None:
        set_relation(model, relation)
    return model


def set_relation(
    model: nn.Module, relation: Chosen | Callable[[int], Chosen | None] | None, *, cross: bool = False
) -> None:
    """Intersect a relation with what a model's own masks allow: how to sparsify a model one has.

    Args:
        model: an attached model, or a part of it.
        relation: for every layer, or a function from a layer's number; None takes it away. In place of a
            relation, :class:`NearestKeys`.
        cross: of the attention from a decoder to an encoder, not of that among a layer's own tokens. There
            queries count from the first of each call: generate with ``use_cache=False``, or take
            :class:`NearestKeys`, which has no positions.

    Raises:
        TypeError: if it is neither.
        ValueError: if the model has no such attention.
    """
    if isinstance(relation, Relation | NearestKeys) or relation is None:
        given: Callable[[int], Chosen | None] = lambda layer: relation  # noqa: E731
    elif callable(relation):
        given = relation
    else:
        raise TypeError(f"relation: wanted a relation, a function of the layer or None, got {relation!r}")
    found = 0
    for name, module in model.named_modules():
        if not hasattr(module, "is_causal") or isinstance(module, nn.MultiheadAttention):
            continue
        of_others = any(word in name.lower() for word in _CROSS) or getattr(
            module, "is_cross_attention", False
        )
        if of_others == cross:
            number = getattr(module, "layer_idx", None)
            chosen = given(found if number is None else number)
            if not isinstance(chosen, Relation | NearestKeys | None):
                raise TypeError(f"relation: wanted the function to give relations or None, got {chosen!r}")
            setattr(module, _RELATION, chosen)
            found += 1
    if not found:
        kind = "cross-attention" if cross else "attention"
        raise ValueError(f"model: found no {kind} in {type(model).__name__}")


def patch_neighborhood(shape: tuple[int, int], radius: int, first: int = 1) -> Relation:
    """A neighbourhood on a ViT's grid of patches, behind ``first`` tokens that see and are seen by all.

    Example:
        >>> patch_neighborhood((4, 4), 1).count(17, 17)
        133
    """
    near = Neighborhood(shape, radius)
    patches = shape[0] * shape[1]
    query, key = near.dense(patches, patches).nonzero().T + first
    grid = Graph(torch.stack((key, query)), num_nodes=patches + first)
    return grid | Global(list(range(first)))


class NearestKeys:
    """Each query and head attends to its ``count`` keys of the largest products, as in Unlimiformer.

    Give it to :func:`set_relation` in place of a relation. What the model's own mask rules out is not
    searched. The search is exact, over ``chunk`` keys at a time, and holds [B, H, Q, count + chunk] numbers.

    Args:
        count: keys of each query.
        chunk: keys whose products are held at once.
    """

    def __init__(self, count: int, chunk: int = 4096) -> None:
        if count < 1 or chunk < 1:
            raise ValueError(f"count: wanted at least 1 key and chunk, got {count} and {chunk}")
        self.count, self.chunk = count, chunk

    @torch.no_grad()
    def find(self, query: Tensor, key: Tensor, allowed: Relation, q_start: int) -> Neighbors:
        """The nearest of the allowed keys [B, Hk, K, D] of each query [B, H, Q, D]."""
        (B, H, Q, _), (Hk, K) = query.shape, key.shape[1:3]
        allowed.check(Q, K, q_start, B, H)
        b, h, q = (torch.arange(n, device=query.device) for n in (B, H, Q))
        where = b[:, None, None, None], h[:, None, None], q[:, None] + q_start
        scores = query.new_full((B, H, Q, 0), -torch.inf)
        index = torch.zeros(B, H, Q, 0, dtype=torch.int64, device=query.device)
        for first in range(0, K, self.chunk):
            k = torch.arange(first, min(first + self.chunk, K), device=query.device)
            part = key[:, :, first : first + self.chunk].repeat_interleave(H // Hk, dim=1)
            product = query @ part.mT  # [B, H, Q, chunk]
            related = allowed.related(where[2], k, where[0], where[1])
            scores = torch.cat((scores, product.masked_fill(~related, -torch.inf)), dim=-1)
            index = torch.cat((index, k.expand(B, H, Q, -1)), dim=-1)
            scores, best = scores.topk(min(self.count, scores.shape[-1]), dim=-1)
            index = index.gather(-1, best)
        return Neighbors(index.masked_fill(scores == -torch.inf, -1))


# -- what transformers calls ------------------------------------------------------------------------


class _NoBias:
    """Stands for the zeros that T5 adds in cross-attention."""


def _position_bias(
    module: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
) -> Any:
    """T5's ``compute_bias``: the table itself for attnbias, for others the tensor they expect."""
    has_table = hasattr(module, "relative_attention_bias")
    if module.config._attn_implementation == NAME:
        if not has_table:
            return _NoBias()
        buckets = t5_buckets(not module.is_decoder, module.relative_attention_max_distance)
        return RelativeBias(module.relative_attention_bias.weight.T, buckets)
    if has_table:
        return type(module).compute_bias(
            module, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens
        )
    return module.q.weight.new_zeros(1, module.n_heads, query_length, key_length)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in place of ``sdpa_attention_forward``.

    Args:
        module: the attention layer.
        query: [B, H, Q, D].
        key: [B, Hk, K, D].
        value: [B, Hk, K, E].
        attention_mask: what :func:`make_mask` made; or None, or a tensor [B, 1 or H, Q, K] from the user.
        dropout: share of the weights to drop.
        scaling: factor of the products.
        softcap: bound on the scores.
        s_aux: attention sinks, [H].
        position_bias: T5's.
        **options: what else models pass.

    Returns:
        [B, Q, H, E], and the weights where ``output_attentions`` asks for them.

    Raises:
        NotImplementedError: for what cannot be honoured.
    """
    for name, given in options.items():
        if name not in _IGNORED and given is not None and given is not False:
            raise _refuse(module, f"{name}: not understood by attnbias, got {_kind(given)}")
    mask = _understand_mask(module, query, key, attention_mask, options)
    terms = _terms(module, position_bias, attention_mask, mask.q_start, query.shape[2], key.shape[2])
    chosen = module.__dict__.get(_RELATION)  # getattr of a module takes long to find nothing
    if chosen is not None and isinstance(attention_mask, Tensor) and query.shape[2] != key.shape[2]:
        wanted = "wanted the model's own, which knows the positions that the relation is about"
        raise _refuse(module, f"attention_mask: {wanted}, got {_kind(attention_mask)}")
    wants_weights = _wants_weights(options)
    is_step = query.shape[2] == 1 and not dropout and not wants_weights and dispatch.asked_for(None) is None
    if is_step and (chosen is None or _is_plain(chosen, query.device)):
        # A layout of one row takes longer to build than the row to compute, and serves one token.
        row = mask.row(chosen, query, key)
        out = _attend_one(query, key, value, row, scaling, softcap, s_aux, terms, mask.q_start)
        return out.transpose(1, 2).contiguous(), None
    if isinstance(chosen, NearestKeys):
        relation: Relation = chosen.find(query, key, mask.relation, mask.q_start)
    else:
        relation = mask.with_relation(chosen)
    shared = {"scale": scaling, "softcap": softcap, "sink": s_aux, "q_start": mask.q_start, "terms": terms}
    out = attention(query, key, value, relation, dropout_p=dropout, **shared)  # type: ignore[call-overload]
    weights = attention_weights(query, key, relation, **shared) if wants_weights else None  # type: ignore[call-overload]
    return out.transpose(1, 2).contiguous(), weights


def _refuse(module: nn.Module, what: str) -> NotImplementedError:
    """The error for what a layer cannot have, with the way back."""
    return NotImplementedError(
        f'{what} in {type(module).__name__}; model.set_attn_implementation("eager") runs it without attnbias'
    )


def _kind(given: Any) -> str:
    return (
        f"{type(given).__name__} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    )


def _wants_weights(options: dict[str, Any]) -> bool:
    """Whether weights are asked for: models say so in an argument, or record what their layers return."""
    if options.get("output_attentions"):
        return True
    if _recorded is None or (torch.compiler.is_compiling() and not _recorded.compiling):
        return False
    names = _recorded.get()
    return names is not None and any("attentions" in name for name in names)


def _is_plain(chosen: Chosen, device: torch.device) -> bool:
    """Whether it is a relation in which no pair counts twice."""
    none = torch.zeros(1, dtype=torch.int64, device=device)
    return isinstance(chosen, Relation) and chosen.multiplicity(none, none) is None


def _understand_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
) -> Mask:
    """The mask of a call, whoever made it."""
    q_len, k_len = query.shape[2], key.shape[2]
    if isinstance(mask, Mask):
        if mask.lengths not in (None, (q_len, k_len)):
            wanted = "attention_mask: wanted one for {} queries of {} keys, got one for {} of {}"
            raise _refuse(module, wanted.format(q_len, k_len, *mask.lengths))
        return mask
    if mask is None:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if not causal or q_len == 1:
            return Mask(Full(), k_len - q_len)
        if q_len != k_len:
            wanted = f"wanted one for {q_len} causal queries of {k_len} keys"
            raise _refuse(module, f"attention_mask: {wanted}, got None")
        window = options.get("sliding_window")
        return Mask(Causal() if window is None else Window(before=window - 1), 0)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        if mask.dtype == torch.bool and q_len == k_len:
            return Mask(Dense(mask[..., :k_len].expand(-1, -1, q_len, -1)), 0)
        return Mask(Full(), k_len - q_len)  # and a term
    wanted = "wanted one made by attnbias, a tensor [B, H, Q, K] or None"
    raise _refuse(module, f"attention_mask: {wanted}, got {_kind(mask)}")


def _terms(
    module: nn.Module, position_bias: Any, mask: Any, q_start: int, q_len: int, k_len: int
) -> list[Term]:
    """What is added to the scores: T5's bias, and a mask of numbers."""
    terms: list[Term] = []
    if isinstance(position_bias, KernelTerm):
        terms.append(position_bias)
    elif isinstance(position_bias, Tensor):
        terms.append(PairBias(position_bias, q_start))
    elif position_bias is not None and not isinstance(position_bias, _NoBias):
        raise _refuse(module, f"position_bias: wanted a tensor, got {_kind(position_bias)}")
    if isinstance(mask, Tensor):
        added = mask[..., :k_len]
        if added.dtype != torch.bool:
            terms.append(PairBias(added, q_start))
        elif q_len != k_len:
            added = torch.zeros(added.shape, device=added.device).masked_fill(~added, -torch.inf)
            terms.append(PairBias(added, q_start))
    return terms


def _attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
    terms: list[Term],
    q_start: int,
) -> Tensor:
    """One query's attention with torch's own operations: [B, H, 1, E]."""
    (B, H), (Hk, K) = query.shape[:2], key.shape[1:3]
    bias = row
    if terms:
        b, h, q, k = (torch.arange(n, device=query.device) for n in (B, H, 1, K))
        at = (b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q.view(-1, 1) + q_start, k)
        added = sum((term.value(*at) for term in terms), query.new_zeros(()))
        bias = added.to(query.dtype)
        if row is not None:
            bias = bias.masked_fill(~row, -torch.inf)
    if not softcap and sink is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=scaling, enable_gqa=Hk != H
        )
    scores = torch.einsum("bgrd,bgkd->bgrk", query.view(B, Hk, H // Hk, -1), key)
    scores = scores.float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        spread = bias.expand(B, H, 1, K).view(B, Hk, H // Hk, K)
        scores = scores.masked_fill(~spread, -torch.inf) if bias.dtype == torch.bool else scores + spread
    if sink is not None:
        last = sink.float().view(1, Hk, H // Hk, 1).expand(B, -1, -1, -1)
        scores = torch.cat((scores, last), dim=-1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0)
    weights = weights[..., :K].to(value.dtype)
    return torch.einsum("bgrk,bgke->bgre", weights, value).reshape(B, H, 1, -1)

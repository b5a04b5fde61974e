"""Attach a model to attnbias, and set the relations of its layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from torch import nn

from ...relations import Relation
from ...scores.buckets import t5_buckets
from ...scores.terms import RelativeBias
from .forward import NAME, PAGED, RELATION, Chosen, NoBias, is_attention, is_cross, register
from .relations import NearestKeys
from .sharded import shard_model


def attach(
    model: Any,
    relation: Chosen | Callable[[int], Chosen | None] | None = None,
    *,
    mesh: Any = None,
    paged: bool = False,
) -> Any:
    """Run a model on attnbias, and return it; ``model.set_attn_implementation("eager")`` undoes it.

    Args:
        model: a ``PreTrainedModel`` whose attention goes through transformers' interface.
        relation: as for :func:`set_relation`.
        mesh: a DeviceMesh of one dimension or a ProcessGroup, over which the tokens are sharded. Every rank
            calls the model with the whole batch. Logits are those of its own tokens (:func:`gather` has all),
            and the mean of all ranks' losses is that of the whole, so average the gradients, as DDP and FSDP
            do. None, also in a later call: one rank computes all.
        paged: make the model ready for continuous batching (``generate_batch``), without [Q, K] masks; a
            relation is then in positions of each request. Other calls are as without it.

    Raises:
        ValueError: if it is not such a model, or has attention code of its own.
        NotImplementedError: with ``mesh``, if tokens meet elsewhere than in self-attention; with both
            ``mesh`` and ``paged``.
    """
    register()
    if paged and mesh is not None:
        raise NotImplementedError(f"mesh: wanted None with paged=True, got {type(mesh).__name__}")
    wanted = "model: wanted a transformers model whose attention can be replaced"
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"{wanted}, got {type(model).__name__}")
    if not model._can_set_attn_implementation():
        raise ValueError(f"{wanted}, got {type(model).__name__}, which has its own attention code")
    model.set_attn_implementation(NAME)
    if paged:
        # Not by set_attn_implementation, which would load a package of flash-attention for such a name.
        model.config._attn_implementation = PAGED
    for module in model.modules():
        has_table = hasattr(module, "compute_bias") and hasattr(module, "relative_attention_max_distance")
        if has_table and "key_length" in signature(type(module).compute_bias).parameters:
            # T5 and its relatives: pass on the table of biases by distance, not a [Q, K] tensor. A layer
            # without a table (cross-attention) would add zeros of that size; the flag makes it call this too.
            module.compute_bias = partial(_position_bias, module)  # a bound method would not pickle
            module.has_relative_attention_bias = True
    if relation is not None:
        set_relation(model, relation)
    shard_model(model, mesh)
    return model


def set_relation(
    model: nn.Module, relation: Chosen | Callable[[int], Chosen | None] | None, *, cross: bool = False
) -> None:
    """Intersect a relation with a model's own masks, which makes an existing model sparse.

    Args:
        model: an attached model, or a part of it.
        relation: a relation or :class:`NearestKeys` for every layer, or a function from a layer's number to
            one; None removes it.
        cross: set it on the attention from a decoder to an encoder, not on self-attention. Positions of
            queries there count from the first query of each call: generate with ``use_cache=False``, or use
            :class:`NearestKeys`, which needs no positions.

    Raises:
        TypeError: if ``relation`` is none of these.
        ValueError: if the model has no such attention layer.
    """
    if isinstance(relation, Relation | NearestKeys) or relation is None:
        given: Callable[[int], Chosen | None] = lambda layer: relation  # noqa: E731
    elif callable(relation):
        given = relation
    else:
        raise TypeError(f"relation: wanted a relation, a function of the layer or None, got {relation!r}")
    found = 0
    for name, module in model.named_modules():
        if is_attention(module) and is_cross(name, module) == cross:
            number = getattr(module, "layer_idx", None)
            chosen = given(found if number is None else number)
            if not isinstance(chosen, Relation | NearestKeys | None):
                raise TypeError(f"relation: wanted a function that returns relations or None, got {chosen!r}")
            setattr(module, RELATION, chosen)
            found += 1
    if not found:
        kind = "cross-attention" if cross else "attention"
        raise ValueError(f"model: wanted one with {kind} layers, found none in {type(model).__name__}")


def _position_bias(
    module: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
) -> Any:
    """Replace T5's ``compute_bias``: return the table for attnbias, the usual tensor for others."""
    has_table = hasattr(module, "relative_attention_bias")
    if module.config._attn_implementation in (NAME, PAGED):
        if not has_table:
            return NoBias()
        buckets = t5_buckets(not module.is_decoder, module.relative_attention_max_distance)
        return RelativeBias(module.relative_attention_bias.weight.T, buckets)
    if has_table:
        return type(module).compute_bias(
            module, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens
        )
    return module.q.weight.new_zeros(1, module.n_heads, query_length, key_length)

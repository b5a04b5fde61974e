"""Attach a model to attnbias, and set the relations and scores of its layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from torch import nn

from ...relations import Relation
from ...scores.buckets import t5_buckets
from ...scores.multilevel import MultiLevel
from ...scores.terms import RelativeBias
from .forward import NAME, PAGED, RELATION, SCORE, Chosen, NoBias, is_attention, is_cross, register
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
    for module, chosen in _by_layer(model, "relation", relation, (Relation, NearestKeys), cross=cross):
        setattr(module, RELATION, chosen)


def set_score(model: nn.Module, score: MultiLevel | Callable[[int], MultiLevel | None] | None) -> None:
    """Score near tokens in more dimensions than far ones, in the self-attention of a model.

    The model's own factor stays: one level of all dimensions is the model's own score. Blocks are counted
    from the first token of a row, padding included, so that decoding equals the whole sequence at once.

    Args:
        model: an attached model, or a part of it.
        score: one for every layer, or a function from a layer's number to one; None removes it. Its ranks sum
            to the head size, and it has widths, since calls differ in length.

    Raises:
        TypeError: if ``score`` is none of these.
        ValueError: if it has no widths, or the model has no attention layer.
    """
    layers = _by_layer(model, "score", score, (MultiLevel,), cross=False)
    for _, chosen in layers:
        if chosen is not None and chosen.widths is None:
            raise ValueError("score: wanted widths, which stay while the sequence grows, got None")
    for module, chosen in layers:
        setattr(module, SCORE, chosen)


def _by_layer(
    model: nn.Module, name: str, given: Any, kinds: tuple[type, ...], *, cross: bool
) -> list[tuple[nn.Module, Any]]:
    """Return each attention layer with what was given for it: a value, None, or a function of its number."""
    wanted = " or ".join(kind.__name__ for kind in kinds)
    is_value = given is None or isinstance(given, kinds)
    if not is_value and not callable(given):
        raise TypeError(f"{name}: wanted a {wanted}, a function of the layer or None, got {given!r}")
    found: list[tuple[nn.Module, Any]] = []
    for path, module in model.named_modules():
        if is_attention(module) and is_cross(path, module) == cross:
            number = getattr(module, "layer_idx", None)
            chosen = given if is_value else given(len(found) if number is None else number)
            if not isinstance(chosen, (*kinds, type(None))):
                raise TypeError(f"{name}: wanted a function that returns a {wanted} or None, got {chosen!r}")
            found.append((module, chosen))
    if not found:
        kind = "cross-attention" if cross else "attention"
        raise ValueError(f"model: wanted one with {kind} layers, found none in {type(model).__name__}")
    return found


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

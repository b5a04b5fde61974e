"""A model over the ranks of a mesh: every rank is given the whole batch and computes some of its tokens.

A hook before the model's forward makes the shard of all layers' relations, and passes on this rank's tokens.
The masks that transformers then makes carry the shard to the layers, so that checkpointing, which runs layers
again, finds it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...relations import Full, Relation
from ...sharding import Shard
from ...sharding.cache import cached_shard
from ...sharding.ranks import find_ranks
from ...sharding.split import TILE
from .forward import RELATION, is_self_attention
from .masks import Mask, Shards, running

HOOKS = "attnbias_sharded"  # the attribute of a model that holds its hooks
IGNORED_LABEL = -100  # transformers' own, of tokens without a label

_PASSED = ("input_ids", "inputs_embeds", "position_ids", "labels", "attention_mask", "num_items_in_batch")
_HARMLESS = ("return_dict", "output_hidden_states")


class Kind(NamedTuple):
    """The relation of all layers of one kind."""

    own: Relation  # the model's mask, without documents
    whole: Relation  # all that holds for the call
    chosen: Relation | None  # by set_relation


class Hooks:
    """The hooks of a model, and the shard of its latest call."""

    def __init__(self, model: Any, mesh: Any) -> None:
        self.mesh, self.ranks = mesh, find_ranks(mesh, None)
        self.shard: Shard | None = None
        self.parameters = signature(model.forward).parameters
        self.handles = [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self.handles:
            handle.remove()

    def before(self, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        """Shard the call, and return the arguments of this rank."""
        given = dict(zip(self.parameters, args, strict=False)) | options
        given = {name: x for name, x in given.items() if x is not None}
        self._refuse(model, given)
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if not isinstance(tokens, Tensor):
            raise ValueError("input_ids: wanted the whole batch on every rank, got None")
        B, L = tokens.shape[:2]
        positions = given.get("position_ids")
        kinds = list(_find_kinds(model, tokens, positions))
        pairs = {(kind.own, kind.chosen): kind.whole for kind in kinds}
        counts = [sum((kind.own, kind.chosen) == pair for kind in kinds) for pair in pairs]
        heads = model.config.get_text_config().num_attention_heads
        self.shard = shard = cached_shard(
            *(list(pairs.values()), (L, L), self.ranks.group),
            split="auto",
            weights=tuple(counts),
            batch=B,
            heads=heads,
        )
        if not shard.plans[0].queries.counts.all():  # models do not run on no tokens
            wanted = f"wanted at least 1 tile of {TILE} tokens for each rank"
            raise ValueError(f"input_ids: {wanted}, got {L} tokens for {self.ranks.size}")
        running.shards = Shards(dict(zip(pairs, shard, strict=True)))
        if positions is None:
            positions = torch.arange(L, device=tokens.device)[None]
        given["position_ids"] = shard.scatter(positions, 1)
        for name in ("input_ids", "inputs_embeds"):
            if name in given:
                given[name] = shard.scatter(given[name], 1)
        # Without it, transformers would take positions that jump for several documents.
        given["attention_mask"] = torch.ones(B, len(shard.positions), dtype=torch.int64, device=tokens.device)
        if "use_cache" in self.parameters:
            given["use_cache"] = False
        return (), given | self._labels(given)

    def _labels(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the labels of this rank, shifted before they are cut, and what its loss is divided by."""
        labels = given.get("labels")
        if labels is None:
            return {}
        assert self.shard is not None
        shifted = functional.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]
        count = given.get("num_items_in_batch")
        count = (shifted != IGNORED_LABEL).sum() if count is None else count
        return {
            "labels": self.shard.scatter(labels, 1),
            "shift_labels": self.shard.scatter(shifted, 1).contiguous(),
            "num_items_in_batch": count / self.ranks.size,
        }

    def after(self, *_: Any) -> None:
        """Forget the call, also if it failed."""
        running.shards = None

    def _refuse(self, model: Any, given: dict[str, Any]) -> None:
        """Raise NotImplementedError, naming the argument, for what a call over ranks does not have."""

        def refuse(name: str, why: str) -> NotImplementedError:
            return NotImplementedError(f"{name}: wanted none with mesh=, {why}, got {_kind(given[name])}")

        if given.get("past_key_values") is not None:
            raise refuse("past_key_values", "a cache holds the keys of one rank")
        if given.get("use_cache"):
            raise refuse("use_cache", "so generate with a model that is attached without a mesh")
        mask = given.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
            raise refuse("attention_mask", "pack sequences by position_ids instead of padding them")
        positions = given.get("position_ids")
        if positions is not None and positions.dim() != 2:
            raise refuse("position_ids", "other than of shape [B, L] or [1, L]")
        if "labels" in given and getattr(model, "loss_type", None) != "ForCausalLM":
            raise refuse("labels", "which only causal language models divide among ranks: use the logits")
        if given.get("output_router_logits", getattr(model.config, "output_router_logits", False)):
            given = {"output_router_logits": True}
            raise refuse("output_router_logits", "whose loss is not a sum over tokens")
        for name, value in given.items():
            is_off = value is False or (isinstance(value, int) and value == 0)
            if name not in (*_PASSED, *_HARMLESS) and not is_off:
                raise refuse(name, "as it is not known how to give each rank its part")


def shard_model(model: Any, mesh: Any) -> None:
    """Run a model over the ranks of a mesh, from its next call on; None: on one rank again.

    Raises:
        NotImplementedError: if tokens meet elsewhere than in self-attention.
    """
    old: Hooks | None = model.__dict__.pop(HOOKS, None)
    if old is not None:
        old.remove()
    if mesh is None:
        return
    why = _why_not(model)
    if why:
        raise NotImplementedError(f"mesh: wanted a model whose tokens meet in self-attention only, got {why}")
    model.__dict__[HOOKS] = Hooks(model, mesh)


def gather(model: Any, part: Tensor, dim: int = 1) -> Tensor:
    """Return a tensor of all tokens, such as logits, on every rank: by the shard of the model's latest call.

    Args:
        model: attached with ``mesh=``.
        part: this rank's, with its tokens along a dimension.
        dim: the dimension.

    Raises:
        ValueError: if the model has not run over ranks.
    """
    hooks: Hooks | None = model.__dict__.get(HOOKS)
    if hooks is None or hooks.shard is None:
        raise ValueError("model: wanted one that was attached with mesh= and called, got another")
    return hooks.shard.gather(part, dim)


def _why_not(model: Any) -> str:
    """Return what is in the way of cutting a model's tokens, or nothing."""
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        return f"{name}, which has cross-attention"
    if "position_ids" not in signature(model.forward).parameters:
        return f"{name}, which takes no position_ids"
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        return f"{name}, which has layers of type {', '.join(sorted(others))}"
    convolution = next((x for x in model.modules() if isinstance(x, nn.modules.conv._ConvNd)), None)
    return "" if convolution is None else f"{name}, which has {type(convolution).__name__}"


def _find_kinds(model: Any, tokens: Tensor, positions: Tensor | None) -> Iterator[Kind]:
    """Yield what each layer of self-attention relates, in the whole sequence."""
    config = model.config.get_text_config()
    own, whole = (_make_masks(config, tokens, at) for at in (None, positions))
    types = getattr(config, "layer_types", None)
    layers = [module for name, module in model.named_modules() if is_self_attention(name, module)]
    for place, module in enumerate(layers):
        chosen = module.__dict__.get(RELATION)
        if chosen is not None and not isinstance(chosen, Relation):
            raise NotImplementedError(f"relation: wanted a Relation with mesh=, got {type(chosen).__name__}")
        number = getattr(module, "layer_idx", None)
        kind = types[place if number is None else number] if types else None
        if not module.is_causal:
            pair: tuple[Relation, Relation] = (Full(), Full())
        else:
            pair = own[kind].relation, whole[kind].relation
        yield Kind(pair[0], pair[1] if chosen is None else pair[1] & chosen, chosen)


def _make_masks(config: Any, tokens: Tensor, positions: Tensor | None) -> dict[str | None, Mask]:
    """Return the masks that transformers makes for the whole sequence, by type of layer."""
    from transformers.masking_utils import create_masks_for_generate

    shaped = torch.empty(*tokens.shape[:2], 0, device=tokens.device)
    made = create_masks_for_generate(config, shaped, None, None, position_ids=positions)
    return made if isinstance(made, dict) else {None: made}


def _kind(given: Any) -> str:
    return f"{type(given).__name__} {list(given.shape)}" if isinstance(given, Tensor) else repr(given)

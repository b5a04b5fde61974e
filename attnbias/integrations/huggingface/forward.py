"""The attention function that transformers calls, and its registration."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ...attention import attention
from ...backends.sdpa import attend_row
from ...op import dispatch
from ...op.weights import attention_weights
from ...relations import Causal, Dense, Full, Relation, Window
from ...scores.multilevel import MultiLevel
from ...scores.terms import KernelTerm, PairBias, Term
from ...sharding import Shard
from .masks import Mask, Shards, make_mask, refuse, running
from .packed import PACKING, read_documents, update_cache
from .relations import NearestKeys

NAME = "attnbias"
PAGED = "attnbias_flash"  # continuous batching makes no [Q, K] mask where the name has "flash" in it
RELATION = "attnbias_relation"  # the attribute of a layer that set_relation sets
SCORE = "attnbias_score"  # the one that set_score sets

# Options that models pass to every attention function and that this one ignores: the mask already holds them,
# or other code reads them.
_IGNORED = frozenset(
    (
        *("cache_position", "is_causal", "num_items_in_batch", "output_hidden_states", "past_key_values"),
        *("position_embeddings", "position_ids", "return_dict", "sliding_window", "use_cache"),
        *("output_router_logits", "deterministic", "output_attentions", "logits_to_keep", "shift_labels"),
    )
)

# Substrings of the names of layers that attend to tokens other than their own.
_CROSS = ("cross", "encdec", "encoder_attn")

Chosen = Relation | NearestKeys

# The context variable with the layer outputs that the current call records, such as "attentions".
_recorded: Any = None


def register() -> None:
    """Register ``attn_implementation="attnbias"`` with transformers; calling it again does no harm.

    Raises:
        ImportError: without transformers 5.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("huggingface: wanted transformers 5 (pip install 'transformers>=5,<6')") from error
    if int(transformers.__version__.split(".")[0]) != 5:
        raise ImportError(f"huggingface: wanted transformers 5, got {transformers.__version__}")
    global _recorded  # noqa: PLW0603 - transformers is imported only here
    with suppress(ImportError, AttributeError):
        _recorded = import_module("transformers.utils.output_capturing")._active_collector
    for name in (NAME, PAGED):
        transformers.AttentionInterface.register(name, attention_forward)
        transformers.AttentionMaskInterface.register(name, make_mask)


class NoBias:
    """A placeholder for the zeros that T5 adds in cross-attention."""


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
    """Attend; transformers calls this instead of ``sdpa_attention_forward``.

    Args:
        module: the attention layer.
        query: [B, H, Q, D].
        key: [B, Hk, K, D].
        value: [B, Hk, K, E].
        attention_mask: the result of :func:`make_mask`, None, or a tensor [B, 1 or H, Q, K] from the user.
        dropout: fraction of the weights to drop.
        scaling: factor of the products.
        softcap: bound on the scores.
        s_aux: attention sinks, [H].
        position_bias: T5's bias.
        **options: all other options that models pass.

    Returns:
        [B, Q, H, E], and the weights if ``output_attentions`` asks for them, else None.

    Raises:
        NotImplementedError: for an option or mask that attnbias does not support.
    """
    cache = options.pop("cache", None)
    score = module.__dict__.get(SCORE)
    if cache is not None:
        if score is not None:
            raise refuse(
                module, "score: wanted none with continuous batching, which packs positions, got one"
            )
        key, value, attention_mask = update_cache(cache, module, key, value, attention_mask, options)
    packing = {name: options.pop(name, None) for name in PACKING}
    for name, given in options.items():
        if name not in _IGNORED and given is not None and given is not False:
            raise refuse(module, f"{name}: wanted None, attnbias does not support it, got {_kind(given)}")
    mask, terms = _read_mask(module, query, key, attention_mask, options)
    mask = read_documents(module, query, key, mask, packing, options)
    terms = [*_read_bias(module, position_bias, mask.q_start), *terms]
    chosen = module.__dict__.get(RELATION)  # getattr on a module is slow when it finds nothing
    for name, own in (("relation", chosen), ("score", score)):
        if own is not None and isinstance(attention_mask, Tensor) and query.shape[2] != key.shape[2]:
            wanted = f"wanted the model's own mask, which knows the positions that the {name} needs"
            raise refuse(module, f"attention_mask: {wanted}, got {_kind(attention_mask)}")
    if score is not None:
        _check_offset(module, score, mask.offset)
        scaling = query.shape[3] * (query.shape[3] ** -0.5 if scaling is None else scaling)
    wants_weights = _wants_weights(options)
    if mask.shards is not None or running.shards is not None:
        shard = _find_shard(module, mask, chosen, is_plain=not (terms or score or wants_weights))
        numbers = {"scale": scaling, "softcap": softcap, "dropout_p": dropout}
        out = attention(query, key, value, shard, sink=s_aux, **numbers)  # type: ignore[call-overload]
        return out.transpose(1, 2).contiguous(), None
    is_step = query.shape[2] == 1 and not (dropout or wants_weights or score)
    is_step = is_step and dispatch.asked_for(None) is None
    if is_step and (chosen is None or _is_plain(chosen, query.device)):
        # A layout for one row takes longer to build than the row to compute, and serves one token. So this is
        # the backend sdpa, without the checks of ``attention``: they make a small model's step 12 % longer.
        row = _add_terms(mask.row(chosen, query, key), terms, mask.q_start, query, key)
        out = attend_row(query, key, value, row, scaling, softcap, s_aux)
        return out.transpose(1, 2).contiguous(), None
    if isinstance(chosen, NearestKeys):
        relation: Relation = chosen.find(query, key, mask.relation, mask.q_start)
    else:
        relation = mask.with_relation(chosen)
    shared = {"scale": scaling, "softcap": softcap, "sink": s_aux, "q_start": mask.q_start, "terms": terms}
    shared["score"] = score
    out = attention(query, key, value, relation, dropout_p=dropout, **shared)  # type: ignore[call-overload]
    weights = attention_weights(query, key, relation, **shared) if wants_weights else None  # type: ignore[call-overload]
    return out.transpose(1, 2).contiguous(), weights


def _find_shard(module: nn.Module, mask: Mask, chosen: Chosen | None, *, is_plain: bool) -> Shard:
    """Return the shard of a layer in a call over ranks."""
    if not is_plain:
        wanted = "mesh: wanted neither weights, biases of positions nor a score that was set over ranks"
        raise refuse(module, f"{wanted}, got them")
    shards: Shards | None = mask.shards
    found = None if shards is None else shards.of.get((mask.relation, chosen))  # type: ignore[arg-type]
    if found is None:
        wanted = "mesh: wanted the causal, sliding or bidirectional mask of the layer's type over ranks"
        raise refuse(module, f"{wanted}, got {mask.relation!r}")
    return found


def _check_offset(module: nn.Module, score: MultiLevel, offset: int) -> None:
    """Raise if a sliding cache has dropped keys, from which the blocks of the score would be counted."""
    if offset and any(score.widths or ()):
        wanted = "score: wanted a cache that keeps all keys, since blocks are counted from the first token"
        raise refuse(module, f"{wanted}, got one that begins at token {offset}")


def is_self_attention(name: str, module: nn.Module) -> bool:
    """Return whether a module of this name in a model attends to its own tokens."""
    return is_attention(module) and not is_cross(name, module)


def is_attention(module: nn.Module) -> bool:
    """Return whether a module calls the attention function."""
    return hasattr(module, "is_causal") and not isinstance(module, nn.MultiheadAttention)


def is_cross(name: str, module: nn.Module) -> bool:
    """Return whether a module of this name attends to tokens other than its own."""
    return any(word in name.lower() for word in _CROSS) or bool(getattr(module, "is_cross_attention", False))


def _kind(given: Any) -> str:
    return (
        f"{type(given).__name__} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    )


def _wants_weights(options: dict[str, Any]) -> bool:
    """Return whether the caller wants weights: by an argument, or by recording what layers return."""
    if options.get("output_attentions"):
        return True
    if _recorded is None or (torch.compiler.is_compiling() and not _recorded.compiling):
        return False
    names = _recorded.get()
    return names is not None and any("attentions" in name for name in names)


def _is_plain(chosen: Chosen, device: torch.device) -> bool:
    """Return whether it is a relation in which no pair counts twice."""
    none = torch.zeros(1, dtype=torch.int64, device=device)
    return isinstance(chosen, Relation) and chosen.multiplicity(none, none) is None


def _read_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]
) -> tuple[Mask, list[Term]]:
    """Read the mask of a call, whoever made it, as a :class:`Mask` and numbers to add to the scores."""
    q_len, k_len = query.shape[2], key.shape[2]
    if isinstance(mask, Mask):
        if mask.lengths not in (None, (q_len, k_len)):
            wanted = "attention_mask: wanted one for {} queries and {} keys, got one for {} and {}"
            raise refuse(module, wanted.format(q_len, k_len, *mask.lengths))
        return mask, []
    if mask is None:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if not causal or q_len == 1:
            return Mask(Full(), k_len - q_len), []
        if q_len != k_len:
            wanted = f"wanted one for {q_len} causal queries and {k_len} keys"
            raise refuse(module, f"attention_mask: {wanted}, got None")
        window = options.get("sliding_window")
        return Mask(Causal() if window is None else Window(before=window - 1), 0), []
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        wanted = "wanted a Mask of attnbias, a tensor [B, H, Q, K] or None"
        raise refuse(module, f"attention_mask: {wanted}, got {_kind(mask)}")
    mask = mask[..., :k_len]
    if mask.dtype == torch.bool and q_len == k_len:
        return Mask(Dense(mask.expand(-1, -1, q_len, -1)), 0), []
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
    return Mask(Full(), k_len - q_len), [PairBias(mask, k_len - q_len)]


def _read_bias(module: nn.Module, position_bias: Any, q_start: int) -> list[Term]:
    """Read T5's bias, which is a table or a tensor, as terms."""
    if position_bias is None or isinstance(position_bias, NoBias):
        return []
    if isinstance(position_bias, Tensor):
        return [PairBias(position_bias, q_start)]
    if not isinstance(position_bias, KernelTerm):
        raise refuse(module, f"position_bias: wanted a tensor, got {_kind(position_bias)}")
    return [position_bias]


def _add_terms(
    row: Tensor | None, terms: list[Term], q_start: int, query: Tensor, key: Tensor
) -> Tensor | None:
    """Turn a single query's mask and terms into numbers to add, which broadcast to [B, H, 1, K]."""
    if not terms:
        return row
    b, h, k = (torch.arange(n, device=query.device) for n in (*query.shape[:2], key.shape[2]))
    at = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), torch.full_like(k[:1], q_start), k
    bias = sum((term.value(*at) for term in terms), query.new_zeros(())).to(query.dtype)
    return bias if row is None else bias.masked_fill(~row, -torch.inf)

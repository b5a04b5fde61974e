"""PyTorch's own dense attention, for the two relations that it knows.

A single query, as in decoding, may also have ``Dense``, ``PairBias``, a softcap and a sink: a mask of one row
costs less than a layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..relations import Causal, Dense, Full
from ..scores.terms import PairBias
from .strides import empty_like_query

if TYPE_CHECKING:
    from ..op.problem import Problem

name = "sdpa"

# No measurement on a GPU says yet that our kernels are faster where nothing is left out.
WHY_DEFAULT = (
    "torch's own kernels are the default for Full() and Causal() on CUDA, because ours are unmeasured"
)
LARGEST = 256  # head size of FlashAttention, the one fused kernel of torch that takes shared key heads


def why_not(problem: Problem) -> list[str]:
    """Return the reasons why scaled_dot_product_attention cannot run this problem."""
    reasons = []
    cuts_keys = isinstance(problem.relation, Causal) and not _sees_all(problem)
    is_row = problem.query.shape[2] == 1 and not cuts_keys
    if not isinstance(problem.relation, (Full, Causal, Dense) if is_row else (Full, Causal)):
        known = "Full(), Causal() and Dense" if is_row else "Full() and Causal()"
        reasons.append(f"relation: only {known}, not as a layout")
    elif cuts_keys and problem.q_start != 0:
        reasons.append(f"q_start: Causal() is aligned at the top left, got {problem.q_start}")
    for given, what in (
        (bool(problem.terms) and not is_row, "terms: not supported"),
        (not all(isinstance(term, PairBias) for term in problem.terms) and is_row, "terms: only PairBias"),
        (problem.score is not None, "score: only the dot product"),
        (problem.softcap != 0 and not is_row, "softcap: not supported"),
        (problem.sink is not None and not is_row, "sink: not supported"),
        (problem.dropout_p > 0, "dropout_p: drops other pairs than the other backends"),
        (problem.return_lse, "return_lse: it returns none"),
        (problem.return_max, "return_max: it returns none"),
        (problem.places is not None, "places: not supported"),
        (problem.key.shape[2] == 0, "key: rows without a key are not supported"),
    ):
        if given:
            reasons.append(what)
    return reasons


def why_not_by_default(problem: Problem) -> list[str]:
    """Return why it runs only when asked for: it is not known to be faster here."""
    if problem.query.device.type != "cuda":
        return ["it is the default only on CUDA devices"]
    if torch.are_deterministic_algorithms_enabled():
        return ["it is not deterministic, and torch.use_deterministic_algorithms is on"]
    if isinstance(problem.relation, Dense) or problem.terms or problem.softcap or problem.sink is not None:
        return ["it is the default only without a mask"]
    return _why_unfused(problem)


def _why_unfused(problem: Problem) -> list[str]:
    """Return why torch would fall back to a matrix of all scores: shared key heads have one fused kernel."""
    (heads, q_len, size), dtype = problem.query.shape[1:], problem.query.dtype
    key_heads, k_len = problem.key.shape[1:3]
    if heads == key_heads:
        return []
    if dtype not in (torch.float16, torch.bfloat16):
        wrong = str(dtype).removeprefix("torch.")
    elif size > LARGEST or problem.value.shape[-1] > LARGEST:
        wrong = f"head sizes above {LARGEST}"
    elif size != problem.value.shape[-1]:
        wrong = "values of another head size than the keys"
    elif isinstance(problem.relation, Causal) and not _sees_all(problem) and q_len != k_len:
        wrong = "Causal() with other numbers of queries and keys"
    else:
        return []
    return [f"torch makes a matrix of all scores for shared key heads with {wrong}"]


def attend(problem: Problem) -> tuple[Tensor, None]:
    """Compute out [B, H, Q, E]; there is no lse."""
    assert problem.relation is not None
    query, key, value = problem.query, problem.key, problem.value
    wanted, row = empty_like_query(query, value.shape[-1]), _make_row(problem)
    if problem.softcap or problem.sink is not None:
        # Rounded at the end: weights in half precision would be too rough for the sink's gradient.
        q, k, v = (x.to(problem.sizes.dtype) for x in (query, key, value))
        out = attend_row(q, k, v, row, problem.scale, problem.softcap, problem.sink).to(query.dtype)
    else:
        # Decided by branching: while dynamo traces, a comparison of sizes is a symbol and not a bool.
        causal = grouped = False
        if isinstance(problem.relation, Causal) and not _sees_all(problem):
            causal = True
        if query.shape[1] != key.shape[1]:
            grouped = True
        out = scaled_dot_product_attention(
            query, key, value, row, is_causal=causal, scale=problem.scale, enable_gqa=grouped
        )
    return out if out.stride() == wanted.stride() else wanted.copy_(out), None


def attend_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Attend from a single query, [B, H, 1, E].

    Args:
        query: [B, H, 1, D].
        key: [B, Hk, K, D].
        value: [B, Hk, K, E].
        mask: broadcasts to [B, H, 1, K]: True at related keys, or numbers to add to the scores; None = all.
        scale: as in ``attention``.
        softcap: as in ``attention``.
        sink: as in ``attention``.
    """
    (B, H), (Hk, K) = query.shape[:2], key.shape[1:3]
    if not softcap and sink is None:
        return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=Hk != H)
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = torch.einsum("bgrd,bgkd->bgrk", query.reshape(B, Hk, H // Hk, -1), key).to(precision)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        row = mask.expand(B, H, 1, K).reshape(scores.shape)
        scores = scores.masked_fill(~row, -torch.inf) if mask.dtype == torch.bool else scores + row
    if sink is not None:
        last = sink.to(precision).view(1, Hk, H // Hk, 1).expand(B, -1, -1, -1)
        scores = torch.cat((scores, last), dim=-1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0)
    weights = weights[..., :K].to(value.dtype)
    return torch.einsum("bgrk,bgke->bgre", weights, value).reshape(B, H, 1, -1)


def _make_row(problem: Problem) -> Tensor | None:
    """Make the mask of a single query from its relation and terms; None if it hides and adds nothing."""
    mask = None
    if isinstance(problem.relation, Dense):
        mask = problem.relation.mask.to(problem.query.device)
        mask = mask[..., problem.q_start : problem.q_start + 1, :]
    if not problem.terms:
        return mask
    parts = [term.make_part(problem.sizes) for term in problem.terms if isinstance(term, PairBias)]
    bias = sum(parts[1:], parts[0]).to(problem.query.dtype)
    return bias if mask is None else bias.masked_fill(~mask, -torch.inf)


def _sees_all(problem: Problem) -> bool:
    """Return whether even the first query stands at or after the last key, so that causal is full."""
    return problem.q_start >= problem.key.shape[2] - 1

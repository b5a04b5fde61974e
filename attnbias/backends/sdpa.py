"""PyTorch's own dense attention, for the two relations that it knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..relations import Causal, Full
from .strides import empty_like_query

if TYPE_CHECKING:
    from ..problem import Problem

name = "sdpa"


def why_not(problem: Problem) -> list[str]:
    """Say what keeps scaled_dot_product_attention from running this problem."""
    reasons = []
    if not isinstance(problem.relation, (Full, Causal)):
        reasons.append("relation: only Full() and Causal(), not as a layout")
    elif isinstance(problem.relation, Causal) and problem.q_start != 0 and not _sees_all(problem):
        reasons.append(f"q_start: Causal() is aligned at the top left, got {problem.q_start}")
    for given, what in (
        (bool(problem.terms), "terms: not supported"),
        (problem.score is not None, "score: only the dot product"),
        (problem.softcap != 0, "softcap: not supported"),
        (problem.sink is not None, "sink: not supported"),
        (problem.dropout_p > 0, "dropout_p: drops other pairs than the other backends"),
        (problem.return_lse, "return_lse: it returns none"),
        (problem.key.shape[2] == 0, "key: rows without a key are not supported"),
    ):
        if given:
            reasons.append(what)
    return reasons


def why_not_by_default(problem: Problem) -> list[str]:
    """Say why it runs only when asked for: elsewhere it is not known to be the faster one."""
    device = problem.query.device
    if device.type != "cuda" or not _is_hopper(device.index):
        return ["it is the default only on CUDA devices of sm_90 and newer"]
    if torch.are_deterministic_algorithms_enabled():
        return ["it is not deterministic, and torch.use_deterministic_algorithms is on"]
    return []


def attend(problem: Problem) -> tuple[Tensor, None]:
    """Compute out [B, H, Q, E]; there is no lse."""
    assert problem.relation is not None
    query, key, value = problem.query, problem.key, problem.value
    # Decided by branching: while dynamo traces, a comparison of sizes is a symbol and not a bool.
    causal = grouped = False
    if isinstance(problem.relation, Causal) and not _sees_all(problem):
        causal = True
    if query.shape[1] != key.shape[1]:
        grouped = True
    out = scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=problem.scale, enable_gqa=grouped
    )
    wanted = empty_like_query(query, value.shape[-1])
    return out if out.stride() == wanted.stride() else wanted.copy_(out), None


def _sees_all(problem: Problem) -> bool:
    """Whether even the first query stands at or behind the last key, so that causal is full."""
    return problem.q_start >= problem.key.shape[2] - 1


def _is_hopper(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


# What torch.compiler.assume_constant_result sets, without its import of dynamo, which takes a second.
_is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]

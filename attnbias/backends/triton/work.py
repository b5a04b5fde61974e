"""How long the lists of a layout's tiles are, and what ``explain`` says about cutting them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...kernels.launch.config import candidates, target_of
from ...kernels.launch.split import Lengths, Work, choose_split
from ...scores.terms import KeyBias

if TYPE_CHECKING:
    from ...kernels.launch.config import Pass
    from ...layouts.layout import Layout
    from ...op.problem import Problem


def work_of(layout: Layout) -> Work | None:
    """Return how long the lists of tiles are; None without tiles."""
    kept = layout.kept
    header = kept.header
    if not header.tiles:
        return None
    found: Work | None = kept.prepared.get("triton work")
    if found is None:
        known = (
            layout.lengths if header.groups == 1 else None
        )  # with more, kernels take no list before another
        if known is not None:
            found = Work(*map(Lengths.of, known))
        else:
            sides = header.q_tiles, header.k_tiles
            found = Work(*(Lengths.even(-(-header.tiles // header.groups), lists) for lists in sides))
        kept.prepared["triton work"] = found
    return found


def describe_splits(problem: Problem, layout: Layout) -> str:
    """Say into how many programs long rows are split, for each result; "" if none is."""
    query, key, value = problem.query, problem.key, problem.value
    (B, H, Q, D), (_, Hk, K, E) = query.shape, value.shape
    target, work = target_of(query.device), work_of(layout)
    if isinstance(target, str) or work is None:
        return ""
    learns_keys = any(isinstance(term, KeyBias) and term.bias.requires_grad for term in problem.terms)
    passes: tuple[tuple[Pass, str, bool, Lengths, int, int], ...] = (
        ("forward", "out", True, work.by_query, H, Q),
        ("backward_query", "dq", query.requires_grad, work.by_query, H, Q),
        (
            *("backward_key", "dk and dv"),
            (key.requires_grad or value.requires_grad) and not learns_keys,
            *(work.by_key, Hk, K),
        ),
    )
    said = []
    for which, name, is_wanted, lengths, heads, length in passes:
        sizes = D, E, layout.tile
        config = candidates(target, which, query.dtype, *sizes, layout.levels is not None)[0]
        own = config.cols if which == "backward_key" else config.rows
        split = choose_split(
            lengths,
            lines=B * heads,
            size=layout.tile,
            own=own,
            length=length,
            processors=target.processors,
            turns=H // heads,
        )
        if split is not None and is_wanted:
            before = B * heads * -(-length // own)
            said.append(f"{name} by {before + B * heads * split.more} programs in place of {before}")
    return ", ".join(said)

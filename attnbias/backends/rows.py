"""The layout reference: plain PyTorch over a Layout's lists, one query tile after the other.

It serves a Layout on devices without a kernel, and shows what a kernel does in each pass. A tile
of rows meets all of its keys at once, so every product and sum has one order: the results are
deterministic.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..scores.additive import why_not_terms
from .call import Grads, name_parts, parts_needed
from .philox import keep_mask
from .strides import empty_like_query

if TYPE_CHECKING:
    from ..op.problem import Problem
    from .call import Call, Needs

name = "rows"


def why_not(problem: Problem) -> list[str]:
    """Return the reasons why the layout reference cannot run this problem."""
    return why_not_terms(problem.terms, problem.score)


class _Tile(NamedTuple):
    """The query rows of one tile for all (b, h) of a group, and the keys they meet."""

    b: Tensor  # [n]
    h: Tensor  # [n]
    rows: slice
    keys: Tensor  # [m]
    counts: Tensor  # [rows, m]: how often each pair counts, 0 = unrelated
    number: Tensor  # [edges]: the caller's number of each, where a part has a value by it
    place: Tensor  # [edges]: its pair in [rows * m]

    @property
    def queries(self) -> tuple[Tensor, Tensor, slice]:
        """Index a [B, H, Q, ...] tensor: [n, rows, ...]."""
        return self.b, self.h, self.rows

    def columns(self, share: int) -> tuple[Tensor, Tensor, Tensor]:
        """Index a [B, H / share, K, ...] tensor: [n, m, ...]."""
        return self.b[:, None], self.h[:, None] // share, self.keys


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute out [B, H, Q, E] and lse [B, H, Q]."""
    query, value = call.query, call.value
    share = _share(call)
    out = empty_like_query(query, value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=_precision(query))
    for tile in _tiles(call):
        scores, often, _ = _scores(call, tile)
        probs, _, lse[tile.queries] = _softmax(call, tile, scores, often)
        if call.row_max is not None:
            # One more score of -inf: there may be none.
            call.row_max[tile.queries] = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf).amax(-1)
        values = value[tile.columns(share)].to(lse.dtype)  # [n, m, E]
        out[tile.queries] = (probs * _keep(call, tile) @ values).to(out.dtype)
    return out, lse


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Needs,
) -> Grads:
    """Compute the gradients that are needed.

    With probabilities P, kept pairs Z (0 or 1 / (1 - dropout_p)) and dP = Z * (dO V^T):
    dV = (Z * P)^T dO, dS = P * (dP - rowsum(P * dP) + dlse), dQ = dS K and dK = dS^T Q.
    The sink is a column of P with dP = 0. ``out`` and ``lse`` are not read: a tile holds its rows
    whole and computes them again.
    """
    query, key, value = call.query, call.key, call.value
    B, H, _, D = query.shape
    _, Hk, K, E = value.shape
    share, precision = _share(call), _precision(query)
    grad_query = torch.zeros_like(query)
    # By query head, so that no two (b, h) of a tile add to the same place; summed at the end.
    grad_key = query.new_zeros((B, H, K if needs.key else 0, D), dtype=precision)
    grad_value = query.new_zeros((B, H, K if needs.value else 0, E), dtype=precision)
    grad_sink = query.new_zeros((B, H), dtype=torch.float64)
    # In float64, which torch adds up in one order; float32 it gives to threads, who add as they come.
    grad_parts = {
        name: torch.zeros_like(call.parts[name], dtype=torch.float64) for name in parts_needed(needs)
    }
    grad_weight = query.new_zeros((H, D), dtype=torch.float64)
    for tile in _tiles(call):
        scores, often, slope = _scores(call, tile)
        probs, sink_probs, tile_lse = _softmax(call, tile, scores, often)
        keep = _keep(call, tile)
        d_out = grad_out[tile.queries].to(precision)  # [n, rows, E]
        if needs.value:
            grad_value[tile.columns(1)] += (probs * keep).mT @ d_out
        d_probs = d_out @ value[tile.columns(share)].to(precision).mT * keep  # [n, rows, m]
        d_row = -(probs * d_probs).sum(-1)  # [n, rows]
        if grad_lse is not None:
            # The lse of an empty row is a constant, whatever gradient comes in.
            d_row += grad_lse[tile.queries].masked_fill(tile_lse == -torch.inf, 0)
        grad_sink[tile.b, tile.h] += (sink_probs * d_row).sum(-1, dtype=torch.float64)
        d_scores = probs * (d_probs + d_row[..., None])  # [n, rows, m]
        for part, grad in grad_parts.items():
            if part == "edge":
                weights, _, total = _edge_bias(call, tile)
                parts = weights / total.masked_fill(total == 0, 1)[:, tile.place]  # of their pairs
                of_edge = d_scores.flatten(1)[:, tile.place] * parts
                grad.index_put_(_edge_entries(call, tile), of_edge.double(), accumulate=True)
            else:
                grad.index_put_(_entries(call, part, tile), d_scores.double(), accumulate=True)
        d_query, d_key, d_weight = _through_score(call, tile, d_scores * slope)
        grad_query[tile.queries] = d_query.to(query.dtype)
        if needs.key:
            grad_key[tile.columns(1)] += d_key
        if d_weight is not None:
            grad_weight.index_put_((tile.h,), d_weight.double(), accumulate=True)
    heads = (Hk, share)  # of H
    d_sink = None
    if needs.sink:
        assert call.sink is not None
        d_sink = torch.empty_like(call.sink).copy_(grad_sink.sum(0))
    return Grads(
        grad_query if needs.query else None,
        torch.empty_like(key).copy_(grad_key.unflatten(1, heads).sum(2)) if needs.key else None,
        torch.empty_like(value).copy_(grad_value.unflatten(1, heads).sum(2)) if needs.value else None,
        d_sink,
        grad_weight.to(precision) if needs.weight else None,
        **name_parts({name: grad.to(precision) for name, grad in grad_parts.items()}),
    )


def _precision(query: Tensor) -> torch.dtype:
    """Half precision is computed in float32 and rounded once, at the end."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _share(call: Call) -> int:
    """Count the query heads that read one key head."""
    H, Hk = call.query.shape[1], call.key.shape[1]
    return H // Hk if Hk else 1


def _tiles(call: Call) -> Iterator[_Tile]:
    """Go through the query tiles of all groups."""
    layout, (B, H, Q, _) = call.layout, call.query.shape
    group = layout.group.expand(B, H)
    for g in range(layout.groups):
        b, h = torch.nonzero(group == g, as_tuple=True)
        for t in range(-(-Q // layout.tile)):
            listed, counts = layout.columns(g, t)
            # A key is listed twice when a tile and an edge meet it; gradients go to it once.
            keys, place = torch.unique(listed, return_inverse=True)
            counts = counts.new_zeros(len(counts), len(keys)).index_add_(1, place, counts)
            rows = slice(t * layout.tile, min((t + 1) * layout.tile, Q))
            yield _Tile(b, h, rows, keys, counts, *_edges(call, g, rows, keys))


def _edges(call: Call, g: int, rows: slice, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return number and place of each edge of some rows, if a part asks for edges."""
    layout = call.layout
    if "edge" not in call.parts or not layout.edges:
        return keys[:0], keys[:0]
    ptr = layout.edge_ptr[g * layout.q_len + rows.start : g * layout.q_len + rows.stop + 1].long()
    slots = slice(int(ptr[0]), int(ptr[-1]))
    row = torch.repeat_interleave(torch.arange(len(ptr) - 1, device=ptr.device), ptr.diff())
    column = torch.searchsorted(keys, layout.edge_key[slots].long())
    return layout.edge_id[slots].long(), row * len(keys) + column


def _levels(call: Call, tile: _Tile) -> list[tuple[slice, Tensor | float]]:
    """Return ranges of dimensions, and the factors of their products at each pair [rows, m]."""
    score = call.multilevel
    if score is None:
        return [(slice(None), 1.0)]
    levels = call.layout.levels
    assert levels is not None  # the layout fits the score
    rows = torch.arange(tile.rows.start, tile.rows.stop, device=tile.keys.device)[:, None]
    spread = score.spread(levels, call.query_positions(rows), call.key_positions(tile.keys))
    return [(dims, factor.to(_precision(call.query))) for dims, factor in spread]


def _scores(call: Call, tile: _Tile) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return scores [n, rows, m], -inf where unrelated; how often each counts; their slope by q . k."""
    precision = _precision(call.query)
    queries, keys = _sides(call, tile)
    if call.additive is None:
        parts = (queries[..., dims] @ keys[..., dims].mT * factor for dims, factor in _levels(call, tile))
        scores = reduce(operator.add, parts) * call.scale
    else:
        weight, negative_slope = call.additive
        lifted = torch.nn.functional.leaky_relu(queries[:, :, None] + keys[:, None], negative_slope)
        scores = (lifted * weight[tile.h, None, None]).sum(-1) * call.scale
    slope: Tensor | float = call.scale
    if call.softcap:
        capped = torch.tanh(scores / call.softcap)
        scores = call.softcap * capped
        slope = call.scale * (1 - capped * capped)
    for part, values in call.parts.items():
        if part != "edge":
            scores = scores + values[_entries(call, part, tile)]
    often = tile.counts.to(precision)  # n edges of a pair count n times
    if "edge" in call.parts:
        bias, often = (x.view_as(scores) for x in _edge_bias(call, tile)[1:])
        scores = scores + bias
    return scores.masked_fill(tile.counts == 0, -torch.inf), often, slope


def _sides(call: Call, tile: _Tile) -> tuple[Tensor, Tensor]:
    """Return queries [n, rows, D] and keys [n, m, D] of a tile."""
    precision = _precision(call.query)
    return call.query[tile.queries].to(precision), call.key[tile.columns(_share(call))].to(precision)


def _through_score(call: Call, tile: _Tile, d_raw: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return gradients of queries [n, rows, D], keys [n, m, D] and an additive score's weight [n, D]."""
    queries, keys = _sides(call, tile)
    if call.additive is None:
        d_products = [(dims, d_raw * factor) for dims, factor in _levels(call, tile)]
        d_query = torch.cat([d @ keys[..., dims] for dims, d in d_products], -1)
        return d_query, torch.cat([d.mT @ queries[..., dims] for dims, d in d_products], -1), None
    weight, negative_slope = call.additive
    sums = queries[:, :, None] + keys[:, None]  # [n, rows, m, D]
    steepness = torch.where(sums > 0, 1, sums.new_full((), negative_slope))
    d_sums = d_raw[..., None] * weight[tile.h, None, None] * steepness
    d_weight = d_raw[..., None] * torch.nn.functional.leaky_relu(sums, negative_slope)
    return d_sums.sum(2), d_sums.sum(1), d_weight.sum((1, 2))


def _edge_entries(call: Call, tile: _Tile) -> tuple[Tensor, Tensor]:
    """Return where the part of edges has their values: indices that broadcast to [n, edges]."""
    return tile.number, tile.h[:, None] % call.parts["edge"].shape[1]


def _edge_bias(call: Call, tile: _Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(bias - largest of its pair) [n, edges]; by pair, that largest [n, rows * m] and the sums."""
    bias = call.parts["edge"][_edge_entries(call, tile)]
    place = tile.place.expand_as(bias)
    top = bias.new_full((len(bias), tile.counts.numel()), -torch.inf).scatter_reduce(1, place, bias, "amax")
    weights = torch.exp(bias - top.masked_fill(top == -torch.inf, 0)[:, tile.place])
    # In float64 for the one order of sums, as the gradients.
    total = torch.zeros_like(top, dtype=torch.float64)
    each = torch.arange(len(bias), device=bias.device)[:, None]
    total.index_put_((each, place), weights.double(), accumulate=True)
    return weights, top, total.to(bias.dtype)


def _entries(call: Call, part: str, tile: _Tile) -> tuple[Tensor, ...]:
    """Return where a part has the values of a tile's pairs: indices that broadcast to [n, rows, m]."""
    keys = tile.keys
    rows = torch.arange(tile.rows.start, tile.rows.stop, device=keys.device)[:, None]
    index: tuple[Tensor, ...] = (rows, keys)
    if part == "relative":
        index = (call.relative_entries(rows, keys),)
    elif part == "key":
        index = (keys.expand(len(rows), -1),)
    elif part == "grid":
        query_code, key_code = call.codes
        index = (query_code.long()[rows] - key_code.long()[keys],)
    # A pair's value may be for all batches or heads: size 1.
    b, h = (x[:, None, None] % n for x, n in zip((tile.b, tile.h), call.parts[part].shape, strict=False))
    return b, h, *index


def _softmax(call: Call, tile: _Tile, scores: Tensor, often: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the probabilities [n, rows, m], the sink's [n, rows], and lse [n, rows]."""
    sink = scores.new_full(scores.shape[:2], -torch.inf)
    if call.sink is not None:
        sink[:] = call.sink[tile.h, None]
    scores = torch.cat([scores, sink[..., None]], dim=-1)  # the sink: a key without a value
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0))
    weights[..., :-1] *= often
    total = weights.sum(-1, keepdim=True)
    probs = weights / total.masked_fill(total == 0, 1)  # an empty row: 0 / 1
    lse = (top + total.log()).squeeze(-1)  # an empty row: -inf + log 0
    return probs[..., :-1], probs[..., -1], lse


def _keep(call: Call, tile: _Tile) -> Tensor | float:
    """Return the factors of dropout: 0 or 1 / (1 - dropout_p)."""
    if call.dropout_p == 0:
        return 1.0
    assert call.seed is not None
    rows = torch.arange(tile.rows.start, tile.rows.stop, device=tile.keys.device)
    first_batch, first_head = call.first_numbers
    keep = keep_mask(
        call.seed,
        call.dropout_p,
        b=tile.b[:, None, None] + first_batch,
        h=tile.h[:, None, None] + first_head,
        q=call.query_positions(rows[:, None]),
        k=call.key_positions(tile.keys),
    )
    kept = 1 - call.dropout_p
    return keep.to(_precision(call.query)) / (kept if kept else 1)

"""Graphs, inputs and the same by autograd, for tests of the edge kernels of every backend."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import attnbias as ab
from attnbias.testing import assert_no_worse, make_inputs

NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")


class Numbers(Protocol):
    """The options of a backend that ``by_edge`` reads."""

    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float: ...


class Case(NamedTuple):
    """Inputs and incoming gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    dout: Tensor
    dlse: Tensor | None

    @classmethod
    def draw(
        cls,
        seed: int,
        sizes: tuple[int, ...],
        bias: tuple[int, ...] | None = None,
        *,
        lse: bool = True,
        **how: Any,
    ) -> Case:
        """Draw inputs of B, H, Hk, Q, K, D, E."""
        rng = torch.Generator().manual_seed(seed)
        q, k, v = make_inputs(rng, *sizes, **how)
        B, H, _, Q, _, _, E = sizes
        values = None if bias is None else torch.randn(bias, generator=rng)
        dout = torch.randn(B, H, Q, E, generator=rng).to(q.dtype)
        return cls(q, k, v, values, dout, torch.randn(B, H, Q, generator=rng) if lse else None)


def by_edge(case: Case, layout: ab.Layout, options: Numbers, dtype: torch.dtype) -> list[Tensor | None]:
    """Compute results and gradients from a list of edges, by autograd in one precision."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in case[:3])
    bias = None if case.bias is None else case.bias.detach().clone().to(wide).requires_grad_()
    B, H, Q, _ = q.shape
    group = layout.group.long().expand(B, H)
    outs, lses = [], []
    for b, h in itertools.product(range(B), range(H)):
        g, hk = int(group[b, h]), h // (H // k.shape[1])
        ptr = layout.edge_ptr[g * Q : (g + 1) * Q + 1].long()
        row = torch.repeat_interleave(torch.arange(Q), ptr[1:] - ptr[:-1])
        at = slice(int(ptr[0]), int(ptr[-1]))
        key, number = layout.edge_key[at].long(), layout.edge_id[at].long()
        if Q * k.shape[2] < 1 << 20:  # like attnbias.testing.eager, with the same rounding errors
            s = (q[b, h].to(wide) @ k[b, hk].to(wide).T).to(dtype).to(wide)[row, key] * options.scale
        else:
            s = (q[b, h][row].to(wide) * k[b, hk][key].to(wide)).sum(-1).to(dtype).to(wide) * options.scale
        if options.softcap:
            s = options.softcap * torch.tanh(s / options.softcap)
        if bias is not None:
            s = s + (bias[number] if bias.dim() == 1 else bias[number, h])
        top = torch.full((Q,), -torch.inf, dtype=wide).scatter_reduce(0, row, s.detach(), "amax")
        top = top.masked_fill(top == -torch.inf, 0)
        weight = torch.exp(s - top[row])
        total = torch.zeros(Q, dtype=wide).index_add(0, row, weight)
        empty = total == 0
        total = total.masked_fill(empty, 1)
        lses.append((top + total.log()).masked_fill(empty, -torch.inf))
        p = (weight / total[row]).to(dtype).to(wide)
        outs.append(
            torch.zeros(Q, v.shape[3], dtype=wide).index_add(0, row, p[:, None] * v[b, hk][key].to(wide))
        )
    out = torch.stack(outs).view(B, H, Q, -1).to(dtype)
    lse = torch.stack(lses).view(B, H, Q)
    seen = [out], [case.dout.to(dtype)]
    if case.dlse is not None:
        seen = [out, lse], [case.dout.to(dtype), case.dlse.to(wide)]
    torch.autograd.backward(*seen)
    return [out, lse, q.grad, k.grad, v.grad, None if bias is None else bias.grad]


def assert_right(got: list[Tensor | None], case: Case, layout: ab.Layout, options: Numbers) -> None:
    """Compare with float64; the yardstick is autograd in the precision of the inputs."""
    same = by_edge(case, layout, options, case.q.dtype)
    oracle = by_edge(case, layout, options, torch.float64)
    for name, mine, eagers, truth in zip(NAMES, got, same, oracle, strict=True):
        if mine is not None:
            assert eagers is not None and truth is not None
            assert_no_worse(name, mine, eagers, truth, 2 if name in ("out", "lse") else 3)


def assert_same(left: list[Tensor | None], right: list[Tensor | None]) -> None:
    for name, x, y in zip(NAMES, left, right, strict=True):
        assert (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y)), name


def graph(seed: int, Q: int, K: int, edges: int, rows: int | None = None) -> ab.Layout:
    """Draw random edges, some of them twice, in no order; only the first rows have any."""
    rng = torch.Generator().manual_seed(seed)
    key = torch.randint(0, K, (edges,), generator=rng)
    row = torch.randint(0, rows or Q, (edges,), generator=rng)
    index = torch.stack((key, row))
    index[:, edges // 2 :: 5] = index[:, : len(index[0, edges // 2 :: 5])]
    return ab.Layout.build(ab.Graph(index, size=(K, Q)), Q, K, form="edges")


def hubs(Q: int, K: int, hub_row: int, hub_column: int) -> ab.Layout:
    """Make a row and a column with two edges to everything, and a few more edges."""
    row = torch.cat((torch.full((2 * K,), hub_row), torch.arange(Q).repeat(2), torch.arange(Q)))
    key = torch.cat((torch.arange(K).repeat(2), torch.full((2 * Q,), hub_column), torch.arange(Q) * 7 % K))
    return ab.Layout.build(ab.Graph(torch.stack((key, row)), size=(K, Q)), Q, K, form="edges")


def mixed(n: int) -> ab.Layout:
    """Make dense rows, then rows with a few edges, some twice, then empty rows."""
    dense = torch.cartesian_prod(torch.arange(0, 70), torch.arange(0, 128))
    rng = torch.Generator().manual_seed(0)
    few = torch.stack(
        (torch.randint(128, n - 5, (200,), generator=rng), torch.randint(0, n, (200,), generator=rng)), 1
    )
    pairs = torch.cat((dense, few, few[:20]))
    layout = ab.Layout.build(ab.Graph(pairs.T.flip(0), num_nodes=n), n, n, tile=64)
    assert layout.tiles and layout.edges
    return layout

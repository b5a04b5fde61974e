"""The attention problems that are timed: a relation, sizes, and what each peer calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

import attnbias as ab
from attnbias.testing import assert_no_worse, eager, magnitudes

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

NEIGHBOURS = 16
WINDOW = 256
CHECKED_ROWS = 256


@dataclass(frozen=True)
class Case:
    """One call of ``attention``; the fields below ``dtype`` tell peers how they would say it."""

    name: str
    relation: ab.Relation
    tokens: int  # keys
    queries: int | None = None  # None: as many as keys; fewer stand at the end, as in decoding
    batch: int = 1
    heads: int = 4
    key_heads: int | None = None
    size: int = 64  # D and E
    dtype: torch.dtype = torch.float32
    is_full: bool = False
    is_causal: bool = False
    window: int = 0  # keys of a row, itself included
    documents: tuple[int, ...] = ()  # lengths; each is causal
    neighbours: Tensor | None = None  # [tokens, n]
    mask_mod: MaskMod | None = None

    @property
    def q_len(self) -> int:
        return self.tokens if self.queries is None else self.queries

    @cached_property
    def layout(self) -> ab.Layout:
        """Built anew: the time of building is measured elsewhere."""
        return ab.Layout.build(self.relation, self.q_len, self.tokens, q_start="end")

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw q, k, v and the gradient of out, the same ones each time."""
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int, length: int) -> Tensor:
            shape = (self.batch, heads, length, self.size)
            return torch.randn(shape, generator=generator).to(self.dtype)

        key_heads = self.key_heads or self.heads
        return (
            draw(self.heads, self.q_len),
            draw(key_heads, self.tokens),
            draw(key_heads, self.tokens),
            draw(self.heads, self.q_len),
        )

    def flops(self, *, backward: bool) -> float:
        """Useful floating-point operations: two products forward and five backward, related pairs only."""
        pairs = self.relation.count(self.q_len, self.tokens, "end")
        return (14.0 if backward else 4.0) * pairs * self.size * self.heads * self.batch

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute it here."""
        return ab.attention(q, k, v, self.layout, q_start=self.layout.q_start)

    @cached_property
    def fault(self) -> str:
        """What is wrong with results and gradients against float64; empty = nothing.

        One key head is looked at, and gradients that come from some rows: all keys take part, and the
        cost stays far below all pairs.
        """
        share = self.heads // (self.key_heads or self.heads)
        q, k, v = (
            x[:1, :heads].requires_grad_() for x, heads in zip(self.inputs(), (share, 1, 1), strict=False)
        )
        rows = torch.linspace(0, self.q_len - 1, min(self.q_len, CHECKED_ROWS)).long()
        d_out = torch.randn(1, share, len(rows), self.size).to(self.dtype)
        mask = self.relation.related(rows[:, None] + self.layout.q_start, torch.arange(self.tokens))

        def results(attend: Attend, dtype: torch.dtype) -> list[Tensor]:
            leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
            out = attend(*leaves)
            return [out, *torch.autograd.grad(out, leaves, d_out.to(dtype))]

        def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return eager(q[:, :, rows], k, v, mask)[0]

        got = results(lambda q, k, v: self.attend(q, k, v)[:, :, rows], self.dtype)
        same, exact = results(textbook, self.dtype), results(textbook, torch.float64)
        sizes = magnitudes(q, k, v, d_out, torch.zeros(1, share, len(rows)), self.size**-0.5)
        names = ("out", "query", "key", "value")
        try:
            for name, mine, theirs, truth in zip(names, got, same, exact, strict=True):
                factor = 2.0 if name == "out" else 3.0
                assert_no_worse(name, mine, theirs, truth, factor, magnitude=sizes[name])
        except AssertionError as error:
            return str(error)
        return ""


def full(tokens: int) -> Case:
    return Case("full", ab.Full(), tokens, is_full=True)


def causal(tokens: int, **sizes: object) -> Case:
    return Case(
        "causal",
        ab.Causal(),
        tokens,
        is_causal=True,
        mask_mod=lambda b, h, q, k: k <= q,
        **sizes,  # type: ignore[arg-type]
    )


def window(tokens: int) -> Case:
    return Case(
        f"window {WINDOW}",
        ab.Window(before=WINDOW - 1),
        tokens,
        window=WINDOW,
        mask_mod=lambda b, h, q, k: (k <= q) & (q - k < WINDOW),
    )


def documents(tokens: int, count: int = 16) -> Case:
    """Documents of random lengths, multiples of 16, each causal."""
    cuts = np.random.RandomState(1).choice(np.arange(1, tokens // 16), count - 1, replace=False)
    lengths = torch.from_numpy(np.diff([0, *sorted(16 * cuts), tokens]))
    ids = torch.repeat_interleave(torch.arange(count), lengths)
    return Case(
        f"{count} documents & causal",
        ab.Documents(ids) & ab.Causal(),
        tokens,
        documents=tuple(lengths.tolist()),
        mask_mod=lambda b, h, q, k: (k <= q) & (ids[q] == ids[k]),
    )


def nearest(tokens: int) -> Case:
    """Each point of a random cloud in the plane with its nearest ones, points in Morton order."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(tokens, 2, generator=generator, dtype=torch.float64)
    points = points[morton(points).argsort()]
    index = torch.cat(
        [torch.cdist(part, points).topk(NEIGHBOURS, largest=False).indices for part in points.split(1024)]
    )
    return Case(f"kNN {NEIGHBOURS}", ab.Neighbors(index), tokens, neighbours=index)


def morton(points: Tensor) -> Tensor:
    """Interleave the bits of the coordinates, 16 of each."""
    bits = torch.arange(16)
    cells = (points * 65535).long()[..., None] >> bits & 1  # [n, 2, 16]
    return (cells << (2 * bits + torch.arange(2)[:, None])).sum((1, 2))


def decoding(tokens: int) -> Case:
    """One query at the end of a cache of keys."""
    return Case("decoding", ab.Causal(), tokens, queries=1, is_full=True)


# What the floors speak of; `attnbias bench` times the quick ones.
CASES: dict[str, Callable[[], Case]] = {
    "window@4096": lambda: window(4096),
    "window@16384": lambda: window(16384),
    "causal@2048": lambda: causal(2048),
    "causal@8192": lambda: causal(8192),
    "full@2048": lambda: full(2048),
    "documents@8192": lambda: documents(8192),
    "knn@16384": lambda: nearest(16384),
    "bfloat16 causal@2048": lambda: causal(2048, dtype=torch.bfloat16),
    "D=32 causal@2048": lambda: causal(2048, size=32),
    "D=80 causal@2048": lambda: causal(2048, size=80),
    "D=128 causal@2048": lambda: causal(2048, size=128),
    "heads 8/2 causal@2048": lambda: causal(2048, heads=8, key_heads=2),
    "decoding@8192": lambda: decoding(8192),
    "32 x causal@128": lambda: causal(128, batch=32),
    "1 head causal@128": lambda: causal(128, heads=1),
}
QUICK = ("causal@2048", "full@2048", "window@4096", "documents@8192", "knn@16384", "decoding@8192")

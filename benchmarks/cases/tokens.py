"""The attention problems that are timed: a relation and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch import Tensor

import attnbias as ab
from attnbias.relations.orders import morton
from attnbias.testing.compare import by_relation, compare_rows

if TYPE_CHECKING:
    from typing_extensions import Unpack

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

NEIGHBOURS = 16
WINDOW = 256
CHUNK = 256
BLOCK = 64  # tokens of a BigBird block
CHECKED_ROWS = 256


class Sizes(TypedDict, total=False):
    """Optional arguments of a case."""

    batch: int
    heads: int
    key_heads: int | None
    size: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Case:
    """One call of ``attention``, and the same mask as FlexAttention's function of positions."""

    name: str
    relation: ab.Relation
    tokens: int  # keys
    queries: int | None = None  # None: as many as keys; fewer are the last ones, as in decoding
    batch: int = 1
    heads: int = 4
    key_heads: int | None = None
    size: int = 64  # D and E
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    backend: str | None = None  # None: the default
    mask_mod: MaskMod | None = None

    @property
    def q_len(self) -> int:
        return self.tokens if self.queries is None else self.queries

    def build(self) -> ab.Layout:
        """Build the layout without any cache."""
        return ab.Layout.build(self.relation, self.q_len, self.tokens, q_start="end", device=self.device)

    @cached_property
    def layout(self) -> ab.Layout:
        """Return the layout, built once: building is timed separately."""
        return self.build()

    @cached_property
    def pairs(self) -> int:
        """Return the number of related pairs of one head."""
        return self.relation.count(self.q_len, self.tokens, "end")

    @property
    def density(self) -> float:
        """Return the share of all pairs that are related."""
        return self.pairs / (self.q_len * self.tokens)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw q, k, v and the gradient of out, the same ones each time."""
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int, length: int) -> Tensor:
            shape = (self.batch, heads, length, self.size)
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        key_heads = self.key_heads or self.heads
        return (
            draw(self.heads, self.q_len),
            draw(key_heads, self.tokens),
            draw(key_heads, self.tokens),
            draw(self.heads, self.q_len),
        )

    def flops(self, *, backward: bool) -> float:
        """Count useful floating-point operations: two products forward, five backward, related pairs only."""
        return (14.0 if backward else 4.0) * self.pairs * self.size * self.heads * self.batch

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the case with attnbias."""
        return ab.attention(q, k, v, self.given, q_start=self.layout.q_start, backend=self.backend)

    def attend_by_default(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute it as a user does who names neither a layout nor a backend."""
        return ab.attention(q, k, v, self.relation, q_start="end")

    @cached_property
    def given(self) -> ab.Layout | ab.Relation:
        """Return the layout, or the relation for backends that read only relations."""
        return self.relation if self.backend in ("sdpa", "reference") else self.layout

    @cached_property
    def fault(self) -> str:
        """Compare results and gradients with float64; return what is wrong, or "".

        Looks at one key head and at the gradients that come from some rows. All keys take part, and the
        cost stays far below that of all pairs.
        """
        share = self.heads // (self.key_heads or self.heads)
        query, key, value, _ = self.inputs()
        rows = torch.linspace(0, self.q_len - 1, min(self.q_len, CHECKED_ROWS)).long()
        inputs = query[:1, :share], key[:1, :1], value[:1, :1]
        textbook = by_relation(self.relation, self.layout.q_start)
        return "\n".join(compare_rows(self.attend, textbook, inputs, rows))


def full(tokens: int, queries: int | None = None, **sizes: Unpack[Sizes]) -> Case:
    return Case("full" if queries is None else "cross", ab.Full(), tokens, queries, **sizes)


def causal(tokens: int, **sizes: Unpack[Sizes]) -> Case:
    return Case("causal", ab.Causal(), tokens, mask_mod=lambda b, h, q, k: k <= q, **sizes)


def window(tokens: int, width: int = WINDOW, **sizes: Unpack[Sizes]) -> Case:
    return Case(
        f"window {width}",
        ab.Window(before=width - 1),
        tokens,
        mask_mod=lambda b, h, q, k: (k <= q) & (q - k < width),
        **sizes,
    )


def documents(tokens: int, count: int = 16, **sizes: Unpack[Sizes]) -> Case:
    """Make causal documents of random lengths, multiples of 16."""
    cuts = np.random.RandomState(1).choice(np.arange(1, tokens // 16), count - 1, replace=False)
    lengths = torch.from_numpy(np.diff([0, *sorted(16 * cuts), tokens]))
    ids = torch.repeat_interleave(torch.arange(count), lengths)
    there = ids.to(sizes.get("device", "cpu"))
    return Case(
        f"{count} documents & causal",
        ab.Documents(ids) & ab.Causal(),
        tokens,
        mask_mod=lambda b, h, q, k: (k <= q) & (there[q] == there[k]),
        **sizes,
    )


def prefix(tokens: int, **sizes: Unpack[Sizes]) -> Case:
    """Let all tokens attend to the first quarter; the rest is causal."""
    length = tokens // 4
    relation = ab.Causal() | ab.Prefix(length)
    return Case("prefix", relation, tokens, mask_mod=lambda b, h, q, k: (k <= q) | (k < length), **sizes)


def bipartite(tokens: int, **sizes: Unpack[Sizes]) -> Case:
    """Let the second half attend to the first, which attends to nothing."""
    split = tokens // 2
    return Case(
        "bipartite",
        ab.Bipartite(split),
        tokens,
        mask_mod=lambda b, h, q, k: (q >= split) & (k < split),
        **sizes,
    )


def chunks(tokens: int, **sizes: Unpack[Sizes]) -> Case:
    return Case(
        f"chunks of {CHUNK}",
        ab.Chunks(CHUNK),
        tokens,
        mask_mod=lambda b, h, q, k: q // CHUNK == k // CHUNK,
        **sizes,
    )


def dilated(tokens: int, **sizes: Unpack[Sizes]) -> Case:
    """Take every fourth of the 512 previous keys."""
    return Case(
        "dilated 4 x 128",
        ab.Dilated(4, before=127),
        tokens,
        mask_mod=lambda b, h, q, k: (k <= q) & (q - k < 4 * 128) & ((q - k) % 4 == 0),
        **sizes,
    )


def bigbird(tokens: int, **sizes: Unpack[Sizes]) -> Case:
    """Join a window, global tokens and three random blocks per block of queries."""
    blocks = ab.RandomBlocks(BLOCK, 3, seed=0)
    starts = torch.arange(0, tokens, BLOCK)
    listed = blocks.related(starts[:, None], starts).to(sizes.get("device", "cpu"))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = (q - k).abs() <= BLOCK
        return near | (q < BLOCK) | (k < BLOCK) | listed[q // BLOCK, k // BLOCK]

    relation = ab.Window(before=BLOCK, after=BLOCK) | ab.Global(range(BLOCK)) | blocks
    return Case("BigBird", relation, tokens, mask_mod=mask_mod, **sizes)


def neighborhood(grid: tuple[int, ...], radius: int, **sizes: Unpack[Sizes]) -> Case:
    """Relate near points of a grid; at a border the neighbourhood moves inwards, as in NATTEN."""
    tokens = int(np.prod(grid))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = (q >= 0) & (k >= 0)
        for length in reversed(grid):
            centre = (q % length).clamp(radius, length - 1 - radius)
            near = near & ((centre - k % length).abs() <= radius)
            q, k = q // length, k // length
        return near

    name = f"{'x'.join(str(2 * radius + 1) for _ in grid)} neighbours"
    relation = ab.Neighborhood(grid, radius, border="clamp")
    return Case(name, relation, tokens, mask_mod=mask_mod, **sizes)


def nearest(tokens: int, **sizes: Unpack[Sizes]) -> Case:
    """Relate each point of a random plane cloud to its nearest points; points are in Morton order."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(tokens, 2, generator=generator, dtype=torch.float64)
    points = points[torch.from_numpy(morton(points))]
    index = torch.cat(
        [torch.cdist(part, points).topk(NEIGHBOURS, largest=False).indices for part in points.split(1024)]
    )
    return Case(f"kNN {NEIGHBOURS}", ab.Neighbors(index), tokens, **sizes)


def decoding(tokens: int, **sizes: Unpack[Sizes]) -> Case:
    """Make one query at the end of a cache of keys."""
    return Case("decoding", ab.Causal(), tokens, queries=1, **sizes)


Named = dict[str, Callable[[], Case]]

# The cases that floors refer to; `attnbias bench --full` times all of them.
CASES: Named = {
    "full@2048": lambda: full(2048),
    "cross@1024x2048": lambda: full(2048, 1024),
    "causal@2048": lambda: causal(2048),
    "causal@8192": lambda: causal(8192),
    "prefix@2048": lambda: prefix(2048),
    "bipartite@2048": lambda: bipartite(2048),
    "window@4096": lambda: window(4096),
    "window@16384": lambda: window(16384),
    "chunks@2048": lambda: chunks(2048),
    "dilated@2048": lambda: dilated(2048),
    "dilated@16384": lambda: dilated(16384),
    "bigbird@2048": lambda: bigbird(2048),
    "bigbird@16384": lambda: bigbird(16384),
    "documents@8192": lambda: documents(8192),
    "grid@48x48": lambda: neighborhood((48, 48), 6),
    "grid@128x128": lambda: neighborhood((128, 128), 6),
    "grid@12x12x16": lambda: neighborhood((12, 12, 16), 2),
    "grid@24x24x24": lambda: neighborhood((24, 24, 24), 2),
    "knn@4096": lambda: nearest(4096),
    "knn@16384": lambda: nearest(16384),
    "decoding@8192": lambda: decoding(8192),
    "bfloat16 causal@2048": lambda: causal(2048, dtype=torch.bfloat16),
    "D=32 causal@2048": lambda: causal(2048, size=32),
    "D=80 causal@2048": lambda: causal(2048, size=80),
    "D=128 causal@2048": lambda: causal(2048, size=128),
    "heads 8/2 causal@2048": lambda: causal(2048, heads=8, key_heads=2),
    "32 x causal@128": lambda: causal(128, batch=32),
    "1 head causal@128": lambda: causal(128, heads=1),
}
QUICK = (
    *("full@2048", "cross@1024x2048", "causal@2048", "prefix@2048", "bipartite@2048", "window@4096"),
    *("chunks@2048", "dilated@2048", "bigbird@2048", "documents@8192", "grid@48x48", "grid@12x12x16"),
    *("knn@4096", "decoding@8192"),
)

# GPU cases have the shapes of attention-gym: bfloat16, the same number of tokens in every batch.
GPU_TOKENS, GPU_LENGTHS, GPU_HEADS = 32768, (2048, 8192, 32768), 16
GPU_BASE = "@8192 D=64 16/16"  # the shape in which a quick run times every relation
GPU_MAKERS: dict[str, Callable[..., Case]] = {
    "full": full,
    "causal": causal,
    "prefix": prefix,
    "bipartite": bipartite,
    "window": partial(window, width=1024),
    "chunks": chunks,
    "dilated": dilated,
    "bigbird": bigbird,
    "documents": documents,
}


def gpu_cases(device: str) -> Named:
    """Return every relation at each length, head size and number of key heads, on a GPU."""
    named: Named = {}
    for length in GPU_LENGTHS:
        for size in (64, 128):
            for key_heads in (GPU_HEADS, GPU_HEADS // 4):
                sizes: Sizes = {
                    "batch": GPU_TOKENS // length,
                    "heads": GPU_HEADS,
                    "key_heads": None if key_heads == GPU_HEADS else key_heads,
                    "size": size,
                    "dtype": torch.bfloat16,
                    "device": device,
                }
                for name, make in GPU_MAKERS.items():
                    shape = f"{name}@{length} D={size} {GPU_HEADS}/{key_heads}"
                    named[shape] = partial(make, length, **sizes)
    half: Sizes = {"heads": GPU_HEADS, "dtype": torch.bfloat16, "device": device}
    named["grid@128x128 D=64"] = partial(neighborhood, (128, 128), 6, **half)
    named["grid@32x32x32 D=64"] = partial(neighborhood, (32, 32, 32), 3, **half)
    named["knn@32768 D=64"] = partial(nearest, 32768, **half)
    named["decoding@32768 D=64"] = partial(decoding, 32768, **half)

    def more(tokens: int, size: int = 64, dtype: torch.dtype = torch.bfloat16) -> Sizes:
        batch = max(1, GPU_TOKENS // tokens // 2)
        return {"batch": batch, "heads": GPU_HEADS, "size": size, "dtype": dtype, "device": device}

    named["causal@8192 D=96"] = partial(causal, 8192, **more(8192, 96))
    named["causal@8192 D=256"] = partial(causal, 8192, **more(8192, 256))
    named["causal@8192 D=64 fp32"] = partial(causal, 8192, **more(8192, dtype=torch.float32))
    named["causal@256 D=64"] = partial(causal, 256, **more(256))
    named["window@1024 D=64"] = partial(window, 1024, **more(1024))
    return named


def is_quick_on_gpu(name: str) -> bool:
    """Return whether a quick run on a GPU times it: each relation in one shape, and causal in all."""
    return "/" not in name or GPU_BASE in name or name.startswith("causal@8192 D=128")

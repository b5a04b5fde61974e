"""Time and memory of building the layout of every recipe, and of FlexAttention's mask for the same pairs."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

from torch.nn.attention.flex_attention import create_block_mask

from attnbias import Layout

from ..cases.recipes import PATTERNS, Pattern
from . import terminal
from .graph_memory import PEAK, resident
from .timing import CPU, Spread, one_thread

TOKENS = 65_536
CHECKED = 2_048  # tokens at which layout, relation and mask_mod are compared
PATIENCE = 2.0  # seconds: what took longer is not sampled again


def peer_tokens(*, is_full: bool) -> int:
    """Return the tokens of the comparison with ``create_block_mask``, which visits every pair."""
    return 16_384 if is_full else 4_096


def added_bytes(function: Callable[[], object]) -> int | None:
    """Return the peak of resident memory during a call, beyond what there was; None where nothing tells."""
    if not PEAK.exists():
        return None
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # freed memory would be used again without being seen
        trim(0)
    PEAK.write_text("5")  # resets the peak to what is in use now
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def sample_in_turn(functions: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Sample each function once per round; stop early when they have taken long enough."""
    samples: list[list[float]] = [[] for _ in functions]
    while len(samples[0]) < rounds and sum(map(sum, samples)) < PATIENCE:
        for function, times in zip(functions, samples, strict=True):
            times.append(CPU.sample(function))
    return samples


def _size(count: int | None) -> str:
    return "" if count is None else terminal.size(count)


def own_row(name: str, make: Callable[[int], Pattern], rounds: int) -> list[str]:
    """Time and count one recipe."""
    terminal.progress(f"{name}, {TOKENS:,} tokens")
    pattern = make(TOKENS)
    first: list[float] = []
    built: list[Layout] = []

    def build() -> None:
        built.append(pattern.build())

    used = added_bytes(lambda: first.append(CPU.sample(build)))
    (samples,) = sample_in_turn([pattern.build], rounds) if first[0] < PATIENCE else [first]
    stats = built[0].stats()
    return [
        name,
        f"{pattern.queries:,} x {pattern.keys:,}",
        terminal.times(Spread.of(samples)),
        _size(used),
        f"{stats.tiles_full:,}",
        f"{stats.tiles_partial:,}",
        f"{stats.edges:,}",
        terminal.size(stats.bytes),
    ]


def peer_row(name: str, make: Callable[[int], Pattern], tokens: int, rounds: int) -> list[str]:
    """Compare one recipe with FlexAttention, round by round."""
    terminal.progress(f"{name} and create_block_mask, {tokens:,} tokens")
    pattern = make(tokens)

    def peer() -> object:
        return create_block_mask(pattern.mask_mod, None, None, pattern.queries, pattern.keys, device="cpu")

    used = [added_bytes(pattern.build), added_bytes(peer)]  # which warms them up
    ours, theirs = sample_in_turn([pattern.build, peer], rounds)
    ratios = Spread.of([other / mine for mine, other in zip(ours, theirs, strict=True)])
    times = [terminal.times(Spread.of(samples)) for samples in (ours, theirs)]
    return [name, *times, terminal.ratio(ratios), *map(_size, used)]


def run(tokens: int, rounds: int) -> None:
    """Measure and print both tables; ``tokens`` are those of the comparison."""
    for make in PATTERNS.values():
        make(CHECKED).check()
    with one_thread():
        own = [own_row(name, make, rounds) for name, make in PATTERNS.items()]
        raced = [peer_row(name, make, tokens, rounds) for name, make in PATTERNS.items()]
    terminal.progress("")
    terminal.table(
        f"Layouts of recipes, {TOKENS:,} tokens",
        ["recipe", "queries x keys", "time", "peak memory", "full tiles", "partial", "edges", "size"],
        own,
    )
    terminal.table(
        f"The same pairs by create_block_mask, {tokens:,} tokens",
        ["recipe", "attnbias", "create_block_mask", "times attnbias", "peak memory", "its peak memory"],
        raced,
    )

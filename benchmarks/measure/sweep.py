"""Speed against density and against length: where tiles, edges and dense attention are best."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attnbias as ab

from ..cases.tokens import Case, Sizes, causal, window
from ..peers.registry import DENSE, PEERS
from .race import OURS, steps
from .record import LengthPoint, SweepPoint, numbers
from .timing import Spread, Timer, interleave

DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
QUICK_DENSITIES = (0.001, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0)
BLOCK = 64
AUTO, TILES, EDGES = "auto", "tiles", "edges"
MASKED = "SDPA, mask"
TOLERATED = 1.05  # of the automatic choice over the better of tiles and edges


def random_pairs(tokens: int, density: float) -> ab.Relation:
    """Draw pairs one by one, the worst case for tiles."""
    return ab.Dense(_draw(tokens, density))


def random_blocks(tokens: int, density: float) -> ab.Relation:
    """Draw whole blocks of 64 x 64, which block-sparse kernels are made for."""
    blocks = _draw(tokens // BLOCK, density)
    return ab.Dense(blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1))


def windows(tokens: int, density: float) -> ab.Relation:
    """Make a window on both sides of the query that holds this share of the keys."""
    reach = round(density * tokens / 2) if density < 1 else tokens
    return ab.Window(before=reach, after=reach)


STRUCTURES: dict[str, Callable[[int, float], ab.Relation]] = {
    "random pairs": random_pairs,
    "window": windows,
    "random blocks of 64": random_blocks,
}


def _draw(size: int, density: float) -> Tensor:
    """Draw booleans of a density; the diagonal is set, so that no peer meets an empty row."""
    drawn = torch.rand(size, size, generator=torch.Generator().manual_seed(0)) < density
    return drawn | torch.eye(size, dtype=torch.bool)


def measure_density(
    structure: str,
    density: float,
    tokens: int,
    *,
    backward: bool,
    rounds: int,
    timer: Timer,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
) -> SweepPoint:
    """Time the automatic choice, both forms and dense attention at one density.

    Raises:
        AssertionError: if the results are wrong.
    """
    relation = STRUCTURES[structure](tokens, density)
    case = Case(structure, relation, tokens, device=device, dtype=dtype, heads=heads)
    if case.fault:
        raise AssertionError(f"{structure}, {density:.1%}: wrong results\n{case.fault}")
    inputs = case.inputs()
    layouts = {AUTO: case.layout}
    for form in (TILES, EDGES):
        layouts[form] = ab.Layout.build(relation, tokens, tokens, device=device, form=form)  # type: ignore[arg-type]
    functions = {
        form: steps(partial(ab.attention, relation=layout), inputs, backward=backward)
        for form, layout in layouts.items()
    }
    for name in (MASKED, DENSE):
        functions[name] = steps(PEERS[name](case), inputs, backward=backward)
    same = [form for form in (TILES, EDGES) if layouts[form] == case.layout]
    for form in same:  # the same lists are not timed twice: any difference would be chance
        del functions[form]
    samples = dict(zip(functions, interleave(list(functions.values()), rounds, timer), strict=True))
    samples |= dict.fromkeys(same, samples[AUTO])
    stats = case.layout.stats()
    return {
        "structure": structure,
        "backward": backward,
        "tokens": tokens,
        "density": case.density,
        "chosen": "both" if stats.edges and case.layout.tiles else EDGES if stats.edges else TILES,
        "seconds": {name: numbers(Spread.of(each)) for name, each in samples.items()},
        "ratios": {
            name: numbers(Spread.of([x / y for x, y in zip(each, samples[AUTO], strict=True)]))
            for name, each in samples.items()
            if name != AUTO
        },
    }


def regret(point: SweepPoint) -> float:
    """Return the automatic choice's time over that of the better form; 1 if it is that form."""
    return 1 / min(1.0, *(point["ratios"][form][0] for form in (TILES, EDGES)))


def crossover(points: list[SweepPoint], peer: str = DENSE) -> float | None:
    """Return the density from which a peer is quicker, interpolated between two points; None if never."""
    known = sorted((point["density"], point["ratios"][peer][0]) for point in points)
    for (below, gain), (above, loss) in pairwise(known):
        if gain >= 1 > loss:
            share = math.log(gain) / math.log(gain / loss)
            return float(below * (above / below) ** share)
    return None


def measure_lengths(
    tokens: int,
    *,
    rounds: int,
    timer: Timer,
    with_dense: bool,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
) -> list[LengthPoint]:
    """Measure the forward time at one length: our window and causal, and SDPA's dense calls if wanted."""
    sizes: Sizes = {"device": device, "dtype": dtype, "heads": heads}
    made = [window(tokens, **sizes), causal(tokens, **sizes)]
    functions = {f"{OURS}, {case.name}": steps(case.attend, case.inputs(), backward=False) for case in made}
    if with_dense:
        inputs = made[1].inputs()
        call = partial(scaled_dot_product_attention, is_causal=True)
        functions["SDPA, causal"] = steps(call, inputs, backward=False)
        functions["SDPA, full"] = steps(scaled_dot_product_attention, inputs, backward=False)
    samples = interleave(list(functions.values()), rounds, timer)
    return [
        {"what": what, "tokens": tokens, "seconds": numbers(Spread.of(each))}
        for what, each in zip(functions, samples, strict=True)
    ]

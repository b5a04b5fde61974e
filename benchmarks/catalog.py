"""The named cases of a device: relations among tokens, and graphs."""

from __future__ import annotations

from functools import partial

from .cases import CASES, GPU_QUICK, QUICK, Case, Named, gpu_cases
from .graph_cases import GRAPHS, SHAPES, GraphCase

QUICK_GRAPHS = ("airfoil 4x32", "mol1024 4x32")


def _graph_case(name: str, heads: int, size: int) -> Case:
    return GraphCase.of(GRAPHS[name](), heads, size)


def graph_cases() -> Named:
    """Every graph with each number and size of heads; one that is not at hand raises when it is made."""
    return {
        f"{name} {heads}x{size}": partial(_graph_case, name, heads, size)
        for name in GRAPHS
        for heads, size in SHAPES
    }


def cases_of(device: str, *, is_quick: bool) -> Named:
    """The named cases of a device: those of a quick run, or all."""
    if not device.startswith("cuda"):
        everything = {**CASES, **graph_cases()}
        return {name: everything[name] for name in (*QUICK, *QUICK_GRAPHS)} if is_quick else everything
    named = gpu_cases(device)
    if is_quick:  # one shape of each relation
        named = {name: make for name, make in named.items() if "/" not in name or GPU_QUICK in name}
    return named


def is_graph(name: str) -> bool:
    """Whether a case is a graph or a list of neighbours."""
    return "knn" in name or name in graph_cases()

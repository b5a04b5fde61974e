"""The named cases of a device: relations among tokens, and graphs."""

from __future__ import annotations

from functools import partial

from .graphs import GRAPHS, SHAPES, GraphCase
from .tokens import CASES, QUICK, Case, Named, gpu_cases, is_quick_on_gpu

QUICK_GRAPHS = ("airfoil 4x32", "mol1024 4x32")
GPU_QUICK_GRAPHS = (*QUICK_GRAPHS, "SBM batch 8x16", "R-MAT 170k 4x32")


def _graph_case(name: str, heads: int, size: int, device: str) -> Case:
    return GraphCase.of(GRAPHS[name](), heads, size, device)


def graph_cases(device: str = "cpu") -> Named:
    """Return every graph with every number and size of heads; making a missing graph raises."""
    return {
        f"{name} {heads}x{size}": partial(_graph_case, name, heads, size, device)
        for name in GRAPHS
        for heads, size in SHAPES
    }


def cases_of(device: str, *, is_quick: bool) -> Named:
    """Return the named cases of a device, all or those of a quick run."""
    if not device.startswith("cuda"):
        everything = {**CASES, **graph_cases()}
        return {name: everything[name] for name in (*QUICK, *QUICK_GRAPHS)} if is_quick else everything
    relations, graphs = gpu_cases(device), graph_cases(device)
    if is_quick:
        relations = {name: make for name, make in relations.items() if is_quick_on_gpu(name)}
        graphs = {name: graphs[name] for name in GPU_QUICK_GRAPHS}
    return {**relations, **graphs}


def is_graph(name: str) -> bool:
    """Return whether a case is a graph or a list of neighbours."""
    return "knn" in name or name in graph_cases()

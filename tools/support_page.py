"""Write docs/support.md, what each backend can run, from the backends' own ``why_not``: ``python tools/support_page.py``.

The questions are asked with tensors of a CPU. Only what a backend says about the machine is replaced: there is a
C++ library, and a GPU of sm_90 with Triton and NVIDIA's packages.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import attnbias as ab
from attnbias.kernels.launch.config import Target
from attnbias.op.dispatch import BACKENDS, IN_OP
from attnbias.op.problem import Problem

PAGE = Path(__file__).parent.parent / "docs" / "support.md"
ORDER = ("triton", "cpu", "cudnn", "sdpa", "rows", "reference")
LENGTH, HEADS, GRID = 256, 2, (16, 16)

HEAD = """\
# Support matrix

What each backend computes, by its own answer (`why_not`), the same that `ab.explain` prints. This page is generated: `python tools/support_page.py`.
Unless a row says otherwise: float32 (`cudnn`: bfloat16), D = E = 64, causal attention, the dot product, forward. `triton` and `cudnn` answer for
sm_90; neither has [run on a GPU](gpu.md).

| backend | device | taken |
|---|---|---|
| `triton` | NVIDIA GPUs, sm_80 and newer | by default |
| `cpu` | CPUs | by default |
| `cudnn` | NVIDIA GPUs, sm_90, 100 and 103 | by name |
| `sdpa` | all of torch's | by default on CUDA for `Full()` and `Causal()`, else by name |
| `rows` | all of torch's; plain PyTorch over a layout | where no kernel can |
| `reference` | all of torch's; every pair | where nothing else can |
"""


class Own:
    """A term without a kernel."""

    def value(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return what is added to the scores."""
        return 0.0 * (q - k)


def ask(
    backend: str,
    relation: Any = None,
    *,
    dtype: torch.dtype | None = None,
    size: int = 64,
    value_size: int | None = None,
    key_heads: int = HEADS,
    queries: int = LENGTH,
    **options: Any,
) -> str:
    """Return a cell: yes, or why not."""
    dtype = dtype or (torch.bfloat16 if backend == "cudnn" else torch.float32)
    query = torch.zeros(1, HEADS, queries, size, dtype=dtype)
    key = torch.zeros(1, key_heads, LENGTH, size, dtype=dtype)
    value = torch.zeros(1, key_heads, LENGTH, value_size or size, dtype=dtype)
    problem = Problem(query, key, value, ab.Causal() if relation is None else relation, **options)
    reasons = BACKENDS[backend].why_not(problem)
    words = "; ".join(filter(None, map(shorten, reasons)))
    return "yes" if not reasons else f"no: {words}" if words else "no"


def shorten(reason: str) -> str:
    """Leave out the argument, which the row names, and what was given."""
    words = re.sub(r"(, got|; layout\().*$", "", reason).partition(": ")[2]
    return "" if words == "not supported" or words.startswith(Own.__name__) else words


def derive(backend: str) -> str:
    """Return whether a backend has a backward pass: its own, or that of the PyTorch it is made of."""
    if backend in IN_OP:
        return "yes" if callable(getattr(IN_OP[backend], "backward", None)) else "no"
    q, k, v = (torch.ones(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    return "yes" if ab.attention(q, k, v, ab.Causal(), backend=backend).requires_grad else "no"


def derive_twice(backend: str) -> str:
    """Return whether a backend has second derivatives: those in the op have none, the others are tried."""
    if backend in IN_OP:
        return "no"
    q, k, v = (torch.ones(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    try:
        first = torch.autograd.grad(
            ab.attention(q, k, v, ab.Causal(), backend=backend).square().sum(), q, create_graph=True
        )
        torch.autograd.grad(first[0].square().sum(), q)
    except (RuntimeError, NotImplementedError):
        return "no: as torch's kernel"
    return "yes"


def tables() -> dict[str, list[tuple[str, Callable[[str], str]]]]:
    """Return the rows of each table: a name, and what gives the cell of a backend."""

    def row(name: str, *relation: Any, **given: Any) -> tuple[str, Callable[[str], str]]:
        return name, functools.partial(ask, relation=relation[0] if relation else None, **given)

    index = torch.stack((torch.arange(LENGTH), torch.arange(LENGTH).roll(1)))
    graph = ab.Graph(index, num_nodes=LENGTH)
    ones = torch.ones
    table = ab.RelativeBias(ones(HEADS, 9), ab.linear_buckets(4))
    return {
        "dtype": [
            row(f"`{str(dtype).removeprefix('torch.')}`", dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        ],
        "head size": [
            *(row(f"D = E = {size}", size=size) for size in (20, 64, 128, 256, 512)),
            row("D = 512, E = 64", size=512, value_size=64),
            row("D = 64, E = 128", value_size=128),
            row("fewer key heads than query heads", key_heads=1),
        ],
        "relation": [
            row("`Full()`", ab.Full()),
            row("`Causal()`"),
            row("one query of decoding", queries=1, q_start="end"),
            row("windows, documents, prefixes and other ranges", ab.Window(before=127)),
            row("a mask, `Dense`", ab.Dense(torch.eye(LENGTH, dtype=torch.bool))),
            row("a graph", graph),
        ],
        "score term": [
            row("`ALiBi`", terms=[ab.ALiBi(ones(HEADS))]),
            row("`RelativeBias`", terms=[table]),
            row("`GridBias`", terms=[ab.GridBias(ones(HEADS, 31 * 31), GRID)]),
            row("`KeyBias`", terms=[ab.KeyBias(ones(1, LENGTH))]),
            row("`PairBias`", terms=[ab.PairBias(ones(LENGTH, LENGTH))]),
            row("`EdgeBias`, with a graph", graph, terms=[ab.EdgeBias(ones(LENGTH))]),
            row("your own, by `value` only", terms=[Own()]),
        ],
        "score": [
            row("the dot product"),
            row("`AdditiveScore`, with a graph", graph, score=ab.AdditiveScore()),
            row("`MultiLevel`", score=ab.MultiLevel([32, 16, 16])),
        ],
        "option": [
            row("`softcap`", softcap=30.0),
            row("`sink`", sink=ones(HEADS)),
            row("`dropout_p`", dropout_p=0.1),
            row("`return_lse`", return_lse=True),
            row("`return_max`", return_max=True),
        ],
        "pass": [
            ("backward", derive),
            ("second derivatives", derive_twice),
        ],
    }


@contextlib.contextmanager
def every_machine() -> Iterator[None]:
    """Let every backend believe that its machine and packages are there."""
    here = "attnbias.backends"
    with (
        patch(f"{here}.cpu.backend.load", lambda: None),
        patch(f"{here}.triton.backend.target_of", lambda device: Target(90, (3, 7))),
        patch(f"{here}.cudnn.find_architecture", lambda device: 90),
        patch(f"{here}.cudnn.why_not_package", lambda: None),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def make_page() -> str:
    """Return the page."""
    lines = [HEAD]
    with every_machine():
        for title, rows in tables().items():
            lines += [f"## By {title}", "", f"| {title} | " + " | ".join(f"`{name}`" for name in ORDER) + " |"]
            lines.append("|---" * (len(ORDER) + 1) + "|")
            lines += [f"| {name} | " + " | ".join(cell(each) for each in ORDER) + " |" for name, cell in rows]
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(make_page())

"""A call neither reads from a GPU nor copies to it from memory that is not pinned, once it was made before.

Tensors of the device "meta" have no data: whatever the host would read of them raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fakecuda import fake_gpu, why_not
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

import attnbias as ab
from attnbias.backends import triton
from attnbias.backends.call import Inputs, Needs
from attnbias.op.problem import Problem
from attnbias.op.run import _make_call

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"fake libcuda: {why_not()}")
B, H, N, D = 2, 4, 200, 16
MAKERS = ("tensor", "as_tensor", "from_numpy")


class Waits(TorchDispatchMode):
    """Collects what would wait for a GPU: reads, results whose sizes are read, copies from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __enter__(self) -> Self:
        self.before = {name: getattr(torch, name) for name in MAKERS}
        for name, make in self.before.items():
            setattr(torch, name, self._watch(name, make))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for name, make in self.before.items():
            setattr(torch, name, make)
        super().__exit__(*error)

    def _watch(self, name: str, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(*given: Any, **options: Any) -> Tensor:
            made = make(*given, **options)
            if made.is_meta:
                self.found.append(name)
            return made

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in args if isinstance(x, Tensor)]
        is_read = name in ("nonzero", "_unique2", "unique_dim", "_local_scalar_dense", "equal")
        masks = args[1] if name in ("index", "index_put_", "_index_put_impl_") else ()
        is_read = is_read or any(x is not None and x.dtype == torch.bool for x in masks)
        made = func(*args, **(kwargs or {}))
        is_copy = name in ("_to_copy", "copy_") and {x.is_meta for x in (*tensors, made)} == {True, False}
        if is_copy or (is_read and any(x.is_meta for x in tensors)):
            self.found.append(name)
        return made


def leaf(*shape: int) -> Tensor:
    return torch.zeros(shape, device="meta", requires_grad=True)


def kinds() -> Iterator[tuple[str, Callable[[], tuple[Any, dict[str, Any]]]]]:
    """Yield relations and options; relations without data are made anew for each call, as in a model."""
    per_head = ab.PerHead([ab.Causal(), ab.Window(before=70), ab.Causal(), ab.Empty()])
    table, grid, pairs, slopes = leaf(H, 32), leaf(H, 27 * 29), leaf(1, N, N), leaf(H)
    graph = ab.Graph(torch.arange(800).reshape(2, 400) * 7 % N, N)
    edges = leaf(400, H)

    def terms(*others: Any) -> list[Any]:
        return [ab.RelativeBias(table, ab.t5_buckets(True)), ab.ALiBi(slopes), *others]

    yield "tiles", lambda: (ab.Causal() & ab.Window(before=90), {"sink": leaf(H), "softcap": 2.0})
    yield (
        "terms",
        lambda: (
            per_head,
            {"terms": terms(ab.GridBias(grid, (14, 15)), ab.PairBias(pairs)), "dropout_p": 0.1},
        ),
    )
    yield "edges", lambda: (graph, {"terms": terms(ab.EdgeBias(edges)), "dropout_p": 0.2})
    score = ab.MultiLevel([8, 8], widths=[None, 64])
    yield "levels", lambda: (ab.Causal(), {"score": score})


KINDS = dict(kinds())


def call(relation: Any, options: dict[str, Any]) -> None:
    """Run forward and backward, those of the terms too."""
    query, key, value = (torch.zeros(B, heads, N, D, device="meta") for heads in (H, 2, 2))
    problem = Problem(query, key, value, relation, **options)
    problem.draw_seed()
    made = _make_call(problem)
    inputs = made.inputs
    made.inputs = Inputs(*(None if x is None else x.detach() for x in inputs))
    out, lse = triton.forward(made)
    needs = Needs(*(x is not None for x in inputs))
    grads = triton.backward(made, out, lse, torch.zeros_like(out), torch.zeros_like(lse), needs)
    given = [(x, dx) for x, dx in zip(inputs, grads, strict=True) if x is not None and x.requires_grad]
    for x, dx in given:
        assert dx is not None and dx.shape == x.shape
        if x.grad_fn is not None:
            x.backward(dx)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("tiles", "levels"))) for kind in KINDS]
)
def test_a_second_call_waits_for_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(80) as gpu:
        target = triton.backend._target(torch.device("cpu"))
        monkeypatch.setattr(triton.backend, "_target", lambda device: target)
        call(*KINDS[kind]())
        first = gpu.count()
        with Waits() as waits:
            call(*KINDS[kind]())
        assert waits.found == []
        assert gpu.count() == 2 * first > 0


def test_waits_are_noticed() -> None:
    """The test above can fail."""
    x, mask = torch.zeros(3, device="meta"), torch.zeros(3, dtype=torch.bool, device="meta")
    for wait in (
        lambda: torch.zeros(3).to("meta"),
        lambda: torch.zeros(3, device="meta").copy_(torch.zeros(3)),
        lambda: torch.tensor([1, 2], device="meta"),
        lambda: torch.index_put_(x, (mask,), torch.zeros((), device="meta")),
    ):
        with Waits() as waits:
            wait()
        assert len(waits.found) == 1, waits.found
    for read in (x[0].item, x.tolist, x.any().item, x.cpu):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()

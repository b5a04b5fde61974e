"""NVIDIA's ``cudnn.flex_attention``, for Hopper and Blackwell: kernels that take ranges of keys for each row.

The package is an extra, ``attnbias[cudnn]``. The backend runs only when it is asked for by name: its kernels
were compiled and emulated for us, never run on a GPU. A layout keeps what NVIDIA makes of it, a *plan*, and
the programs for each arrangement of strides.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..layouts.runs import find_runs
from ..relations.range_forms import to_cudnn
from ..sets.intervals import Intervals, make_groups
from .call import Grads
from .strides import empty_grads, empty_like_query

if TYPE_CHECKING:
    from ..layouts.layout import Layout
    from ..op.problem import Problem
    from .call import Call, Needs

name = "cudnn"

# Each release of the package may change what we call, so only the one that was compiled is taken.
PACKAGES = {"nvidia-cudnn-frontend": ((1, 32), (1, 33)), "nvidia-cutlass-dsl": ((4, 8), (5, 0))}
ARCHITECTURES = (90, 100, 103)
DTYPES = frozenset((torch.float16, torch.bfloat16))
LARGEST = 128  # head sizes are multiples of 8 up to this; NVIDIA takes two more pairs, never compiled here
MOST_RANGES = 8  # of a row: each costs the planner two numbers of every row
ALIGNMENT = 16  # bytes, of addresses and strides
_MOST_KEPT = 16  # plans, and programs, of a layout


def why_not(problem: Problem) -> list[str]:
    """Return the reasons why NVIDIA's kernels cannot run this problem."""
    query = problem.query
    device = _why_not_device(query.device)
    if device is not None:  # asked in every explanation on a CPU, so nothing else is looked at
        return [device]
    D, E = query.shape[3], problem.value.shape[3]
    fits = all(size % 8 == 0 and size <= LARGEST for size in (D, E))
    refused = (
        (query.dtype not in DTYPES, f"dtype: float16 or bfloat16, got {query.dtype}"),
        (not fits, f"head size: multiples of 8 up to {LARGEST}, got D={D} and E={E}"),
        (bool(problem.terms), "terms: not supported"),
        (problem.score is not None, "score: only the dot product"),
        (problem.softcap != 0, "softcap: not supported"),
        (problem.sink is not None, "sink: not supported"),
        (problem.dropout_p > 0, "dropout_p: not supported"),
        (problem.return_max, "return_max: it returns none"),
        (problem.places is not None, "places: not supported"),
    )
    package = why_not_package()
    reasons = [] if package is None else [package]
    reasons += [words for is_so, words in refused if is_so]
    return reasons or _why_not_layout(problem.lay_out())


def why_not_by_default(problem: Problem) -> list[str]:
    """Return why it runs only when it is asked for, whatever the problem."""
    return ["it runs only when asked for by name: no GPU has run it yet"]


def _why_not_device(device: torch.device) -> str | None:
    architecture = find_architecture(device)
    if architecture is None:
        return f"device: only CUDA, got {device.type}"
    if architecture not in ARCHITECTURES:
        return f"device: only sm_90, sm_100 and sm_103, got sm_{architecture}"
    return None


def find_architecture(device: torch.device) -> int | None:
    """Return 90 for sm_90 and so on; None for other than NVIDIA's devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def why_not_package() -> str | None:
    """Say which package is missing, or has another version than the ones that were tried."""
    for package, (least, below) in PACKAGES.items():
        wanted = f"{package} >={'.'.join(map(str, least))},<{'.'.join(map(str, below))}"
        try:
            found = version(package)
        except PackageNotFoundError:
            return f"package: wanted {wanted}, got none; pip install 'attnbias[cudnn]'"
        numbers = re.match(r"(\d+)\.(\d+)", found)
        if numbers is None or not least <= tuple(map(int, numbers.groups())) < below:
            return f"package: wanted {wanted}, got {found}"
    return None


def _why_not_layout(layout: Layout) -> list[str]:
    if layout.edges:
        return [f"relation: its layout has {layout.edges} edges; layout(form='tiles') makes one without"]
    if _keep(layout).runs is None:
        return [f"relation: at most {MOST_RANGES} ranges of keys in a row, its layout has more"]
    return []


class _Kept(NamedTuple):
    """Ranges, plans and programs that a layout keeps for this backend."""

    runs: Intervals | None  # None: a row has too many
    plans: dict[Any, Any]
    programs: dict[Any, Any]


def _keep(layout: Layout) -> _Kept:
    kept = layout.kept
    found: _Kept | None = kept.prepared.get(name)
    if found is None:
        if not kept.is_trusted:
            layout.validate()
        found = kept.prepared[name] = _Kept(find_runs(layout, MOST_RANGES), {}, {})
    return found


def _once(made: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return what was made for a key; make it, in place of the oldest if there are many."""
    if key not in made:
        if len(made) >= _MOST_KEPT:
            del made[next(iter(made))]
        made[key] = make()
    return made[key]


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute out [B, H, Q, E] and lse [B, H, Q]."""
    query = call.query
    out = empty_like_query(query, call.value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    if _is_empty(call):
        return out.zero_(), lse.fill_(-torch.inf)
    (q, k, v), scale, _ = _inputs(call)
    with _on(query.device):
        plan, tensors = _plan(call, q, k, v), (q, k, v, out.transpose(1, 2))
        assert _is_native(tensors[3])  # for every head size that why_not lets pass
        program = _program(call, "FlexAttentionFwd", (*tensors, plan, lse))
        workspace = _workspace(program, query)
        program.execute(*tensors, plan, lse, workspace=workspace, softmax_scale=scale)
    return out, lse


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Needs,
) -> Grads:
    """Compute the gradients that are needed; the kernels always compute all three."""
    grads = empty_grads(call.inputs[:3], needs[:3])
    if _is_empty(call):
        return Grads(*(None if grad is None else grad.zero_() for grad in grads))
    inputs, scale, sign = _inputs(call)
    written = [_room(grad, x) for grad, x in zip(grads, inputs, strict=True)]
    of_out = [_native(out), _native(grad_out), lse.contiguous()]
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    with _on(lse.device):
        plan = _plan(call, *inputs)
        tensors = (*inputs, *of_out, *written, plan, grad_lse)
        program = _program(call, "FlexAttentionBwd", tensors, deterministic=True)
        workspace = _workspace(program, lse)
        program.execute(*tensors, workspace=workspace, softmax_scale=scale)
    if sign != 1:
        written[0].mul_(sign)
    for grad, rows in zip(grads, written, strict=True):
        if grad is not None and rows.data_ptr() != grad.data_ptr():
            grad.copy_(rows.transpose(1, 2))
    return Grads(*grads)


def _is_empty(call: Call) -> bool:
    """Return whether no pair is related for lack of queries, keys or tiles: NVIDIA takes no such call."""
    return not (call.query.numel() and call.key.shape[2] and call.layout.tiles)


def _inputs(call: Call) -> tuple[tuple[Tensor, Tensor, Tensor], float, int]:
    """Return query, key and value for NVIDIA, a positive scale, and what the query was multiplied by.

    Its kernels hide a pair and find the largest score of a row before they scale. So a negative scale would
    give hidden pairs the weight of infinity, and 0 that of NaN; both signs are exact in the query.
    """
    sign = (call.scale > 0) - (call.scale < 0)
    query = call.query if sign == 1 else call.query * sign
    return (_native(query), _native(call.key), _native(call.value)), float(abs(call.scale)) or 1.0, sign


def _native(x: Tensor) -> Tensor:
    """Return [B, H, L, D] as [B, L, H, D]: a view if its address and strides suit NVIDIA, else a copy."""
    rows = x.detach().transpose(1, 2)
    return rows if _is_native(rows) else rows.clone(memory_format=torch.contiguous_format)


def _is_native(rows: Tensor) -> bool:
    step = ALIGNMENT // rows.element_size()
    if rows.stride(3) != 1 or rows.data_ptr() % ALIGNMENT:
        return False
    sides = zip(rows.shape[:3], rows.stride()[:3], strict=True)
    return all(stride % step == 0 and (stride > 0 or size == 1) for size, stride in sides)


def _room(grad: Tensor | None, x: Tensor) -> Tensor:
    """Return where NVIDIA's kernels write a gradient of ``x`` [B, L, H, D]: its own memory if they can."""
    if grad is not None and _is_native(grad.transpose(1, 2)):
        return grad.transpose(1, 2)
    return x.new_empty(x.shape)


def _plan(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Return NVIDIA's plan of the layout for these sizes; the host waits when it is made."""
    kept = _keep(call.layout)
    assert kept.runs is not None
    runs, (batch, heads) = kept.runs, call.query.shape[:2]

    def make() -> Any:
        endpoints = make_endpoints(runs, batch, heads).to(q.device)
        with _quiet():
            return _flex().create_mask_plan(endpoints, q, k, v, build_backward=True)

    sizes = (batch, heads, k.shape[2], q.shape[3], v.shape[3], q.dtype)
    return _once(kept.plans, sizes, make)


def make_endpoints(runs: Intervals, batch: int, heads: int) -> Tensor:
    """Return the endpoints of every row of every batch entry, int32 [1 or heads, n, batch * Q], on the host.

    There is one mask of all heads if they share their groups.
    """
    group = np.broadcast_to(runs.group, (batch, heads))
    if (group == group[:, :1]).all():
        group = group[:, :1]
    return to_cudnn(runs.take_groups(make_groups(*group.shape), group.reshape(-1)))


def _program(call: Call, kind: str, tensors: tuple[Any, ...], **options: bool) -> Any:
    """Return a compiled program for tensors of these shapes and strides."""

    def make() -> Any:
        with _quiet():
            program = getattr(_flex(), kind)(*tensors, **options)
            program.check_support()
            program.compile()
        return program

    arranged = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else None for x in tensors)
    return _once(_keep(call.layout).programs, (kind, arranged), make)


def _workspace(program: Any, like: Tensor) -> Tensor | None:
    size = program.workspace_size
    return like.new_empty(size, dtype=torch.uint8) if size else None


def _flex() -> Any:
    """Import NVIDIA's package, which takes seconds."""
    try:
        from cudnn import flex_attention
    except ImportError as error:
        raise ImportError(f"backend: wanted cudnn.flex_attention, got {error}") from error
    return flex_attention


@contextmanager
def _quiet() -> Iterator[None]:
    """Swallow what NVIDIA prints: a line for each kernel that it compiles."""
    with redirect_stdout(io.StringIO()):
        yield


def _on(device: torch.device) -> Any:
    """Launch on this device and its current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

"""A stand-in for ``cudnn.flex_attention`` 1.32: its signatures and checks, in float64 on CPU tensors.

It follows the package where a caller can notice: endpoints, strides, alignment, workspaces, what a program
accepts after it was compiled, what it prints, and where it scales: after it hid pairs and found the largest
score of a row, so that only a positive scale is right.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

made: list[str] = []  # every plan and program, in order


def create_mask_plan(
    mask_func: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pack_gqa: bool | None = None,
    build_backward: bool | None = None,
) -> MaskPlan:
    """Check as the package does on the host, then as its planner does on the device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"{name} must have dtype torch.float16 or torch.bfloat16")
        if x.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in the last dimension")
    dims = q.shape[-1], v.shape[-1]
    if not (all(8 <= d <= 128 and d % 8 == 0 for d in dims) or dims in ((192, 128), (256, 256))):
        raise ValueError(f"supported head dimensions are ...; got {dims}")
    if mask_func.ndim != 3:
        raise ValueError("mask_func must have shape [Hmask, nfunc, total_q]")
    if mask_func.dtype != torch.int32:
        raise TypeError("mask_func must have dtype torch.int32")
    if mask_func.device != q.device or not mask_func.is_contiguous():
        raise ValueError("mask_func must be contiguous and on the same CUDA device as q")
    hmask, nfunc, total = mask_func.shape
    if total != q.shape[0] * q.shape[1]:
        raise ValueError(f"mask_func last extent must equal total_q; got {total}")
    if hmask not in (1, q.shape[2]):
        raise ValueError(f"Hmask must be 1 or Hq ({q.shape[2]}); got {hmask}")
    if nfunc % 2 == 0:
        raise ValueError("nfunc must be a positive odd number")
    ends, begins = mask_func[:, 0::2], torch.nn.functional.pad(mask_func[:, 1::2], (0, 0, 1, 0))
    in_range = (ends >= 0) & (ends <= k.shape[1]) & (ends >= begins)
    if not (in_range.all() and (begins[:, 1:] >= ends[:, :-1]).all()):
        raise ValueError("mask_func endpoints must lie in each row's local-K range and be nondecreasing")
    sys.stdout.write("Compiled mask-plan classify in 12.4s\n")
    made.append("plan")
    return MaskPlan(mask_func.clone(), (q, k, v), bool(build_backward))


class MaskPlan:
    def __init__(self, endpoints: Tensor, inputs: tuple[Tensor, ...], has_backward: bool) -> None:
        self.endpoints, self.has_backward = endpoints, has_backward
        self.geometry = tuple((x.shape, x.dtype) for x in inputs)

    def related(self) -> Tensor:
        """Return [B, 1 or H, Q, K]."""
        (B, Q, *_), K = self.geometry[0][0], self.geometry[1][0][1]
        rows = self.endpoints.view(*self.endpoints.shape[:2], B, Q).permute(2, 0, 3, 1)  # [B, Hmask, Q, n]
        begins, ends = torch.nn.functional.pad(rows[..., 1::2], (1, 0)), rows[..., 0::2]
        keys = torch.arange(K)
        return ((keys >= begins[..., None]) & (keys < ends[..., None])).any(3)


class _Program:
    """What forward and backward share: a program takes the arrangement it was compiled for."""

    names: tuple[str, ...]

    def _start(self, plan: MaskPlan, tensors: tuple[Any, ...]) -> None:
        self.workspace_size = 0
        self.plan = plan
        self.arranged = self._arrange(tensors)
        self.is_checked = self.is_compiled = False
        self._check(tensors)

    @staticmethod
    def _arrange(tensors: tuple[Any, ...]) -> list[Any]:
        return [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]

    def _check(self, tensors: tuple[Any, ...]) -> None:
        if self._arrange(tensors) != self.arranged:
            raise ValueError("shape, stride, dtype, and device must match the compiled descriptor")
        for name, x in zip(self.names, tensors, strict=True):
            align = 4 if name.endswith("lse") else 16
            if x is None:
                continue
            aligned = all(stride * x.element_size() % align == 0 for stride in x.stride()[:-1])
            if x.stride(-1) != 1 or x.data_ptr() % align or not aligned:
                raise ValueError(f"{name} must use a native {align}-byte-aligned layout")
            if not x.numel():
                raise ValueError("requires non-empty sample tensors")

    def check_support(self) -> bool:
        self.is_checked = True
        return True

    def compile(self) -> None:
        assert self.is_checked
        self.is_compiled = True
        self.workspace_size = 128
        made.append(type(self).__name__)
        sys.stdout.write("Compiled FlexAttention kernel in 5.8s\n")

    def _run(self, plan: MaskPlan, tensors: tuple[Any, ...], workspace: Tensor | None) -> None:
        assert self.is_compiled
        self._check(tensors)
        if tuple((x.shape, x.dtype) for x in tensors[:3]) != plan.geometry:
            raise ValueError("fixed sequence geometry does not match MaskPlan")
        if workspace is None or workspace.numel() < 128:
            raise ValueError("requires a 128-byte uint8 CUDA workspace")


def _scores(plan: MaskPlan, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return weights without their sum, and the largest score of each row: hidden first, scaled later."""
    share = q.shape[2] // k.shape[2]
    key = k.double().repeat_interleave(share, 2)
    raw = torch.einsum("bqhd,bkhd->bhqk", q.double(), key)
    raw = raw.masked_fill(~plan.related(), -math.inf)
    most = raw.amax(-1, keepdim=True)
    most = most.masked_fill(most == -math.inf, 0)
    return torch.exp(raw * scale - most * scale), most[..., 0] * scale


class FlexAttentionFwd(_Program):
    names = ("q", "k", "v", "o", "lse")

    def __init__(self, q: Any, k: Any, v: Any, o: Any, plan: MaskPlan, lse: Tensor | None = None) -> None:
        self._start(plan, (q, k, v, o, lse))

    def execute(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        plan: MaskPlan,
        lse: Tensor,
        *,
        workspace: Tensor | None = None,
        softmax_scale: float,
    ) -> None:
        self._run(plan, (q, k, v, o, lse), workspace)
        weights, most = _scores(plan, q, k, softmax_scale)
        total = weights.sum(-1)  # [B, H, Q]
        lse.copy_(torch.where(total == 0, -math.inf, most + total.log()))
        value = v.double().repeat_interleave(q.shape[2] // v.shape[2], 2)
        probs = weights / total.masked_fill(total == 0, 1)[..., None]
        o.copy_(torch.einsum("bhqk,bkhe->bqhe", probs, value))


class FlexAttentionBwd(_Program):
    names = ("q", "k", "v", "o", "do", "lse", "dq", "dk", "dv", "dlse")

    def __init__(
        self, *tensors: Any, deterministic: bool = False, **unknown: Any
    ) -> None:  # q, k, v, o, do, lse, dq, dk, dv, plan, dlse
        if unknown or len(tensors) != 11:
            raise TypeError(f"unexpected arguments: {len(tensors)} and {unknown}")
        if not deterministic:
            raise AssertionError("the sums of dq have no fixed order")
        *given, plan, dlse = tensors
        if not plan.has_backward:
            raise ValueError("arbitrary backward requires a MaskPlan built with backward metadata")
        self._start(plan, (*given, dlse))

    def execute(self, *tensors: Any, workspace: Tensor | None, softmax_scale: float) -> None:
        *given, plan, dlse = tensors
        self._run(plan, (*given, dlse), workspace)
        q, k, v, o, do, lse, dq, dk, dv = given
        share, empty = q.shape[2] // k.shape[2], lse == -math.inf
        key, value = (x.double().repeat_interleave(share, 2) for x in (k, v))
        weights, most = _scores(plan, q, k, softmax_scale)
        probs = weights * (most - lse.double().masked_fill(empty, 0)).exp()[..., None]
        delta = (o.double() * do.double()).sum(-1).transpose(1, 2)  # [B, H, Q]
        if dlse is not None:
            delta = delta - dlse.double()
        d_probs = torch.einsum("bqhe,bkhe->bhqk", do.double(), value)
        d_scores = probs * (d_probs - delta[..., None]) * softmax_scale
        dq.copy_(torch.einsum("bhqk,bkhd->bqhd", d_scores, key))
        for grad, whole in (
            (dk, torch.einsum("bhqk,bqhd->bkhd", d_scores, q.double())),
            (dv, torch.einsum("bhqk,bqhe->bkhe", probs, do.double())),
        ):
            grad.copy_(whole.unflatten(2, (-1, share)).sum(3))


def modules() -> dict[str, Any]:
    """Return what ``sys.modules`` has when the package is imported."""
    flex = ModuleType("cudnn.flex_attention")
    for each in (create_mask_plan, MaskPlan, FlexAttentionFwd, FlexAttentionBwd):
        setattr(flex, each.__name__, each)
    package = SimpleNamespace(flex_attention=flex)
    return {"cudnn": package, "cudnn.flex_attention": flex}

"""Build FlexAttention's own CUDA kernels for any capability, with a torch that has no CUDA and no GPU.

Forward and backward are traced on fake CPU tensors (autograd on fake CUDA ones needs a CUDA build), both
graphs are relabelled as ``cuda:0``, and Inductor lowers them for a device that is only described: tiles,
warps and stages are those it chooses for that capability without autotuning. The Triton source is cut from
its output and compiled with the options that it would pass.

Much of torch is replaced on the way and never restored: call ``build`` in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from .arch import ARCH
from .figures import LOOPS, Figures, Key, Table, loops_of
from .sass import Compiled, analyse

BATCH, HEADS, TOKENS, BLOCK = 4, 16, 4096, 128


class Peer(NamedTuple):
    """One of FlexAttention's kernels; its backward kernel holds two passes."""

    kernel: Compiled
    stages: int
    tiles: dict[str, tuple[int, int]]  # pass -> queries, keys


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Return the mask of the masked loops, which FlexAttention computes from indices."""
    return q >= k


def build(cc: int, d: int, mask: Callable[..., Any] = causal, dtype: str = "bfloat16") -> list[Peer]:
    """Compile the forward and the backward kernel.

    Args:
        cc: compute capability x 10.
        d: head size.
        mask: a mask_mod of FlexAttention.
        dtype: of the inputs.
    """
    graphs = _trace(d, mask, dtype)
    _pretend(cc)
    peers = [_compile(source, name, cc) for graph in graphs for name, source in _lower(*graph).items()]
    if len(peers) != 2:
        raise RuntimeError(f"FlexAttention: wanted a forward and a backward kernel, found {len(peers)}")
    return peers


def measure(cc: int, d: int) -> Table:
    """Count every loop of every pass.

    Args:
        cc: compute capability x 10.
        d: head size.
    """
    table: Table = {}
    for peer in build(cc, d):
        report = analyse(peer.kernel)
        for which, (rows, cols) in peer.tiles.items():
            config = f"{rows}x{cols} w{peer.kernel.warps} s{peer.stages}"
            loops = loops_of(report, which, d, rows * cols)
            for name in LOOPS:
                table[Key(cc, d, BLOCK, which, name)] = Figures.of(report, loops[name], config)
    return table


# --------------------------------------------------------------------------- trace on fake CPU tensors
def _trace(d: int, mask: Callable[..., Any], dtype: str) -> list[tuple[Any, Any]]:
    """Return the forward and the backward graph, each with its inputs."""
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config as inductor_config
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import flex_attention as flex

    found: dict[str, tuple[Any, Any]] = {}

    def keep(name: str) -> Callable[[Any, Any], Any]:
        def compiler(graph: Any, inputs: Any) -> Any:
            found[name] = graph, inputs
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
    )
    blocks = TOKENS // BLOCK
    with (
        mock.patch.object(flex, "_validate_device"),  # it forbids gradients on a CPU
        inductor_config.patch(compile_threads=1, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
        FakeTensorMode(),
    ):
        size = BATCH, HEADS, TOKENS, d
        q, k, v = (torch.empty(size, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3))
        lists = [
            torch.empty(1, 1, blocks, *more, dtype=torch.int32) for _ in range(4) for more in ((), (blocks,))
        ]
        fields: list[Any] = [(TOKENS, TOKENS), *lists, (BLOCK, BLOCK), mask]
        block_mask = flex.BlockMask(*fields)
        out = torch.compile(flex.flex_attention, backend=backend)(q, k, v, block_mask=block_mask)
        out.backward(torch.empty_like(out))
    return [found["forward"], found["backward"]]


# ------------------------------------------------------------------------ lower for a described device
class _Lowered(Exception):
    """Not an error: carries Inductor's output past the steps that need a GPU."""


def _replace(owner: Any, **members: Any) -> None:
    for name, member in members.items():
        setattr(owner, name, member)


def _pretend(cc: int) -> None:
    """Make torch and Triton believe that there is a GPU of this capability."""
    import torch
    import torch._subclasses.fake_tensor as fake
    import torch.utils._triton as probes
    from torch._dynamo.device_interface import CudaInterface

    arch = ARCH[cc]
    properties = SimpleNamespace(
        name=arch.gpu,
        major=cc // 10,
        minor=cc % 10,
        multi_processor_count=arch.sms,
        max_threads_per_multi_processor=32 * arch.warps,
        regs_per_multiprocessor=65536,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=arch.smem_cta,
        shared_memory_per_multiprocessor=arch.smem,
        L2_cache_size=40 << 20,
        total_memory=80 << 30,
        gcnArchName="",
    )
    cuda: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        "is_bf16_supported": lambda *a, **k: True,
        "_lazy_init": lambda: None,
        "synchronize": lambda *a, **k: None,
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        "set_rng_state": lambda *a, **k: None,
        "memory_allocated": lambda *a, **k: 0,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }
    _replace(torch.cuda, **cuda)
    _replace(
        CudaInterface, **{name: staticmethod(f) for name, f in cuda.items() if hasattr(CudaInterface, name)}
    )
    _replace(CudaInterface.Worker, get_device_properties=staticmethod(cuda["get_device_properties"]))
    _replace(fake, init_gpu_context=lambda device: None)
    _replace(fake.FakeTensorMode, avoid_device_init=property(lambda mode: False))
    # Not by `import ... as`: an object of the same name hides the module.
    higher_order = importlib.import_module("torch._higher_order_ops.flex_attention")
    _replace(higher_order, _permute_strides=_permute_strides)
    _set_driver(cc)
    for probe in vars(probes).values():
        if hasattr(probe, "cache_clear"):
            probe.cache_clear()


def _permute_strides(out: Any, like: tuple[int, ...]) -> Any:
    """Stand in for torch's function, which also copies and so needs a device."""
    import torch

    last = len(like) - 1
    strides, step = [0] * len(like), 1
    for i in sorted(range(len(like)), key=lambda i: (i != last, like[i])):
        strides[i], step = step, step * out.shape[i]
    return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device)


def _set_driver(cc: int) -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", cc, 32),
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
            is_active=lambda: True,
        )
    )


def _lower(graph: Any, inputs: Any) -> dict[str, str]:
    """Run Inductor's lowering and return the Triton source of each template kernel by name."""
    import torch
    from torch._inductor import config as inductor_config
    from torch._inductor import graph as lowering
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode, device = FakeTensorMode(), torch.device("cuda", 0)

    def moved(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            with mode:
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return type(x)(map(moved, x)) if type(x) in (tuple, list) else x

    def move(module: Any) -> None:
        for node in module.graph.nodes:
            for name in {"val", "example_value"} & node.meta.keys():
                node.meta[name] = moved(node.meta[name])
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": device}
            if node.op == "call_function" and str(node.target) == "flex_attention":
                # Tracing for a CPU turns it off; the backward pass of a GPU needs it.
                node.args = tuple(
                    {**x, "OUTPUT_LOGSUMEXP": True} if isinstance(x, dict) else x for x in node.args
                )
        for child in module.children():
            if isinstance(child, torch.fx.GraphModule):
                move(child)
        module.recompile()

    def stop(self: Any) -> None:
        raise _Lowered(self.codegen()[0].value)

    move(graph)
    with (
        mock.patch.object(lowering.GraphLowering, "compile_to_module", stop),
        inductor_config.patch(compile_threads=1, fx_graph_cache=False),
    ):
        try:
            compile_fx_inner(graph, [moved(x) for x in inputs])
        except Exception as error:
            reason: BaseException | None = error
            while reason is not None and not isinstance(reason, _Lowered):
                reason = reason.__cause__ or reason.__context__
            if reason is None:
                raise
            wrapper: str = reason.args[0]
    return dict(re.findall(r"async_compile\.triton\('(triton_tem_\w+)', '''(.*?)'''", wrapper, re.DOTALL))


# --------------------------------------------------------------------------------------------- compile
def _compile(source: str, name: str, cc: int) -> Peer:
    """Compile one template kernel with the options that Inductor would pass."""
    import triton
    from torch._inductor.runtime import triton_heuristics
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    chosen: dict[str, Any] = {}

    def template(**options: Any) -> Callable[[Any], Any]:
        chosen.update(options)
        return lambda function: function

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(triton_heuristics, "template", template):
        path = Path(folder) / f"{name}.py"  # Triton reads the source of what it compiles
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        meta = chosen["triton_meta"]
        compiled = triton.compile(
            ASTSource(getattr(module, name), meta["signature"], meta["constants"], meta["configs"][0]),
            target=GPUTarget("cuda", cc, 32),
            options={
                "num_warps": chosen["num_warps"],
                "num_stages": chosen["num_stages"],
                "debug": True,
                "sanitize_overflow": False,
            },
        )
    sizes = chosen["inductor_meta"]["config_args"]
    if "BLOCK_M" in sizes:
        tiles = {"forward": (sizes["BLOCK_M"], sizes["BLOCK_N"])}
    else:
        tiles = {
            "backward_query": (sizes["BLOCK_M2"], sizes["BLOCK_N2"]),
            "backward_key": (sizes["BLOCK_M1"], sizes["BLOCK_N1"]),
        }
    return Peer(Compiled.of(compiled, cc), chosen["num_stages"], tiles)

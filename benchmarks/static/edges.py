"""Counts of the edge kernels, compared with a kernel that takes one edge at a time.

Also a command: ``python -m attnbias.benchmarks.static.edges``. Instructions per edge are those of the loop's
warps for one trip, over the edges of that trip. Bytes in flight are the most that the gathers of the warps on
an SM have pending, by the scoreboards that they wait for, as a multiple of the memory's bandwidth x latency
over the number of SMs (Little's law); the latencies are assumed.
"""
# Kernels get their types from their arguments, at compile time:
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import attnbias as ab
from attnbias.backends.call import Call, Inputs, Needs

from ..measure import terminal as report
from .arch import ARCH
from .ours import recording
from .sass import SPILLS, Compiled, Ins, disasm, hot_loops, measure, resources, width

SHAPES = ((1, 64), (4, 32), (8, 16), (8, 64))  # heads, head size
NODES, EDGES = 64, 4000
PASSES = {"edge_forward": "forward", "edge_rows": "rows", "edge_columns": "columns"}

# Bytes/s of memory and seconds until it answers, under load; the order of magnitude is published.
MEMORY = {
    80: (1.55e12, 500e-9),
    86: (0.94e12, 500e-9),
    89: (0.86e12, 600e-9),
    90: (3.35e12, 600e-9),
    100: (8.0e12, 700e-9),
    120: (1.79e12, 600e-9),
}

# Floors: how many times fewer instructions an edge takes. Triton 3.9 improves the yardstick at 1 x 64.
FEWER = {(1, 64): 25.0, (4, 32): 5.0, (8, 16): 5.0, (8, 64): 1.9}
FEWER_39 = FEWER | {(1, 64): 11.0}
IN_FLIGHT = 1.5


@triton.jit
def one_at_a_time(q, k, v, ptr, keys, out, lse, scale, node, head, H: tl.constexpr, D: tl.constexpr):
    """Compute the yardstick: one program per row, one edge after the other, all heads at once."""
    i = tl.program_id(0)
    h = tl.arange(0, H)
    inside = h[:, None] * head + tl.arange(0, D)[None, :]
    kept = tl.load(q + i.to(tl.int64) * node + inside).to(tl.float32)
    m = tl.full([H], -float("inf"), tl.float32)
    total = tl.zeros([H], tl.float32)
    acc = tl.zeros([H, D], tl.float32)
    for e in range(tl.load(ptr + i), tl.load(ptr + i + 1)):
        j = tl.load(keys + e).to(tl.int64)
        kk = tl.load(k + j * node + inside).to(tl.float32)
        vv = tl.load(v + j * node + inside).to(tl.float32)
        s = tl.sum(kept * kk, 1) * scale
        top = tl.maximum(m, s)
        p, fade = tl.exp(s - top), tl.exp(m - top)
        total = total * fade + p
        acc = acc * fade[:, None] + p[:, None] * vv
        m = top
    is_empty = total == 0
    divisor = tl.where(is_empty, 1.0, total)
    result = tl.where(is_empty[:, None], 0.0, acc / divisor[:, None])
    tl.store(out + i.to(tl.int64) * node + inside, result.to(out.dtype.element_ty))
    tl.store(lse + i * H + h, tl.where(is_empty, -float("inf"), m + tl.log(divisor)))


class Figures(NamedTuple):
    """The counts of a kernel's loop over edges; all static but ``in_flight``, which is modelled."""

    sm: int
    heads: int
    size: int
    which: str  # pass, or "naive"
    instructions: float  # per edge
    outside: int  # per program, outside the loop
    regs: int
    warps: int  # on an SM
    in_flight: float  # gathered bytes, as a multiple of what the memory needs
    spills: int
    barriers: int
    shared: int  # instructions that go to shared memory

    @property
    def name(self) -> str:
        """Return the name of the loop."""
        return f"sm_{self.sm} {self.heads}x{self.size} {self.which}"


def build(
    cc: int,
    H: int,
    D: int,
    dtype: torch.dtype = torch.float16,
    score: ab.AdditiveScore | None = None,
    **more: torch.Tensor,
) -> dict[str, Compiled]:
    """Compile the passes as a training step over a graph launches them, and the yardstick.

    Args:
        cc: compute capability x 10.
        H: heads.
        D: head size.
        dtype: of the inputs.
        score: None for the dot product.
        **more: further inputs of the call; they get gradients too.
    """
    from attnbias.backends import triton as adapter

    row = torch.arange(EDGES) % NODES
    graph = ab.Graph(torch.stack((torch.arange(EDGES) * 7 % NODES, row)), num_nodes=NODES)
    layout = ab.Layout.build(graph, NODES, NODES, form="edges")
    q, k, v, grad = (torch.empty(1, NODES, H, D, dtype=dtype).transpose(1, 2) for _ in range(4))
    call = Call(Inputs(q, k, v, **more), layout, D**-0.5, score=score)
    with recording(cc) as launched:
        out, lse = adapter.forward(call)
        adapter.backward(call, out, lse, grad, None, Needs(True, True, True, **dict.fromkeys(more, True)))
        one_at_a_time[NODES,](
            *(q, k, v, layout.edge_ptr, layout.edge_key, out, lse, D**-0.5, H * D, D),
            H=H,
            D=D,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=True,
        )
    names = PASSES | {"one_at_a_time": "naive"}
    return {names[kernel.name]: kernel for kernel in launched if kernel.name in names}


def in_flight(body: Sequence[Ins]) -> int:
    """Return the most bytes that one warp's gathers, of 16 bytes per lane, have in flight at once."""
    out: Counter[int] = Counter()  # by scoreboard
    most = 0
    for x in [*body, *body, *body]:
        for board in range(6):
            if x.wait >> board & 1:
                out[board] = 0
        if x.base == "LDG" and width(x.op) == 16:
            out[x.wr] += 32 * 16
        most = max(most, out.total())
    return most


def figures(kernel: Compiled, which: str, H: int, D: int) -> Figures:
    """Count a kernel's loop over edges: the innermost one with the most loads."""
    from attnbias.kernels.edges.launch import choose_shape

    regs, _, ctas, _ = resources(kernel)
    section = max(disasm(kernel.cubin), key=lambda x: len(x.ins))
    body = max(
        hot_loops(section, frozenset(("LDG",))), key=lambda x: sum(section.ins[i].base == "LDG" for i in x)
    )
    loop = measure(section.ins, body, kernel.cc, kernel.warps, ctas, model=False)
    shape = choose_shape(H, D, D, 2)
    edges = shape.STEP * shape.LANES / shape.BLOCKS
    if which == "naive":
        edges = loop.ops["LDG"] / 3  # a key's number, K and V; the assembler may unroll
    # Slow paths and the pieces of long rows come after the first exit.
    end = next(i for i, x in enumerate(section.ins) if x.base == "EXIT") + 1
    bandwidth, latency = MEMORY[kernel.cc]
    flying = in_flight([section.ins[i] for i in body]) * ctas * kernel.warps * ARCH[kernel.cc].sms
    return Figures(
        kernel.cc,
        H,
        D,
        which,
        loop.n * kernel.warps / edges,
        end - sum(i < end for i in body),
        regs,
        ctas * kernel.warps,
        flying / (bandwidth * latency),
        sum(loop.ops[op] for op in SPILLS),
        loop.ops["BAR"],
        sum(loop.ops[op] for op in ("LDS", "STS", "LDSM", "STSM")),
    )


def count(capabilities: Sequence[int], shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Figures]:
    """Count every pass and the yardstick, float16."""
    found = []
    for cc in capabilities:
        for H, D in shapes:
            report.progress(f"counting edges, sm_{cc}, {H} x {D}")
            found += [figures(kernel, which, H, D) for which, kernel in build(cc, H, D).items()]
    report.progress("")
    return found


def broken_floors(found: Sequence[Figures], version: tuple[int, int]) -> list[str]:
    """Return which floors break."""
    fewer = FEWER if version < (3, 9) else FEWER_39
    naive = {(x.sm, x.heads, x.size): x for x in found if x.which == "naive"}
    faults = []
    for x in found:
        if x.which == "naive":
            continue
        if x.spills:
            faults.append(f"{x.name}: {x.spills} spills in the loop")
        if x.which != "forward":
            if x.barriers > 2:
                faults.append(f"{x.name}: {x.barriers} barriers in the loop, at most 2")
            continue
        if x.barriers or x.shared:
            faults.append(f"{x.name}: {x.barriers} barriers and {x.shared} uses of shared memory in the loop")
        ratio = naive[x.sm, x.heads, x.size].instructions / x.instructions
        if ratio < fewer[x.heads, x.size]:
            faults.append(f"{x.name}: 1/{ratio:.1f} of one at a time, wanted 1/{fewer[x.heads, x.size]:g}")
        if x.in_flight < IN_FLIGHT:
            faults.append(
                f"{x.name}: {x.in_flight:.2f} x the bytes in flight that memory needs, wanted {IN_FLIGHT}"
            )
    return faults


def show(found: Sequence[Figures]) -> None:
    """Print the loops; forward loops next to the yardstick's."""
    naive = {(x.sm, x.heads, x.size): x for x in found if x.which == "naive"}
    columns = (
        *(
            "edges: loop",
            "instr/edge (static)",
            "of one at a time (static)",
            "outside (static)",
            "regs (static)",
        ),
        *("warps/SM (static)", "bytes in flight (modelled)", "spills, barriers, shared (static)"),
    )
    print("\n| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for x in found:
        if x.which == "naive":
            continue
        beside = naive[x.sm, x.heads, x.size].instructions
        ratio = f"{beside:.0f}: 1/{beside / x.instructions:.1f}" if x.which == "forward" else ""
        print(
            f"| {x.name} | {x.instructions:.1f} | {ratio} | {x.outside} | {x.regs} | {x.warps} "
            f"| {x.in_flight:.1f} x | {x.spills}, {x.barriers}, {x.shared} |"
        )


def main() -> None:
    """Print the table; with --gate, fail where a floor breaks."""
    parser = argparse.ArgumentParser(prog="python -m attnbias.benchmarks.static.edges")
    parser.add_argument("--sm", type=lambda text: [int(x) for x in text.split(",")], default=sorted(ARCH))
    parser.add_argument("--gate", action="store_true", help="exit with 1 where a floor breaks")
    options = parser.parse_args()
    major, minor = map(int, triton.__version__.split(".")[:2])
    found = count(options.sm)
    print(f"triton {triton.__version__}; float16")
    show(found)
    faults = broken_floors(found, (major, minor))
    print(f"\n{len(faults)} floors broken" + "".join(f"\n  {fault}" for fault in faults))
    if options.gate and faults:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Read a cubin: its instructions, its loops, and what one trip round a loop asks of each pipe.

Counts of instructions, registers, spills, multiply-adds and blocks per SM are exact. A bound is the time of
the busiest pipe for one block's trip round a loop if all pipes overlap perfectly: with the widths in ``arch``
nothing runs faster. The issue model is in ``issue``. No model includes bank conflicts, caches or DRAM.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from . import flow, issue
from .arch import ARCH, occupancy

SPILLS = frozenset(("LDL", "STL"))
ASYNCHRONOUS = frozenset((100, 103))  # no issue model: tensor work is not done by the warp that starts it


# ---------------------------------------------------------------------------------------- disassembly
class Ins(NamedTuple):
    """One instruction, with the scheduling that the assembler put in its control bits."""

    addr: int
    pred: str  # "" or @P0, @!UP1
    op: str  # HMMA.16816.F32.BF16
    args: str
    stall: int  # cycles before the warp's next instruction
    wr: int  # scoreboard released when the result is written; 7 is none
    rd: int  # when the operands have been read
    wait: int  # scoreboards waited for, as bits

    @property
    def base(self) -> str:
        """Return the operation without its modifiers."""
        return self.op.partition(".")[0]


class Section(NamedTuple):
    """The code of one function."""

    name: str
    ins: list[Ins]
    labels: dict[str, int]  # to addresses


@dataclass(frozen=True)
class Compiled:
    """A kernel as a compiler left it."""

    name: str
    cc: int  # compute capability x 10
    cubin: bytes
    warps: int
    shared: int  # bytes a block is started with
    tmem: int = 0  # columns of tensor memory a block allocates
    ptx: str = ""  # path of its PTX, if Triton kept it

    @classmethod
    def of(cls, kernel: Any, cc: int) -> Compiled:
        """Make one from the result of ``triton.compile``."""
        return cls.from_parts(kernel.metadata, kernel.asm["cubin"], cc)

    @classmethod
    def from_parts(cls, metadata: Any, cubin: bytes, cc: int, ptx: str = "") -> Compiled:
        """Make one from Triton's metadata and a cubin."""
        tmem = getattr(metadata, "tmem_size", None) or 0
        return cls(metadata.name, cc, cubin, metadata.num_warps, metadata.shared, tmem, ptx)


@functools.cache
def tool(name: str) -> str:
    """Return the path of a CUDA tool, from Triton's wheel or else the machine's CUDA.

    Raises:
        FileNotFoundError: if there is none.
    """
    spec = importlib.util.find_spec("triton")
    folders = [Path(where) for where in (spec.submodule_search_locations or ()) if spec] if spec else []
    for folder in folders:
        path = folder / "backends" / "nvidia" / "bin" / name
        if path.is_file():
            return str(path)
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if found is None:
        raise FileNotFoundError(f"{name}: neither in Triton's wheel nor on the path")
    return found


def run(name: str, *options: str, cubin: bytes) -> str:
    """Return what a CUDA tool prints about a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool(name), *options, file.name], capture_output=True, text=True, check=True)
    return done.stdout


_SECTION = re.compile(r"^\.text\.(\S+):")
_LABEL = re.compile(r"^(\.L_\w+|\$\S+):")
_LINE = re.compile(
    r"^\s+/\*(?P<addr>[0-9a-f]{4,})\*/\s+(?:(?P<pred>@!?U?P\w+)\s+)?(?P<op>[A-Z][\w.]*)\s*(?P<args>.*?)\s*;"
    r"\s*/\* 0x[0-9a-f]{16} \*/"
)
_HIGH = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")  # the upper half of a 128-bit instruction


def disasm(cubin: bytes) -> list[Section]:
    """Disassemble every function of a cubin."""
    sections: list[Section] = []
    last: re.Match[str] | None = None
    for line in run("nvdisasm", "-c", "-hex", cubin=cubin).splitlines():
        if found := _SECTION.match(line):
            sections.append(Section(found[1], [], {}))
            continue
        if not sections:
            continue
        _, ins, labels = sections[-1]
        if found := _LABEL.match(line):
            labels[found[1]] = ins[-1].addr + 16 if ins else 0
        elif found := _LINE.match(line):
            last = found
        elif (found := _HIGH.match(line)) and last:
            bits = int(found[1], 16)
            control = bits >> 41 & 15, bits >> 46 & 7, bits >> 49 & 7, bits >> 52 & 63
            ins.append(Ins(int(last["addr"], 16), last["pred"] or "", last["op"], last["args"], *control))
            last = None
    return sections


# ------------------------------------------------------------------------------------- classification
_PIPES = {
    "tensor": "HMMA IMMA DMMA HGMMA QGMMA IGMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA OMMA QMMA",
    "xu": "MUFU I2F F2I F2F FRND POPC FLO BREV I2I",
    "fma": "FFMA FMUL FADD IMAD FFMA2 FMUL2 FADD2 IMUL IDP IDP4A HFMA2 HADD2 HMUL2 FSWZADD FFMA32I FMUL32I "
    "FADD32I",
    "lsu": "LDG STG LDS STS LDSM STSM LDGSTS LDL STL LD ST ATOM ATOMS ATOMG RED REDG LDC SHFL MOVM QSPC",
    "tmem": "LDTM STTM",
    "tma": "UBLKCP UBLKRED",
    "ctrl": "BRA BRX JMP EXIT RET CALL BSSY BSYNC BREAK WARPSYNC NOP BAR DEPBAR LDGDEPBAR FENCE MEMBAR SYNCS "
    "UTCBAR WARPGROUP NANOSLEEP BPT YIELD ERRBAR CCTL USETMAXREG WARPGROUPSET UVIRTCOUNT ARRIVES ACQBULK",
    "uni": "R2UR S2UR S2R VOTEU ELECT LDCU REDUX",
}
_PIPE_OF = {base: name for name, bases in _PIPES.items() for base in bases.split()}
PACKED = ("FFMA2", "FMUL2", "FADD2")  # two lanes' work in one


@functools.cache
def _pipe(base: str) -> str:
    if base in _PIPE_OF:
        return _PIPE_OF[base]
    prefixes = {"UTMACMDFLUSH": "ctrl", "UTMA": "tma", "UTCATOM": "ctrl", "U": "uni"}
    return next((name for prefix, name in prefixes.items() if base.startswith(prefix)), "alu")


def pipe(x: Ins) -> str:
    """Return the pipe that executes an instruction; anything not listed is integer and logic work."""
    return _pipe(x.base)


def width(op: str) -> int:
    """Return the bytes that a memory instruction moves for each thread."""
    found = re.search(r"\.(128|64|U8|S8|U16|S16)\b", op)
    return {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}[found[1]] if found else 4


_THROUGH_L1 = frozenset(("LDS", "STS", "LDG", "STG", "LDGSTS", "LDL", "STL", "ATOMS", "LD", "ST"))


def smem_bytes(x: Ins) -> int:
    """Return the bytes that one warp moves through the path of shared memory and L1."""
    if x.base in ("LDSM", "STSM"):  # LDSM.16.MT88.4: four 8x8 matrices of 16 bits
        matrices = re.search(r"\.([124])$", x.op)
        return 128 * int(matrices[1]) if matrices else 128
    return 32 * width(x.op) if x.base in _THROUGH_L1 else 0


class Products(NamedTuple):
    """The work of a tensor instruction."""

    macs: float  # multiply-adds, for one warp; for the whole block if it is tcgen05
    operands: float  # bytes read from shared memory, likewise
    of_block: bool


TF32 = 2  # the type of an operand, in the descriptor of a tcgen05 product


def tensor_fma(ins: Sequence[Ins], i: int) -> Products:
    """Count the multiply-adds of tensor instruction i, and the operand bytes that it reads itself."""
    x = ins[i]
    if found := re.search(r"\.(\d+)x(\d+)x(\d+)", x.op):  # HGMMA.64x128x16, which four warps share
        m, n, k = map(int, found.groups())
        is_a_shared = not re.match(r"R\w+, R\d+", x.args)
        return Products(m * n * k / 4, 2 * k * (n + (m if is_a_shared else 0)) / 4, False)
    if x.base.startswith("UTC"):
        m, n, k = _tcgen05_shape(ins, i)
        is_a_shared = not x.args.startswith("tmem")
        return Products(m * n * k, 2 * k * (n + (m if is_a_shared else 0)), True)
    found = re.search(r"\.(16816|1688|16832|884)\b", x.op)
    if found is None:
        raise ValueError(f"unknown shape of a tensor instruction: {x.op} {x.args}")
    return Products({"16816": 2048, "1688": 1024, "16832": 4096, "884": 256}[found[1]], 0, False)


def _tcgen05_shape(ins: Sequence[Ins], i: int) -> tuple[int, int, int]:
    """Decode m, n, k from the descriptor: the last constant in its register, here or for an earlier one."""
    for at in range(i, -1, -1):
        found = re.search(r"idesc\[(UR\d+)\]", ins[at].args) if ins[at].base.startswith("UTC") else None
        if found is None:
            continue
        write = re.compile(rf"{found[1]}, (0x[0-9a-f]+)$")
        for x in reversed(ins[:at]):
            if x.base == "UMOV" and (value := write.match(x.args)):
                bits = int(value[1], 16)
                is_tf32 = ins[i].base == "UTCHMMA" and bits >> 7 & 7 == TF32
                k = 8 if is_tf32 else 16 if ins[i].base == "UTCHMMA" else 32
                return (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3, k
    raise ValueError(f"no descriptor found for {ins[i].op} {ins[i].args}")


# --------------------------------------------------------------------------------- measuring a loop
@dataclass(frozen=True)
class Loop:
    """One trip of one block round a loop."""

    n: int  # instructions of a warp
    warps: int
    counts: Counter[str]  # of a warp, by pipe
    ops: Counter[str]  # of a warp, by operation
    flops: float  # of tensor work, of the block
    cycles: dict[str, float]  # modelled: each pipe's time for the block
    issued: float | None  # modelled: cycles by the issue model

    @property
    def spills(self) -> int:
        """Return the instructions per warp that move registers to and from local memory."""
        return sum(self.ops[op] for op in SPILLS)

    def per_mflop(self, count: float) -> float:
        """Convert a warp's count to the block's per million floating-point operations of tensor work."""
        return count * self.warps / (self.flops / 1e6)

    @property
    def instructions(self) -> float:
        """Return the warp instructions per million floating-point operations of tensor work."""
        return self.per_mflop(self.n)

    @property
    def limiter(self) -> str:
        """Return the busiest pipe."""
        return max(self.cycles, key=self.cycles.__getitem__)

    @property
    def bound(self) -> float:
        """Return the tensor pipe's share of the busiest pipe's time."""
        return self.cycles["tensor"] / max(self.cycles.values())

    @property
    def model(self) -> float:
        """Return the tensor pipe's share of the issue model's time, or of its own plus the next pipe's."""
        tensor = self.cycles["tensor"]
        if self.issued is not None:
            return tensor / self.issued
        return tensor / (tensor + max(time for name, time in self.cycles.items() if name != "tensor"))


def measure(
    ins: Sequence[Ins], body: Sequence[int], cc: int, warps: int, ctas: int, model: bool = True
) -> Loop:
    """Count the instructions of a loop and weigh them by pipe.

    Args:
        ins: the function.
        body: indices of the loop's instructions.
        cc: compute capability x 10.
        warps: of a block.
        ctas: blocks on an SM.
        model: also run the issue model.
    """
    arch = ARCH[cc]
    counts = Counter(pipe(ins[i]) for i in body)
    ops = Counter(ins[i].base for i in body)
    macs = operands = 0.0
    for i in body:
        if pipe(ins[i]) == "tensor":
            work = tensor_fma(ins, i)
            share = 1 if work.of_block else warps
            macs += work.macs * share
            operands += work.operands * share
    shared = sum(smem_bytes(ins[i]) for i in body)
    tmem = sum(_tmem_bytes(ins[i]) for i in body)
    lanes = 32 * warps
    cycles = {
        "tensor": macs / arch.tensor,
        "xu": counts["xu"] * lanes / arch.xu,
        "fma": (counts["fma"] + sum(ops[op] for op in PACKED)) * lanes / arch.fma,
        "alu": counts["alu"] * lanes / arch.alu,
        "lsu": (shared * warps + operands) / arch.smem_bytes + ops["SHFL"] * warps,
        "tmem": tmem * warps / arch.tmem_bytes,
        "issue": len(body) * warps / 4,
    }
    issued = None
    if model and macs and cc not in ASYNCHRONOUS:
        issued = issue.simulate([_step(ins, i, cc) for i in body], warps, ctas)
    return Loop(len(body), warps, counts, ops, 2 * macs, cycles, issued)


def _tmem_bytes(x: Ins) -> int:
    if x.base not in ("LDTM", "STTM"):
        return 0
    columns = re.search(r"\.x(\d+)", x.op)
    return 128 * (int(columns[1]) if columns else 1)


def _step(ins: Sequence[Ins], i: int, cc: int) -> issue.Step:
    """Describe an instruction for the issue model."""
    x, arch = ins[i], ARCH[cc]
    name = pipe(x)
    busy = {"fma": max(1, 128 // arch.fma), "alu": 128 // arch.alu, "xu": 128 // arch.xu, "uni": 2}.get(
        name, 1.0
    )
    if name == "tensor":
        busy = max(1.0, tensor_fma(ins, i).macs / (arch.tensor / 4))
    elif name == "lsu":  # four sub-partitions share it
        busy = 4 * max(1.0, smem_bytes(x) / arch.smem_bytes)
    return issue.Step.of(x.base, x.op, x.args, name, busy, x.stall, x.wr, x.rd, x.wait)


# ------------------------------------------------------------------------------------- whole kernel
@dataclass(frozen=True)
class Report:
    """A kernel's resources and its innermost loops with tensor work, in the order of their addresses."""

    name: str
    cc: int
    warps: int
    regs: int
    shared: int  # bytes of a block
    ctas: int  # blocks on an SM
    limiter: str  # what limits their number
    n: int  # instructions in all
    spills: int  # instructions in all
    loops: list[Loop]


def resources(kernel: Compiled) -> tuple[int, int, int, str]:
    """Return a thread's registers, a block's shared memory, the blocks on an SM and their limiter."""
    usage = run("cuobjdump", "-res-usage", cubin=kernel.cubin)
    regs = max(int(n) for n in re.findall(r"REG:(\d+)", usage))
    shared = kernel.shared + max(map(int, re.findall(r"SHARED:(\d+)", usage)), default=0)
    ctas, limiter = occupancy(kernel.cc, regs, 32 * kernel.warps, shared, kernel.tmem)
    return regs, shared, ctas, limiter


def hot_loops(section: Section, heavy: frozenset[str]) -> list[list[int]]:
    """Return the innermost loops that hold one of these operations, as ordered indices of instructions."""
    ins = section.ins
    blocks, successors = flow.cfg(ins, section.labels)
    found = flow.loops(successors)
    bodies = {
        head: sorted(i for start in body for i in range(*blocks[start])) for head, body in found.items()
    }
    busy = {head for head, body in bodies.items() if any(ins[i].base in heavy for i in body)}
    return [bodies[h] for h in sorted(busy) if not any(g != h and found[g] < found[h] for g in busy)]


TENSOR = frozenset(_PIPES["tensor"].split())


def analyse(kernel: Compiled, model: bool = True, heavy: frozenset[str] = TENSOR) -> Report:
    """Read a kernel's cubin.

    Args:
        kernel: as compiled.
        model: run the issue model.
        heavy: operations that make a loop worth reporting.

    Raises:
        ValueError: if warps have different roles, so that no single loop is the kernel's.
    """
    regs, shared, ctas, limiter = resources(kernel)
    sections = disasm(kernel.cubin)
    code = [x for section in sections for x in section.ins]
    if any(x.base == "USETMAXREG" for x in code):
        raise ValueError(f"{kernel.name}: warp-specialised kernels are not supported")
    loops = [
        measure(section.ins, body, kernel.cc, kernel.warps, max(1, ctas), model)
        for section in sections
        for body in hot_loops(section, heavy)
    ]
    spills = sum(x.base in SPILLS for x in code)
    return Report(kernel.name, kernel.cc, kernel.warps, regs, shared, ctas, limiter, len(code), spills, loops)

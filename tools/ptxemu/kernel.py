"""A kernel: decoded once, launched many times."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

# Each of these registers the decoders of its instructions.
from . import access, arithmetic, atomics, convert, cp_async, mbarrier, mma, tcgen05, tma, warp, wgmma  # noqa: F401
from .converge import Meeting
from .counters import Counters, Wavefronts, pipe
from .decode import Decoder, Source, Step, Unsupported, decode
from .memory import Memory
from .mma import fragments
from .parse import Function, Instruction, parse
from .races import GlobalRaces, SharedRaces
from .schedule import EXIT, Block, NamedBarrier, Next, Terminator, run
from .state import Batch, Group, Launch
from .tma import TensorMap
from .values import BITS, RAW, Array, Mask, constant

LANES = 4096  # threads that run in lockstep, unless a launch chooses another number
_FIRST_TENSOR_MAP = 1 << 58  # addresses of tensor maps given as parameters
_JUMPS = ("bra", "brx", "ret", "exit")

Argument: TypeAlias = "int | float | bytes | TensorMap"


@dataclass
class Report:
    """The result of a launch.

    Attributes:
        counters: its counts.
        races: a sentence per kind of race, with the number of words it concerns.
    """

    counters: Counters = field(default_factory=Counters)
    races: Counter[str] = field(default_factory=Counter)


class Kernel:
    """One kernel of a PTX module.

    Args:
        ptx: text of the module.
        name: name of the kernel; None for the first one.

    Raises:
        Unsupported: if it has an unknown instruction.

    Example::

        memory = Memory()
        x = memory.put(array)
        Kernel(ptx).launch((4,), [x, 3], memory, shared=1024)
        memory.get(x)
    """

    def __init__(self, ptx: str, name: str | None = None) -> None:
        self.function: Function = parse(ptx, name)
        self.name = self.function.name
        if self.function.cluster > 1:
            raise Unsupported(f"{self.name}: wanted clusters of one CTA, got {self.function.cluster}")
        self._code = Decoder(self.function)
        instructions = self.function.instructions
        starts = _block_starts(self.function)
        self._block_at = {start: i for i, start in enumerate(starts)}
        ends = [*starts[1:], len(instructions)]
        bodies = [instructions[a:b] for a, b in zip(starts, ends, strict=True)]
        self.opcodes = [Counter(ins.opcode for ins in body) for body in bodies]  # of each block
        self.texts = bodies
        self.blocks = [self._block(i, body) for i, body in enumerate(bodies)]

    @property
    def parameters(self) -> int:
        return len(self.function.parameters)

    # ---- decoding

    def _block(self, number: int, body: Sequence[Instruction]) -> Block:
        following = number + 1 if number + 1 < len(self._block_at) else EXIT
        waits = any(ins.opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait")) for ins in body)
        if waits and self._only_goes_to(following, number):
            following = number
        barrier = self._barrier(body[0]) if _is_barrier(body[0]) else None
        terminator: Terminator = lambda group, mask: following  # noqa: E731
        steps: list[tuple[Source | None, Step]] = []
        meetings: dict[int, Meeting] = {}
        for ins in body if barrier is None else ():
            guard = self._code.predicate(ins.guard) if ins.guard else None
            if ins.name in _JUMPS:
                terminator = self._jump(ins, guard, following)
                continue
            step = _trap if ins.name == "trap" else decode(ins, self._code)
            meeting = Meeting.of(ins, self._code)
            if meeting is not None:
                meetings[len(steps)] = meeting
                step = step or _nothing
                if guard is not None or meeting.members is not None:
                    step = meeting.guarded(step)
            if step is not None:
                steps.append((guard, step))
        return Block(steps, terminator, barrier, waits, meetings)

    def _only_goes_to(self, number: int, to: int) -> bool:
        """Return whether a block does nothing but jump to another, as inline assembly does to test again."""
        if number == EXIT:
            return False
        *idle, last = self.texts[number]
        is_idle = all(ins.name == "nanosleep" for ins in idle)
        return is_idle and last.name == "bra" and last.guard is None and self._target(last.operands[0]) == to

    def _barrier(self, ins: Instruction) -> NamedBarrier:
        if ins.guard is not None:
            raise Unsupported(str(ins))
        number = self._code.source(ins.operands[0] if ins.operands else "0")
        threads = self._code.source(ins.operands[1]) if len(ins.operands) > 1 else None
        return NamedBarrier(number, threads, "arrive" in ins.modifiers)

    def _jump(self, ins: Instruction, guard: Source | None, following: int) -> Terminator:
        if ins.name == "brx":
            index = self._code.source(ins.operands[0])
            labels = self.function.tables[ins.operands[1]]
            blocks = np.array([self._target(label) for label in labels])
            return lambda group, mask: _same(blocks[group.wide(index(group))], mask)
        to = self._target(ins.operands[0]) if ins.name == "bra" else EXIT
        if guard is None:
            return lambda group, mask: to

        def branch(group: Group, mask: Mask) -> Next:
            return _same(np.where(group.wide(guard(group)), to, following), mask)

        return branch

    def _target(self, label: str) -> int:
        return self._block_at.get(self.function.labels[label], EXIT)

    # ---- running

    def launch(
        self,
        grid: Sequence[int],
        arguments: Sequence[Argument],
        memory: Memory,
        *,
        shared: int = 0,
        block: Sequence[int] | None = None,
        batch: int | None = None,
        late: bool = False,
        racecheck: bool = False,
        conflicts: bool = False,
    ) -> Report:
        """Run all CTAs of a grid.

        Args:
            grid: CTAs along x, y, z.
            arguments: one for each parameter; bytes are a struct passed by value.
            memory: the buffers that it may touch.
            shared: bytes of dynamic shared memory.
            block: threads along x, y, z; None for those in the text.
            batch: CTAs that run at the same time; those that wait for each other must fit in one batch.
            late: deliver the bytes of cp.async only when they are waited for.
            racecheck: look for races.
            conflicts: count shared-memory bank conflicts, which is slow.

        Raises:
            OutOfBounds: if an access is outside ``memory`` or shared memory, or misaligned.
            Deadlock: if all warps wait.
        """
        if len(arguments) != self.parameters:
            raise TypeError(f"{self.name} takes {self.parameters} arguments, got {len(arguments)}")
        x, y, z = (*grid, 1, 1)[:3]
        sizes = tuple(block) if block is not None else (self.function.threads,)
        report = Report()
        if conflicts:
            report.counters.conflicts = defaultdict(Wavefronts)
        variables = {
            name: memory.put(variable.data)
            for name, variable in self.function.variables.items()
            if variable.space == "global"
        }
        maps = {_FIRST_TENSOR_MAP + 128 * i: a for i, a in enumerate(arguments) if isinstance(a, TensorMap)}
        races = GlobalRaces(memory.mapped, self._granularity("global", maps)) if racecheck else None
        parameters = [self._parameter(i, argument) for i, argument in enumerate(arguments)]
        bx, by, bz = (*sizes, 1, 1)[:3]
        launch = Launch((x, y, z), (bx, by, bz), memory, parameters, report.counters, races, late)
        launch.variables, launch.tensor_maps = variables, maps
        launch.dynamic_shared = -(-self.function.shared_bytes // 16) * 16
        launch.dynamic_shared_bytes = shared
        ctas = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        size = batch or max(1, LANES // launch.threads)
        with np.errstate(all="ignore"):
            for first in range(0, len(ctas), size):
                report.races += self._run(launch, ctas[first : first + size], racecheck)
        fragments.clear()
        if races is not None:
            report.races += races.found
        return report

    def _run(self, launch: Launch, ctas: Sequence[tuple[int, int, int]], racecheck: bool) -> Counter[str]:
        shared = -(-max(launch.dynamic_shared + launch.dynamic_shared_bytes, 16) // 16) * 16
        granularity = self._granularity("shared", {})
        races = SharedRaces(len(ctas), launch.threads, shared, granularity) if racecheck else None
        batch = Batch(launch, ctas, shared, self.function.local_bytes, races)
        group = Group(batch, np.arange(len(ctas)), self._code.zeros())
        real = math.prod(launch.block)
        start: Next = 0 if real == launch.threads else np.where(group.thread < real, 0, EXIT)
        run(self.blocks, batch, group, start)
        return Counter() if races is None else races.found

    def _parameter(self, number: int, argument: Argument) -> Array:
        kind = self.function.parameters[number].type
        bits = BITS[kind]
        if isinstance(argument, TensorMap):
            return constant(_FIRST_TENSOR_MAP + 128 * number, 64)
        if isinstance(argument, bytes):
            return np.frombuffer(argument, np.uint8)
        if isinstance(argument, float) or kind in ("f32", "f64"):
            wide = np.array(argument, np.float64 if bits == 64 else np.float32)
            return wide.view(RAW[bits])
        return constant(int(argument), bits)

    def _granularity(self, space: str, maps: dict[int, TensorMap]) -> int:
        """Return the bytes of the narrowest access, at most 4: a word of the race check."""
        sizes = [4, *(tensor.item for tensor in maps.values())]
        for opcode in {opcode for block in self.opcodes for opcode in block}:
            name, _, rest = opcode.partition(".")
            if name in ("ld", "st") and (space in rest or "shared" not in rest) and ".param" not in opcode:
                sizes.append(BITS[opcode.rpartition(".")[2]] // 8)
            if name == "tensormap" and space == "global":
                sizes.append(1)
        return min(sizes)

    # ---- reports

    def executed(self, counters: Counters) -> Counter[str]:
        """Return the instructions run, by opcode, counted once per warp."""
        total: Counter[str] = Counter()
        for number, times in counters.blocks.items():
            for opcode, count in self.opcodes[number].items():
                total[opcode] += count * times
        return total

    def describe(self, counters: Counters) -> str:
        """Describe a launch in a few lines."""
        executed, pipes = self.executed(counters), Counter[str]()
        for opcode, count in executed.items():
            pipes[pipe(opcode)] += count
        lines = [
            f"{self.name}: {sum(executed.values())} warp-level PTX instructions: {dict(pipes)}",
            f"global bytes: {dict(counters.bytes)}; tensor-core multiply-adds: {counters.macs}",
            f"basic blocks: {len(counters.blocks)} of {len(self.blocks)}",
        ]
        for kind, found in (counters.conflicts or {}).items():
            lines.append(f"shared {kind}: {found.actual} wavefronts, {found.ideal} without conflicts")
        return "\n".join(lines)


def _block_starts(function: Function) -> list[int]:
    starts = {0, *function.labels.values()}
    for i, ins in enumerate(function.instructions):
        if ins.name in (*_JUMPS, "trap"):
            starts.add(i + 1)
        if _is_barrier(ins):  # a block of its own, where warps can be held back
            starts |= {i, i + 1}
    return sorted(start for start in starts if start < len(function.instructions))


def _is_barrier(ins: Instruction) -> bool:
    return ins.opcode.startswith(
        ("bar.sync", "bar.arrive", "barrier.sync", "barrier.cta", "barrier.arrive")
    ) and ("red" not in ins.modifiers)


def _nothing(group: Group, mask: Mask) -> None:
    """Do nothing, at an instruction at which lanes only meet."""


def _trap(group: Group, mask: Mask) -> None:
    if mask is None or mask.any():
        raise RuntimeError("trap")


def _same(to: Array, mask: Mask) -> Next:
    """Return one block if all active lanes go to it, otherwise one per lane."""
    live = to if mask is None else to[mask]
    return int(live[0]) if (live == live[0]).all() else to

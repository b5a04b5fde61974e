"""mbarrier (sm_90): a barrier in shared memory that counts arrivals and bytes, phase after phase."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .cp_async import wait as wait_for_copies
from .decode import Decoder, Step, instruction, refuse
from .parse import Instruction
from .state import Batch, Group
from .values import Array, Mask


def _nothing() -> Array:
    return np.zeros(1, np.int32)


@dataclass
class Barrier:
    """State of one barrier.

    Attributes:
        expected: arrivals that each phase waits for.
        missing: arrivals that this phase still waits for.
        bytes: bytes that it still waits for.
        phase: parity of the current phase.
        maker: the warp that initialised it, and its clock then, for the race check.
        arriving: clocks of the arrivals in this phase, for the race check.
        arrived: clocks of the arrivals in earlier phases.
    """

    expected: int
    missing: int
    bytes: int = 0
    phase: int = 0
    maker: tuple[int, int] = (0, 0)
    arriving: Array = field(default_factory=_nothing)
    arrived: Array = field(default_factory=_nothing)

    def update(self, arrivals: int = 0, more_bytes: int = 0) -> None:
        """Count arrivals and bytes to expect (negative: bytes received); advance when none is missing."""
        self.missing -= arrivals
        self.bytes += more_bytes
        if self.missing <= 0 and self.bytes == 0:
            self.phase ^= 1
            self.missing = self.expected
            self.arrived = np.maximum(self.arrived, self.arriving)
            self.arriving = _nothing()


def find(batch: Batch, place: int, address: int, warp: int) -> Barrier:
    """Return the barrier that a warp uses."""
    barrier = batch.barriers.get((place, address))
    if barrier is None:
        raise RuntimeError(f"the mbarrier at shared address {address} was not initialised")
    if batch.races is not None:
        batch.races.use(barrier, place, warp)
    return barrier


def receive(group: Group, lane: int, address: int, size: int) -> None:
    """Record that TMA has copied ``size`` bytes for a lane."""
    batch, place, warp = group.batch, int(group.place[lane]), int(group.thread[lane]) // 32
    barrier = find(batch, place, address, warp)
    if batch.races is not None:
        batch.races.engine_arrives(barrier, place, warp, batch.races.tma)
    barrier.update(more_bytes=-size)
    batch.barrier_events += 1


def products_done(group: Group, lane: int, address: int) -> None:
    """Record that the tensor core of sm_100 has finished a lane's work."""
    batch, place, warp = group.batch, int(group.place[lane]), int(group.thread[lane]) // 32
    barrier = find(batch, place, address, warp)
    if batch.races is not None:
        batch.races.engine_arrives(barrier, place, warp, batch.races.tcgen05)
    barrier.update(arrivals=1)
    batch.barrier_events += 1


@instruction("mbarrier.init", "mbarrier.inval")
def _init(ins: Instruction, code: Decoder) -> Step:
    address = code.address(ins.operands[0])
    count = code.source(ins.operands[1] if len(ins.operands) > 1 else "0")

    def step(group: Group, mask: Mask) -> None:
        at, counts = address(group), group.wide(count(group))
        for lane in group.active(mask):
            place, warp = int(group.place[lane]), int(group.thread[lane]) // 32
            if ins.modifiers[0] == "inval":
                group.batch.barriers.pop((place, int(at[lane])), None)
                continue
            barrier = Barrier(int(counts[lane]), int(counts[lane]))
            if group.batch.races is not None:
                barrier.maker = warp, int(group.batch.races.view[place, warp, warp])
            group.batch.barriers[place, int(at[lane])] = barrier

    return step


@instruction("mbarrier.arrive", "mbarrier.expect_tx", "mbarrier.complete_tx")
def _arrive(ins: Instruction, code: Decoder) -> Step:
    i = next(i for i, text in enumerate(ins.operands) if text.startswith("["))
    address, more = code.address(ins.operands[i]), ins.operands[i + 1 :]
    number = code.source(more[0] if more else "1")
    arrives, counts_bytes = ins.modifiers[0] == "arrive", "_tx" in ins.opcode
    sign = -1 if "complete_tx" in ins.opcode else 1

    def step(group: Group, mask: Mask) -> None:
        batch, at, numbers = group.batch, address(group), group.wide(number(group))
        for lane in group.active(mask):
            place, warp, n = int(group.place[lane]), int(group.thread[lane]) // 32, int(numbers[lane])
            barrier = find(batch, place, int(at[lane]), warp)
            if batch.races is not None and arrives:
                batch.races.arrive(barrier, place, warp)
            if counts_bytes:
                barrier.update(int(arrives), sign * n)
            else:
                barrier.update(n)
            batch.barrier_events += 1

    return step


@instruction("cp.async.mbarrier.arrive")
def _arrive_with_copies(ins: Instruction, code: Decoder) -> Step:
    """Arrive when the thread's copies are done; without noinc, expect one more arrival for it."""
    address, counts = code.address(ins.operands[0]), "noinc" in ins.modifiers

    def step(group: Group, mask: Mask) -> None:
        wait_for_copies(group, mask, -1)
        at, batch = address(group), group.batch
        for lane in group.active(mask):
            place, warp = int(group.place[lane]), int(group.thread[lane]) // 32
            barrier = find(batch, place, int(at[lane]), warp)
            if batch.races is not None:
                batch.races.arrive(barrier, place, warp)
            barrier.update(int(counts))
            batch.barrier_events += 1

    return step


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def _wait(ins: Instruction, code: Decoder) -> Step:
    """Test whether the phase of a parity is over; the program itself branches back."""
    if "parity" not in ins.modifiers:
        refuse(ins)
    address, parity = code.address(ins.operands[1]), code.source(ins.operands[2])

    def values(group: Group, mask: Mask) -> list[Array]:
        batch = group.batch
        at, parities = group.by_warp(address(group)), group.by_warp(parity(group)) & np.uint32(1)
        active = np.ones(at.shape, bool) if mask is None else mask.reshape(-1, 32)
        over = np.ones(at.shape, bool)
        for warp in np.nonzero(active.any(1))[0]:
            place, thread = int(group.place[32 * warp]), int(group.thread[32 * warp])
            wanted = np.stack([at[warp], parities[warp]])  # nearly always one for the whole warp
            for where, phase in np.unique(wanted[:, active[warp]], axis=1).T:
                barrier = find(batch, place, int(where), thread // 32)
                over[warp, (wanted[0] == where) & (wanted[1] == phase)] = barrier.phase != phase
                if barrier.phase != phase and batch.races is not None:
                    batch.races.wait(barrier, place, thread // 32)
        return [over.reshape(-1)]

    return code.assign_all(ins.operands[:1], values)

"""The state of a running kernel: a batch of CTAs, and groups of them that run in lockstep.

A ``Batch`` owns shared, local and tensor memory, pending copies and barriers, by a CTA's place in the batch.
A ``Group`` holds the registers of some of its CTAs, which are at the same instruction. Splitting and merging
groups copies registers and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .counters import Counters
from .memory import Memory
from .races import GlobalRaces, SharedRaces
from .values import Array, Mask

if TYPE_CHECKING:
    from .cp_async import Copy
    from .mbarrier import Barrier
    from .tma import TensorMap

LOCAL = 1 << 60  # generic addresses from here on are local memory


class Launch:
    """The state that all CTAs of a launch share."""

    def __init__(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        memory: Memory,
        parameters: Sequence[Array],
        counters: Counters,
        races: GlobalRaces | None,
        late: bool,
    ) -> None:
        self.grid, self.block = grid, block
        self.threads = -(-block[0] * block[1] * block[2] // 32) * 32  # per CTA; the last warp may be partial
        self.memory, self.parameters = memory, parameters
        self.counters, self.races, self.late = counters, races, late
        self.variables: dict[str, int] = {}  # addresses of global variables
        self.dynamic_shared = 0  # where the extern shared array starts
        self.dynamic_shared_bytes = 0
        self.tensor_maps: dict[int, TensorMap] = {}  # by address
        self.tensor_map_fields: dict[
            tuple[int, int], dict[tuple[str, int], int]
        ] = {}  # by CTA, shared address

    def cta_number(self, cta: tuple[int, int, int]) -> int:
        return cta[0] + self.grid[0] * (cta[1] + self.grid[1] * cta[2])


class Batch:
    """CTAs that run at the same time."""

    def __init__(
        self,
        launch: Launch,
        ctas: Sequence[tuple[int, int, int]],
        shared_bytes: int,
        local_bytes: int,
        races: SharedRaces | None,
    ) -> None:
        self.launch, self.ctas, self.shared_bytes = launch, np.array(ctas, np.uint32), shared_bytes
        self.numbers = np.array([launch.cta_number(cta) for cta in ctas])
        # A GPU does not clear it: a read before a write finds NaN here.
        self.shared = np.full(len(ctas) * shared_bytes, 0xFF, np.uint8)
        self.local = np.full((len(ctas) * launch.threads, local_bytes), 0xFF, np.uint8)
        self.tensor_columns = np.zeros(len(ctas), np.int64)  # allocated so far
        self.copies: list[Copy] = []
        self.commits = np.zeros(len(ctas) * launch.threads, np.int64)  # groups of cp.async, by thread
        self.barriers: dict[tuple[int, int], Barrier] = {}  # by place in the batch, shared address
        self.barrier_events = 0  # arrivals so far; while it does not change, waiting is pointless
        self.races = races

    @cached_property
    def tensor_memory(self) -> Array:
        """Return tensor memory, [CTA, 128 lanes, 512 columns] of 32 bits."""
        return np.full((len(self.ctas), 128, 512), 0xFFFFFFFF, np.uint32)


class Group:
    """CTAs in lockstep.

    Attributes:
        places: places of its CTAs in the batch.
        registers: registers by number; each [lanes], or 0-d if all lanes agree.
    """

    def __init__(self, batch: Batch, places: Array, registers: list[Array]) -> None:
        self.batch, self.launch, self.places, self.registers = batch, batch.launch, places, registers
        self.threads = batch.launch.threads  # of a CTA
        self.lanes = len(places) * self.threads

    def take(self, chosen: Array) -> Group:
        """Return a group of the CTAs for which ``chosen`` is true."""
        lanes = np.repeat(chosen, self.threads)
        return Group(self.batch, self.places[chosen], [r[lanes] if r.ndim else r for r in self.registers])

    @staticmethod
    def merge(groups: Sequence[Group]) -> Group:
        """Merge groups that are at the same instruction."""
        if len(groups) == 1:
            return groups[0]
        registers = []
        for column in zip(*(group.registers for group in groups), strict=True):
            if all(not r.ndim for r in column) and all(r == column[0] for r in column):
                registers.append(column[0])
            else:
                wide = [group.wide(r) for group, r in zip(groups, column, strict=True)]
                registers.append(np.concatenate(wide))
        return Group(groups[0].batch, np.concatenate([group.places for group in groups]), registers)

    # ---- lanes

    def wide(self, values: Array) -> Array:
        """Return one value per lane; a constant has no dimension, or one of size 1 if numpy converted it."""
        return values if values.size == self.lanes else np.broadcast_to(values, (self.lanes,))

    def dense(self, values: Array) -> Array:
        """Return one value per lane, contiguous in memory."""
        return np.ascontiguousarray(self.wide(values))

    def active(self, mask: Mask) -> Array:
        """Return the numbers of the active lanes."""
        return np.arange(self.lanes) if mask is None else np.nonzero(mask)[0]

    def by_warp(self, values: Array) -> Array:
        """Return values as [warps, 32]."""
        return self.wide(values).reshape(-1, 32)

    def write(self, register: int, values: Array, mask: Mask) -> None:
        if mask is not None:
            values = np.where(mask, values, self.registers[register])
        self.registers[register] = values

    @cached_property
    def thread(self) -> Array:
        """Return each thread's number in its CTA."""
        return np.tile(np.arange(self.threads, dtype=np.uint32), len(self.places))

    @cached_property
    def lane(self) -> Array:
        """Return each thread's number in its warp."""
        return self.thread & np.uint32(31)

    @cached_property
    def place(self) -> Array:
        """Return the place of each thread's CTA in the batch."""
        return np.repeat(self.places, self.threads)

    @cached_property
    def number(self) -> Array:
        """Return each thread's number in the batch."""
        return self.place * self.threads + self.thread

    @cached_property
    def cta_number(self) -> Array:
        """Return the number of each thread's CTA in the grid."""
        return np.repeat(self.batch.numbers[self.places], self.threads)

    @cached_property
    def shared_base(self) -> Array:
        """Return the start of each CTA's shared memory in the batch's, per thread."""
        return self.place * self.batch.shared_bytes

    def cta_index(self, axis: int) -> Array:
        return np.repeat(self.batch.ctas[self.places, axis], self.threads)

    def thread_index(self, axis: int) -> Array:
        x, y, _ = self.launch.block
        size = np.uint32((x, y, 1 << 31)[axis])
        return self.thread // np.uint32((1, x, x * y)[axis]) % size

"""Memory touched twice with nothing in between that orders the two.

Global memory, between CTAs: a word that one CTA writes and another writes or reads, atomics aside.

Shared memory, between the warps of a CTA: a word that one warp writes and another touches, with no
barrier between. Warps run in lockstep here, so a missing barrier does not change results; it shows because
vector clocks follow what each warp may know. A warp's *view* is how far it knows all others to have come;
bar.sync makes the views of all who take part equal, an mbarrier hands on the views of those who arrive to
those who wait. To touch what the view does not contain is a race.

What runs beside the warps has a clock of its own: the part of a wgmma that belongs to each warp, TMA, and the
tensor core of sm_100 (tcgen05). What they touch is in nobody's view until a wait or an mbarrier says it is
done. The bytes of a cp.async are nobody's until its thread has waited for them.

Doubt is resolved towards silence: lanes of one warp count as ordered, shared atomics are not followed, and
waiting for one TMA copy counts as waiting for all issued before it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from .memory import Mapped
from .values import Array

if TYPE_CHECKING:
    from .mbarrier import Barrier

NEVER = np.iinfo(np.int32).max  # the clock of a copy that nobody has waited for


class RaceError(RuntimeError):
    """Results may depend on which warp or CTA comes first."""


class GlobalRaces:
    """Words of global memory, with the CTAs that wrote and read them last."""

    def __init__(self, memory: Mapped, granularity: int) -> None:
        self._memory, self._granularity = memory, granularity
        self._writer = np.zeros(memory.size // granularity + 1, np.int32)  # number of the CTA + 1
        self._reader = np.zeros_like(self._writer)
        self.found: Counter[str] = Counter()

    def _words(self, offsets: Array, size: int) -> Array:
        parts = np.arange(0, size, self._granularity)
        return self._memory.number(offsets[:, None] + parts) // self._granularity  # [accesses, parts]

    def write(self, offsets: Array, size: int, cta: Array) -> None:
        if not offsets.size:
            return
        words, who = self._words(offsets, size), np.broadcast_to(cta, offsets.shape)[:, None] + 1
        writer, reader = self._writer[words], self._reader[words]
        self._report("two CTAs write", (writer != 0) & (writer != who))
        self._report("a CTA writes what another has read", (reader != 0) & (reader != who))
        self._writer[words] = who
        self._report("two CTAs write", self._writer[words] != who)  # in this very store

    def read(self, offsets: Array, size: int, cta: Array) -> None:
        if not offsets.size:
            return
        words, who = self._words(offsets, size), np.broadcast_to(cta, offsets.shape)[:, None] + 1
        writer = self._writer[words]
        self._report("a CTA reads what another has written", (writer != 0) & (writer != who))
        self._reader[words] = who

    def _report(self, what: str, wrong: Array) -> None:
        if wrong.any():
            self.found[f"global memory: {what} ({self._granularity}-byte words)"] += int(wrong.sum())


class SharedRaces:
    """Words of the shared memory of a batch, with who wrote and read them last, and everybody's view.

    Clocks are numbered: first the warps, then what the tensor cores do for each warp, TMA, tcgen05.
    """

    def __init__(self, ctas: int, threads: int, shared_bytes: int, granularity: int) -> None:
        self.warps = threads // 32
        self.tma = 2 * self.warps
        self.tcgen05 = self.tma + 1
        clocks = self.tcgen05 + 1
        self._granularity = granularity
        words = ctas * shared_bytes // granularity
        self._writer = np.zeros(words, np.int16)
        self._written = np.zeros(words, np.int32)  # the writer's clock then
        self._read = np.zeros((words, clocks), np.int32)  # each reader's clock at its last read
        self.view = np.zeros((ctas, clocks, clocks), np.int32)  # view[cta, who, of whom]
        self._own = np.arange(clocks)
        self.view[:, self._own, self._own] = 1
        self._committed: dict[tuple[int, int], list[int]] = {}  # clocks of each warp's wgmma groups
        self.found: Counter[str] = Counter()

    # ---- who knows what

    def barrier(self, places: Array, warps: Array) -> None:
        """The warps [CTAs, warps] of these CTAs that take part now know what each of them knew."""
        part = self.view[places, : self.warps]
        known = np.where(warps[:, :, None], part, 0).max(1, keepdims=True)  # [CTAs, 1, clocks]
        self.view[places, : self.warps] = np.where(warps[:, :, None], known, part)
        cta, warp = np.nonzero(warps)
        self.view[places[cta], warp, warp] += 1  # what they do from now on, the others do not know

    def use(self, barrier: Barrier, place: int, warp: int) -> None:
        """A warp must know that an mbarrier was initialised before it uses it."""
        maker, clock = barrier.maker
        self._report(
            "an mbarrier", "is used that another has initialised", self.view[place, warp, maker] < clock
        )

    def arrive(self, barrier: Barrier, place: int, warp: int) -> None:
        barrier.arriving = np.maximum(barrier.arriving, self.view[place, warp])
        self.view[place, warp, warp] += 1

    def engine_arrives(self, barrier: Barrier, place: int, warp: int, engine: int) -> None:
        """What the warp gave to the engine is done, and so is what the warp knew of then."""
        arriving = np.maximum(barrier.arriving, self.view[place, warp])
        arriving[engine] = max(arriving[engine], self.view[place, engine, engine])
        barrier.arriving = arriving
        self.view[place, warp, warp] += 1
        self.view[place, engine, engine] += 1

    def wait(self, barrier: Barrier, place: int, warp: int) -> None:
        self.view[place, warp] = np.maximum(self.view[place, warp], barrier.arrived)

    def wait_for_engine(self, places: Array, warps: Array, engine: int) -> None:
        """These warps have waited for all that the engine was given."""
        done = self.view[places, engine, engine]
        self.view[places, warps, engine] = np.maximum(self.view[places, warps, engine], done)
        self.view[places, engine, engine] += 1

    def commit_wgmma(self, place: int, warp: int) -> None:
        engine = self.warps + warp
        clocks = self._committed.setdefault((place, warp), [])
        clocks.append(int(self.view[place, engine, engine]))
        self.view[place, engine, engine] += 1

    def wait_wgmma(self, place: int, warp: int, pending: int) -> None:
        """The warp has waited for all but its last ``pending`` groups."""
        clocks = self._committed.get((place, warp), [])
        if len(clocks) > pending:
            engine, done = self.warps + warp, clocks[-1 - pending]
            self.view[place, warp, engine] = max(self.view[place, warp, engine], done)

    # ---- what they touch

    def words(self, start: Array, size: int) -> Array:
        """[accesses, words of each] of ``size`` bytes at these places in the batch's shared memory."""
        return (start[:, None] + np.arange(0, size, self._granularity)) // self._granularity

    def read(self, what: str, words: Array, place: Array, warp: Array, engine: int | None = None) -> None:
        """Words are read by warps, or by an engine on behalf of a warp."""
        place, warp = place[:, None], warp[:, None]
        unknown = self._written[words] > self.view[place, warp, self._writer[words]]
        self._report(what, "reads what another has written", unknown)
        who = warp if engine is None else np.full_like(warp, engine)
        self._read[words, who] = self.view[place, who, who]

    def write(
        self,
        what: str,
        words: Array,
        place: Array,
        warp: Array,
        engine: int | None = None,
        *,
        pending: bool = False,
        lost: Array | None = None,
    ) -> None:
        """Words are written by warps, or by an engine on behalf of a warp.

        Args:
            what: the instruction, for the report.
            words: from ``words``.
            place: of the CTA, one for each access.
            warp: likewise.
            engine: that does it, unless the warp does.
            pending: nobody may touch them until ``complete``.
            lost: accesses whose value is not what memory holds after the instruction.
        """
        place, warp = place[:, None], warp[:, None]
        view = self.view[place, warp]  # [accesses, 1, clocks]
        unknown = self._written[words] > np.take_along_axis(view[:, 0], self._writer[words], 1)
        self._report(what, "writes what another has written", unknown)
        since: Array = np.any(self._read[words] > view, axis=-1)
        self._report(what, "writes what another has read", since)
        who = np.broadcast_to(warp if engine is None else engine, words.shape)
        self._writer[words] = who
        self._written[words] = NEVER if pending else self.view[place, who, who]
        several = self._writer[words] != who
        if several.any():
            if lost is not None:
                self._report(
                    what, "writes what another warp writes at the same time", several & lost[:, None]
                )
            self._written[words[several]] = 0  # the same value: whoever came last, all agree

    def complete(self, words: Array, place: Array, warp: Array) -> None:
        """Copies that were pending are done, as their threads know."""
        who = np.broadcast_to(warp[:, None], words.shape)
        still = (self._written[words] == NEVER) & (self._writer[words] == who)
        clock = np.broadcast_to(self.view[place, warp, warp][:, None], words.shape)
        self._written[words[still]] = clock[still]

    def _report(self, what: str, how: str, wrong: Array | bool) -> None:
        if np.any(wrong):
            self.found[f"shared memory: {what} {how}, no barrier between"] += int(np.sum(wrong))

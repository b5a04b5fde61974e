"""cp.async: copies from global to shared memory, complete once their thread has waited for them.

With ``late``, the bytes arrive only then: a thread that does not wait reads the old bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .access import check_shared, lanes_of
from .decode import Decoder, Step, instruction
from .parse import Instruction
from .state import Group
from .values import Array, Mask, constant


class Copy(NamedTuple):
    """The pending copies of one instruction; one entry per thread.

    Attributes:
        thread: its number in the batch.
        commit: the group of copies that this one is in.
        start: its target in the batch's shared memory, in bytes.
        words: [threads, words], the data.
    """

    thread: Array
    commit: Array
    start: Array
    words: Array

    def take(self, chosen: Array) -> Copy:
        return Copy(*(part[chosen] for part in self))


@instruction("cp.async")
def _copy(ins: Instruction, code: Decoder) -> Step:
    target, origin = code.address(ins.operands[0]), code.address(ins.operands[1])
    size = int(ins.operands[2], 0)
    # Fewer than ``size`` bytes may be read, the rest are zeros; a 64-bit operand is a cache policy.
    texts = [text for text in ins.operands[3:] if code.function.bits(text, 32) == 32]
    read_size = code.source(texts[0]) if texts else lambda group: constant(size, 32)
    what = ins.opcode

    def step(group: Group, mask: Mask) -> None:
        lanes = group.active(mask)
        to = target(group)[lanes]
        check_shared(group, to, size)
        if mask is None:
            group.launch.counters.shared_access("cp.async", to.reshape(-1, 32), size)
        memory = group.launch.memory.mapped
        at = origin(group, -memory.base)[lanes]
        bytes_read = group.wide(read_size(group))[lanes].astype(np.int64)
        reads = bytes_read > 0
        memory.check(at[reads], bytes_read[reads], size)
        if group.launch.races is not None:
            group.launch.races.read(at[reads], size, group.cta_number[lanes][reads])
        group.launch.counters.bytes["cp.async"] += int(bytes_read[reads].sum())
        part = np.arange(0, size, 4)
        live = bytes_read[:, None] > part  # [threads, words]
        words = np.where(live, memory.view[32][np.where(live, (at[:, None] + part) // 4, 0)], np.uint32(0))
        thread, start = group.number[lanes], to + group.shared_base[lanes]
        copy = Copy(thread, group.batch.commits[thread], start, words)
        if not group.launch.late:
            _arrive(group, copy)
        if group.batch.races is not None:
            races = group.batch.races
            place, warp = lanes_of(group, mask)
            races.write(what, races.words(start, size), place, warp, pending=True)
        if group.launch.late or group.batch.races is not None:
            group.batch.copies.append(copy)

    return step


def _arrive(group: Group, copy: Copy) -> None:
    part = np.arange(copy.words.shape[1])
    group.batch.shared.view(np.uint32)[copy.start[:, None] // 4 + part] = copy.words


@instruction("cp.async.commit_group")
def _commit(ins: Instruction, code: Decoder) -> Step:
    def step(group: Group, mask: Mask) -> None:
        group.batch.commits[group.number[group.active(mask)]] += 1

    return step


@instruction("cp.async.wait_group", "cp.async.wait_all")
def _wait(ins: Instruction, code: Decoder) -> Step:
    pending = int(ins.operands[0], 0) if ins.operands else -1  # wait_all: also those not committed

    def step(group: Group, mask: Mask) -> None:
        wait(group, mask, pending)

    return step


def wait(group: Group, mask: Mask, pending: int) -> None:
    """Finish the copies of these threads, except their last ``pending`` groups."""
    batch = group.batch
    if not batch.copies:
        return
    waiting = np.zeros(len(batch.commits), bool)
    waiting[group.number[group.active(mask)]] = True
    left = []
    for copy in batch.copies:
        done = waiting[copy.thread] & (copy.commit < batch.commits[copy.thread] - pending)
        if done.any():
            finished = copy.take(done)
            if batch.launch.late:
                _arrive(group, finished)
            if batch.races is not None:
                place, thread = np.divmod(finished.thread, group.threads)
                words = batch.races.words(finished.start, 4 * finished.words.shape[1])
                batch.races.complete(words, place, thread // 32)
        if not done.all():
            left.append(copy.take(~done))
    batch.copies = left

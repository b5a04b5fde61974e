"""Processes on this machine that form a gloo group, started once and given one function after another."""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 60.0  # seconds that one function may take


class Failure(Exception):
    """What a process raised: its rank, and the text of its traceback."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank}:\n{text}")
        self.rank, self.text = rank, text


class Pool:
    """So many processes in one group; use :func:`pool` for one that other tests share."""

    def __init__(self, size: int, timeout: float = 20.0) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "attnbias", "cases.sharded"])
        self.folder = tempfile.TemporaryDirectory()
        store = os.path.join(self.folder.name, "store")
        self.pipes: list[Connection] = []
        self.processes: list[mp.process.BaseProcess] = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, store, timeout), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        atexit.register(self.close)

    def run(
        self, function: Callable[..., Any], *arguments: Any, each: bool = False, limit: float = LIMIT
    ) -> list[Any]:
        """Run a function of an importable module in all processes; raise the first failure.

        With ``each``, return failures among the results instead.
        """
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results: list[Any] = [None] * len(self.pipes)
        waiting = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        while waiting:
            ready = wait(list(waiting), limit)
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer in {limit} s")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[index]
                try:
                    is_good, answer = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    is_good, answer = False, "the process died"
                results[rank] = answer if is_good else Failure(rank, answer)
                if not (is_good or each):  # the others may wait for this one
                    self.close()
                    raise results[rank]
        return results

    def close(self) -> None:
        """End all processes."""
        _pools.pop(len(self.pipes), None)
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()
        atexit.unregister(self.close)


_pools: dict[int, Pool] = {}


def pool(size: int) -> Pool:
    """Return the shared pool of this size, a new one after a failure."""
    if size not in _pools:
        _pools[size] = Pool(size)
    return _pools[size]


def _serve(pipe: Connection, rank: int, size: int, store: str, timeout: float) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = True, function(rank, size, *arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)

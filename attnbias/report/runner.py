"""Run steps so that none can end the report: not by raising, not by killing the process, not by hanging."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..testing.checklist import words_of
from .store import Store

Say = Callable[[str], object]

DEAD_CONTEXT = 4  # exit code of a process whose CUDA context is gone, and of a report with such a step
MOST_PROCESSES = 25  # a device that dies in every step has told all it can
PATIENCE = 600.0  # seconds without a new step after which a process hangs


class Status(str, Enum):
    """How a step ended."""

    RIGHT = "right"
    WRONG = "wrong"
    RAISED = "raised"
    DEAD = "dead"  # the CUDA context, or the process, did not survive it
    NO_ROOM = "no room"  # out of memory
    SKIPPED = "skipped"


CODES = {Status.WRONG: 1, Status.RAISED: 3, Status.DEAD: DEAD_CONTEXT}


class Outcome(NamedTuple):
    """What a step found: how it ended, why in words, and numbers that JSON can hold."""

    status: Status = Status.RIGHT
    words: str = ""
    data: Any = None


class Step(NamedTuple):
    """One step: its name, which is its key in the file, and what it does."""

    name: str
    run: Callable[[], Outcome]


@dataclass
class Run:
    """All that a section may look at."""

    store: Store
    device: torch.device
    backend: str | None
    say: Say
    quick: bool = False
    tunes: bool = False
    kept: dict[str, Any] = field(default_factory=dict)  # what steps of one process share

    def found(self, section: str) -> dict[str, dict[str, Any]]:
        """Return the steps of a section that ended, by name."""
        return {name: x for name, x in self.store.steps.items() if name.startswith(f"{section}:")}


Section = Callable[[Run], Iterable[Step]]


def work(run: Run, sections: Sequence[Section]) -> int:
    """Run all steps that the file does not have yet; return 4 if the CUDA context died, else 0.

    A section is asked for its steps when it is reached, so that it can look at what was found before.
    """
    for section in sections:
        for step in section(run):
            if step.name in run.store.steps:
                continue
            run.store.begin(step.name)
            run.say(f"{step.name} ...")
            start = time.monotonic()
            outcome = _try(step, run.device)
            seconds = round(time.monotonic() - start, 3)
            kept = {"status": outcome.status.value, "words": outcome.words, "seconds": seconds}
            run.store.end(step.name, kept if outcome.data is None else kept | {"data": outcome.data})
            more = f": {outcome.words}" if outcome.words else ""
            run.say(f"    {outcome.status.value.upper()} in {seconds:.1f} s{more}")
            if outcome.status == Status.DEAD:
                return DEAD_CONTEXT
    run.store.data["is_whole"] = True
    run.store.save()
    return 0


def _try(step: Step, device: torch.device) -> Outcome:
    """Run a step; an exception becomes its outcome."""
    try:
        outcome = step.run()
        _wait(device)  # an error of a kernel shows up at the next wait
    except Exception as error:
        return _outcome_of(error, device)
    return outcome


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _outcome_of(error: Exception, device: torch.device) -> Outcome:
    if isinstance(error, NotImplementedError):
        return Outcome(Status.SKIPPED, words_of(error))
    if isinstance(error, torch.OutOfMemoryError):
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return Outcome(Status.NO_ROOM, "out of memory; run it alone on the GPU, or on one with more memory")
    try:
        _wait(device)
        if device.type == "cuda":  # a context that only looks alive fails here
            torch.zeros(1, device=device).add_(1).item()
    except Exception as second:
        return Outcome(Status.DEAD, f"{words_of(error)}; then the context is gone: {words_of(second)}")
    return Outcome(Status.RAISED, words_of(error))


def supervise(path: Path, start: Callable[[], int], say: Say) -> None:
    """Start processes until one has done all steps; each goes on where the one before it ended.

    Args:
        path: the file that they write.
        start: runs a process to its end and returns its exit code.
        say: takes a line.
    """
    for _ in range(MOST_PROCESSES):
        before = len(Store(path).steps) if path.exists() else 0
        code = start()
        store = Store(path)
        name = store.data["running"]
        if name is not None:  # the process ended inside it
            words = (
                "it hung, or was ended by the system" if code == -9 else f"the process ended with code {code}"
            )
            store.end(name, {"status": Status.DEAD.value, "words": words, "seconds": 0.0})
            say(f"    DEAD: {words}; going on in a new process")
        elif store.data["is_whole"]:
            return
        elif code == DEAD_CONTEXT:
            say("    going on in a new process")
        elif len(store.steps) == before:  # neither done nor ahead: it cannot even start
            raise RuntimeError(f"the process of the report ended with code {code} before its first step")
    say(f"ended after {MOST_PROCESSES} processes: this device dies too often")


def start_process(command: Sequence[str], path: Path, say: Say, patience: float = PATIENCE) -> int:
    """Run a command, say its lines, and end it if the file does not change for too long; return its code."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip("\n"))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    seen, since = -1.0, time.monotonic()
    try:
        while process.poll() is None:
            changed = path.stat().st_mtime if path.exists() else 0.0
            if changed != seen:
                seen, since = changed, time.monotonic()
            elif time.monotonic() - since > patience:
                process.kill()
            time.sleep(0.05)
    finally:
        if process.poll() is None:  # as after Ctrl-C
            process.kill()
        process.wait()
        reader.join(timeout=5)
    return process.returncode


def exit_code(store: Store) -> int:
    """Return 0 if all is right, else the largest code of a step: 1 wrong, 3 raised, 4 dead context."""
    return max((CODES.get(Status(x["status"]), 0) for x in store.steps.values()), default=0)

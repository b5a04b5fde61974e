"""The first calls: each step is said before it runs, so that the first hang or crash has a name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..relations import Causal
from ..testing.built import built
from ..testing.shipped import Problem, Verdict
from .runner import Outcome, Run, Say, Status, Step

SIZES = (64, 128)
LENGTHS = (256, 1000)  # one that tiles divide comes first


def steps(run: Run) -> Iterator[Step]:
    """Yield causal attention in bfloat16, forward and backward, for each head size and length."""
    for size in SIZES:
        for length in LENGTHS:
            problem = Problem(Causal(), torch.bfloat16, size, length=length)
            yield Step(name_of(size, length), partial(check, run, problem))


def name_of(size: int, length: int) -> str:
    """Name a smoke step."""
    return f"smoke: causal bfloat16 D {size}, {length} tokens"


def check(run: Run, problem: Problem) -> Outcome:
    """Run a problem and say what happens inside it."""
    compiled: dict[str, float] = {}
    with saying(run.say, compiled):
        run.say("    layout, then forward, backward and float64")
        verdict = problem.check(run.backend, run.device)
    kernels = [each._asdict() for each in built() if each.d == problem.size]
    for each in built():
        if each.d == problem.size:
            run.say(f"    {each}")
    return outcome_of(verdict, {"kernels": kernels, "compile_seconds": compiled})


def outcome_of(verdict: Verdict, data: Any = None) -> Outcome:
    """Turn a verdict into an outcome."""
    if verdict.skipped:
        return Outcome(Status.SKIPPED, verdict.skipped)
    kept = {"kernels": verdict.kernels} if data is None else data
    if verdict.faults:
        return Outcome(Status.WRONG, " || ".join(verdict.faults.values()), kept)
    return Outcome(Status.RIGHT, verdict.kernels, kept)


@contextmanager
def saying(say: Say, seconds: dict[str, float]) -> Iterator[None]:
    """Say which kernel Triton is about to compile, and keep the seconds that it takes."""
    try:
        import triton

        hooks = triton.knobs.runtime
        before: tuple[Any, Any] = hooks.jit_cache_hook, hooks.jit_post_compile_hook
    except (ImportError, AttributeError):
        yield
        return
    started: dict[str, float] = {}

    def start(**given: Any) -> bool:
        name = _name_of(given)
        started[name] = time.monotonic()
        say(f"    compiling {name}")
        return False  # do compile

    def stop(**given: Any) -> bool:
        name = _name_of(given)
        seconds[name] = round(time.monotonic() - started.get(name, time.monotonic()), 3)
        say(f"    compiled {name} in {seconds[name]:.1f} s; loading and launching it")
        return False

    hooks.jit_cache_hook, hooks.jit_post_compile_hook = start, stop
    try:
        yield
    finally:
        hooks.jit_cache_hook, hooks.jit_post_compile_hook = before


def _name_of(given: dict[str, Any]) -> str:
    name: Callable[..., Any] | str = getattr(given.get("fn"), "name", "a kernel")
    return str(name)

"""Print the host time of attention calls: ``PYTHONPATH=tools python -m fakecuda [--cc 80 90]``.

``--beside PYTHON`` measures the checkout that another environment has installed as well, round by round in
turn, so that both meet the same load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .driver import DEVICES, fake_gpu


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fakecuda", description=__doc__)
    parser.add_argument("--cc", type=int, nargs="+", default=[80, 90], choices=sorted(DEVICES))
    parser.add_argument("--beside", metavar="PYTHON", help="of an environment with another checkout")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return work(given.cc[0], given.only)
    pythons = [sys.executable] + [given.beside] * bool(given.beside)
    names = ["host us"] + ["beside"] * bool(given.beside)
    print(f"{'CPU time of a call, median':34}" + "".join(f"{x:>26}" for x in names))
    for cc in given.cc:
        workers = [Worker(python, cc, given.only) for python in pythons]
        for name, which in workers[0].cases:
            for _ in range(given.rounds):
                for worker in workers:
                    worker.ask("time", name, which)
            costs = [worker.ask("cost", name, which) for worker in workers]
            shown = (f"{x[0]:10.0f} us {x[1]:2} launches" for x in costs)
            print(f"sm_{cc} {name}, {which}".ljust(34) + "".join(f"{x:>26}" for x in shown), flush=True)
        for worker in workers:
            worker.stop()
    return 0


class Worker:
    """A process that times what it is asked to, and prints the answer."""

    def __init__(self, python: str, cc: int, only: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        command = [python, "-m", "fakecuda", "--worker", "--cc", str(cc), "--only", only]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.cases: list[tuple[str, str]] = self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"fakecuda: the worker ended, code {self.process.wait()}")
        return json.loads(line)

    def ask(self, *words: str) -> Any:
        assert self.process.stdin is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)
        return self.read()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work(cc: int, only: str) -> int:
    """Answer the questions on stdin, a line each."""
    from .measure import Timer, cases

    with fake_gpu(cc) as gpu:
        timers = {
            (case.name, which): Timer(gpu, run)
            for case in cases()
            if only in case.name
            for which, run in (("forward", case.forward), ("both", case.both))
        }
        print(json.dumps(list(timers)), flush=True)
        for line in sys.stdin:
            what, name, which = json.loads(line)
            timer = timers[name, which]
            print(json.dumps(timer.time() if what == "time" else timer.cost()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The record of a run, kept as JSON and read by tables, plots, the page and --compare."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, TypedDict

import torch

import attnbias as ab
from attnbias.op import dispatch
from attnbias.op.problem import Problem

from ..cases.tokens import Case
from .machine import describe
from .race import DEFAULT, MATMUL, OURS, Result
from .timing import Spread

VERSION = 1
PICTURE_TOKENS = 8192  # along the longer side, of layouts whose tiles are drawn

Numbers = list[float]  # median, 20 %, 80 %


class Entry(TypedDict):
    """One case and pass; ratios are peer / attnbias, and of torch.mm our share of its rate.

    ``seconds`` and ``ratios`` are of the device; ``eager``, only on GPUs, has the seconds of a program that
    calls and calls. A file of an earlier version lacks the fields after ``fault``.
    """

    case: str
    relation: str
    backward: bool
    sizes: dict[str, Any]
    pairs: int
    density: float
    backend: str
    layout: dict[str, Any]
    seconds: dict[str, Numbers]
    ratios: dict[str, Numbers]
    gflops: float
    bytes: dict[str, int]
    refused: dict[str, str]
    fault: str
    default: str  # the backend of a call with the relation that names none; ``backend`` is that of the layout
    eager: dict[str, Numbers]
    notes: dict[str, str]  # what is odd about a time
    clocks: list[dict[str, Any] | None]  # before and after


class SweepPoint(TypedDict):
    """One density: seconds of the automatic choice, of tiles, of edges and of dense attention."""

    structure: str
    backward: bool
    tokens: int
    density: float
    chosen: str  # what "auto" became: tiles, edges or both
    seconds: dict[str, Numbers]
    ratios: dict[str, Numbers]  # the others' time over that of "auto"


class LengthPoint(TypedDict):
    """One length: seconds forward, by relation and by whom."""

    what: str
    tokens: int
    seconds: Numbers


class Results(TypedDict):
    """A whole run."""

    version: int
    machine: dict[str, Any]
    entries: list[Entry]
    sweep: list[SweepPoint]
    lengths: list[LengthPoint]
    pictures: dict[str, str]
    raised: dict[str, str]  # the exception of each case or point that ended in one
    is_whole: bool
    layouts_anew: dict[str, Any]  # milliseconds of a layout made in every step; empty on CPUs


def describe_machine(device: torch.device, threads: int, clock: str) -> dict[str, Any]:
    """Describe the machine and how it measures."""
    machine = describe(device) | {"threads": threads, "clock": clock}
    if device.type == "cpu":
        from attnbias.backends import cpu

        machine["level"] = "none" if cpu.missing() else cpu.isa()
        machine["torch level"] = torch.backends.cpu.get_cpu_capability()
    return machine


def start(machine: dict[str, Any]) -> Results:
    """Return an empty record."""
    return {
        "version": VERSION,
        "machine": machine,
        "entries": [],
        "sweep": [],
        "lengths": [],
        "pictures": {},
        "raised": {},
        "is_whole": False,
        "layouts_anew": {},
    }


def numbers(spread: Spread) -> Numbers:
    """Return a spread as it is stored, with four digits."""
    return [float(f"{value:.4g}") for value in spread]


def entry_of(name: str, case: Case, *, backward: bool, build: Spread) -> Entry:
    """Return the entry of a case before it is timed."""
    query, key, value, _ = case.inputs()
    timed = Problem(query, key, value, case.given, q_start=case.layout.q_start)
    plain = Problem(query, key, value, case.relation, q_start="end")
    stats = case.layout.stats()
    return {
        "case": name,
        "relation": case.name,
        "backward": backward,
        "sizes": {
            "batch": case.batch,
            "heads": case.heads,
            "key_heads": case.key_heads or case.heads,
            "queries": case.q_len,
            "keys": case.tokens,
            "size": case.size,
            "dtype": str(case.dtype).removeprefix("torch."),
        },
        "pairs": case.pairs,
        "density": case.density,
        "backend": case.backend or dispatch.choose(timed, None),
        "layout": {**dict(stats), "seconds": numbers(build)},
        "seconds": {},
        "ratios": {},
        "gflops": 0.0,
        "bytes": {},
        "refused": {},
        "fault": "",
        "default": dispatch.choose(plain, None),
        "eager": {},
        "notes": {},
        "clocks": [],
    }


def fill(entry: Entry, result: Result) -> None:
    """Add the times to an entry."""
    entry["seconds"] = {name: numbers(spread) for name, spread in result.times.items()}
    entry["ratios"] = {name: numbers(spread) for name, spread in result.ratios.items()}
    entry["gflops"] = float(f"{result.rate / 1e9:.4g}")
    entry["bytes"] = dict(result.bytes)
    entry["refused"] = result.refused
    entry["eager"] = {name: numbers(spread) for name, spread in result.eager.items()}
    entry["notes"] = dict(result.notes)


def picture_of(case: Case) -> str:
    """Return the tiles of a layout as text, or "" if there are too many."""
    if max(case.q_len, case.tokens) > PICTURE_TOKENS or case.q_len < 64:
        return ""
    return ab.Layout.build(case.relation, case.q_len, case.tokens, q_start="end", tile=64).picture()


def path_of(results: Results, folder: Path) -> Path:
    """Return the file of a run, named after the device's model."""
    model = re.sub(r"[^a-z0-9]+", "-", str(results["machine"]["device"]).lower()).strip("-")
    return folder / f"{model or 'device'}.json"


def save(results: Results, path: Path) -> None:
    """Write a run; whoever ends the process meanwhile leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(written, path)


def load(path: Path) -> Results:
    """Read a run.

    Raises:
        ValueError: if the file is not a run.
    """
    try:
        found: Results = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--compare: cannot read {path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"--compare: {path} is not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ValueError(f"--compare: {path} is not a result of this version of `attnbias bench`")
    found.setdefault("layouts_anew", {})
    for entry in found["entries"]:
        earlier: dict[str, Any] = {"default": "", "eager": {}, "notes": {}, "clocks": []}
        entry.update(earlier | entry)  # type: ignore[typeddict-item]
    return found


def dense_ratio(entry: Entry) -> tuple[str, Numbers] | None:
    """Return the quickest of SDPA's calls with the same result, and its time over ours."""
    legal = {
        name: ratio
        for name, ratio in entry["ratios"].items()
        if name.startswith("SDPA") and name != "SDPA, all pairs"
    }
    return min(legal.items(), key=lambda item: item[1][0]) if legal else None


def quickest(entry: Entry) -> tuple[str, Numbers] | None:
    """Return the quickest peer with the same result, and its time over ours."""
    same = {name: ratio for name, ratio in others(entry).items() if name != "SDPA, all pairs"}
    return min(same.items(), key=lambda item: item[1][0]) if same else None


def is_timed(entry: Entry) -> bool:
    """Return whether there are times; wrong results and exceptions have none."""
    return OURS in entry["seconds"]


def why_untimed(entry: Entry) -> str:
    """Return why an entry has no times."""
    return "wrong result: no time" if entry["fault"] else "raised an error: no time"


def exit_code(results: Results) -> int:
    """Return 1 if a result is wrong or something raised."""
    return int(bool(results["raised"]) or any(entry["fault"] for entry in results["entries"]))


def others(entry: Entry) -> dict[str, Numbers]:
    """Return the ratios to peers, without the yardstick and our own default call."""
    return {name: ratio for name, ratio in entry["ratios"].items() if name not in (MATMUL, DEFAULT)}


def eager_ratio(entry: Entry, name: str) -> float | None:
    """Return a peer's eager time over ours; None where no device works apart from Python."""
    eager = entry["eager"]
    return eager[name][0] / eager[OURS][0] if name in eager and OURS in eager else None

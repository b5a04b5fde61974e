"""Tables of a run: attention and its peers, the sweep over density, two runs compared."""

from __future__ import annotations

from ..measure import terminal
from ..measure.race import DEFAULT, FAILED, MATMUL, OURS
from ..measure.record import (
    Entry,
    Results,
    SweepPoint,
    dense_ratio,
    eager_ratio,
    is_timed,
    others,
    why_untimed,
)
from ..measure.sweep import AUTO, EDGES, MASKED, TILES, TOLERATED, crossover, regret
from ..measure.timing import Spread
from ..peers.registry import DENSE


def print_run(results: Results) -> None:
    """Print everything that a run found."""
    _attention(results["entries"])
    _eager(results["entries"])
    for line in (*notes(results["entries"]), *_anew(results)):
        print(line)
    _reasons(results["entries"])
    for what, error in results["raised"].items():
        print(f"{what}: raised {error}")
    if results["sweep"]:
        _density(results["sweep"])
    for line in verdicts(results):
        print(line)


def _attention(entries: list[Entry]) -> None:
    rows = []
    for entry in entries:
        what = "both" if entry["backward"] else "forward"
        if not is_timed(entry):
            rows.append([entry["case"], what, why_untimed(entry), *[""] * 6])
            continue
        peers = [f"{name} {terminal.ratio(Spread(*ratio))}" for name, ratio in others(entry).items()]
        layout = entry["layout"]
        rows.append(
            [
                entry["case"],
                what,
                terminal.times(Spread(*entry["seconds"][OURS])),
                terminal.number(entry["gflops"]),
                f"{entry['ratios'][MATMUL][0]:.0%}",
                "\n".join(peers),
                terminal.time(layout["seconds"][0]),
                terminal.size(layout["bytes"]),
                terminal.size(entry["bytes"].get(OURS, 0)),
            ]
        )
    header = ["case", "pass", "time", "GFLOP/s", "of matmul", "peer / attnbias", "layout"]
    terminal.table("Attention: only useful work is counted", [*header, "its bytes", "memory"], rows)


def _eager(entries: list[Entry]) -> None:
    """Print the times of a program that calls and calls, where they are not the device's."""
    rows = []
    for entry in entries:
        if OURS not in entry["eager"]:
            continue
        eager, device = entry["eager"], entry["seconds"]
        peers = [f"{name} {eager_ratio(entry, name):.3g}x" for name in others(entry) if name in eager]
        call = f"{terminal.time(eager[DEFAULT][0])}, " if DEFAULT in eager else ""
        rows.append(
            [
                entry["case"],
                "both" if entry["backward"] else "forward",
                terminal.time(device[OURS][0]),
                terminal.times(Spread(*eager[OURS])),
                f"{eager[OURS][0] / device[OURS][0]:.2f}x",
                "\n".join(peers),
                entry["backend"],
                f"{call}{entry['default']}",
            ]
        )
    if rows:
        header = ["case", "pass", "on the device", "eager", "over it", "peer / attnbias, eager", "backend"]
        title = "Eager: the wall time of a call among many, Python's part included"
        terminal.table(title, [*header, "default call"], rows)


def notes(entries: list[Entry]) -> list[str]:
    """Return what is odd about times, and GPUs that slowed down in a case."""
    lines = []
    for entry in entries:
        case = f"{entry['case']}, {'forward and backward' if entry['backward'] else 'forward'}"
        lines += [f"{name}, {case}: {note}" for name, note in entry["notes"].items()]
        slowed = {why for each in entry["clocks"] if each for why in each.get("slowed_by") or ()} - {"idle"}
        if slowed:
            lines.append(f"{case}: the GPU was slowed by {', '.join(sorted(slowed))}")
    return lines


def _anew(results: Results) -> list[str]:
    found = results["layouts_anew"]
    if not found:
        return []
    words = ", ".join(f"{name} {ms:.3g} ms" for name, ms in found["milliseconds"].items())
    return [f"A layout made anew in every step, {found['tokens']:,} tokens: {words}."]


def _reasons(entries: list[Entry]) -> None:
    """Print once why each peer was left out of which cases."""
    said: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        for peer, why in entry["refused"].items():
            cases = said.setdefault((peer, why), [])
            if entry["case"] not in cases:
                cases.append(entry["case"])
        if entry["fault"]:
            print(f"{entry['case']}: {entry['fault']}")
    known = {entry["case"] for entry in entries}
    everywhere: dict[str, list[str]] = {}
    for (peer, why), cases in said.items():
        if set(cases) == known:
            everywhere.setdefault(why, []).append(peer)
    for why, peers in everywhere.items():
        print(f"{', '.join(peers)}: {why}")
    for (peer, why), cases in said.items():
        if set(cases) != known and not _is_plain(why):
            print(f"{peer}, {', '.join(cases)}: {why}")


def _is_plain(why: str) -> bool:
    """Return whether a peer just does not know the relation, which its empty cell shows."""
    plain = ("only", "needs", "there are none", "itself")
    return not why.startswith(FAILED) and any(words in why for words in plain)


def _density(points: list[SweepPoint]) -> None:
    rows = [
        [
            f"{point['structure']}, {point['density']:.2%}",
            "both" if point["backward"] else "forward",
            point["chosen"],
            terminal.times(Spread(*point["seconds"][AUTO])),
            *(f"{point['ratios'][name][0]:.3g}x" for name in (TILES, EDGES, MASKED, DENSE)),
        ]
        for point in points
    ]
    terminal.table(
        f"Density, {points[0]['tokens']:,} tokens: others' time over that of the automatic choice",
        ["pairs", "pass", "chosen", "time", TILES, EDGES, MASKED, DENSE],
        rows,
    )


def by_curve(points: list[SweepPoint]) -> dict[str, list[SweepPoint]]:
    """Group the points by structure and pass."""
    curves: dict[str, list[SweepPoint]] = {}
    for point in points:
        name = point["structure"] + (", forward and backward" if point["backward"] else "")
        curves.setdefault(name, []).append(point)
    return curves


def verdicts(results: Results) -> list[str]:
    """Judge the two promises: never slower than dense attention, a choice close to the best form."""
    lines = []
    ratios = [
        (f"{entry['case']}{', forward and backward' if entry['backward'] else ''}", *found)
        for entry in results["entries"]
        if is_timed(entry) and (found := dense_ratio(entry))
    ]
    if ratios:
        slower = [f"{name} ({ratio[0]:.2f} of {peer})" for name, peer, ratio in ratios if ratio[0] < 1]
        said = f"slower in {', '.join(slower)}" if slower else "never slower"
        lines.append(f"Against SDPA's quickest call with the same result, {len(ratios)} cases: {said}.")
    for name, points in by_curve(results["sweep"]).items():
        worst = max(points, key=regret)
        at = f"{worst['density']:.1%}"
        words = f"takes {regret(worst):.2f} of the time of the better of tiles and edges at {at}"
        if regret(worst) <= TOLERATED:
            words = f"is within {TOLERATED - 1:.0%} of the better of tiles and edges at every density"
        dense, masked = crossover(points), crossover(points, MASKED)
        from_on = f"from {dense:.0%} on" if dense else "at no density"
        masked_on = f"from {masked:.0%} on" if masked else "at no density"
        lines.append(
            f"{name}: the automatic choice {words}; SDPA is quicker {masked_on} with a mask, {from_on} "
            "when it computes all pairs instead."
        )
    return lines


def print_comparison(now: Results, then: Results) -> None:
    """Print the times of both runs, case by case."""
    earlier = {(entry["case"], entry["backward"]): entry for entry in then["entries"] if is_timed(entry)}
    rows = []
    for entry in now["entries"]:
        before = earlier.get((entry["case"], entry["backward"]))
        if before is None or not is_timed(entry):
            continue
        old, new = before["seconds"][OURS], entry["seconds"][OURS]
        of_matmul = [each["ratios"][MATMUL][0] for each in (before, entry)]
        rows.append(
            [
                entry["case"],
                "both" if entry["backward"] else "forward",
                terminal.times(Spread(*old)),
                terminal.times(Spread(*new)),
                f"{old[0] / new[0]:.2f}x",
                f"{of_matmul[1] / of_matmul[0]:.2f}x",
            ]
        )
    here, there = (run["machine"] for run in (now, then))
    title = f"Now against {there['device']}, torch {there['torch']}, attnbias {there['attnbias']}"
    if (here["device"], here["threads"]) != (there["device"], there["threads"]):
        title += f" (another machine or number of threads: now {here['device']}, {here['threads']})"
    terminal.table(title, ["case", "pass", "then", "now", "faster", "of matmul"], rows)

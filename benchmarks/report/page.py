"""One HTML page of a run: plots, pictures of tiles, tables. It opens from disk, without a network."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..measure import terminal
from ..measure.race import DEFAULT, MATMUL, OURS
from ..measure.record import Entry, Results, eager_ratio, is_timed, others, quickest, why_untimed
from ..measure.timing import Spread
from ..peers.registry import PACKAGES
from ..static.figures import LOOPS, PASSES, Key, load
from .tables import notes, verdicts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"+": "partial", "#": "full", "e": "edges", "*": "both"}  # classes of page.css
STATIC_TORCH, STATIC_TRITON = "2.13.0", "3.7.1"
STATIC_SM = (80, 90, 100, 120)
CSS, SCRIPT = (Path(__file__).with_name(f"page.{suffix}") for suffix in ("css", "js"))


def write(results: Results, figures: Mapping[str, Figure], path: Path) -> Path:
    """Write the page; without figures the plots are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(results, _drawn(figures)))
    return path


def _drawn(figures: Mapping[str, Figure]) -> dict[str, str]:
    if not figures:
        return {}
    from .plots import as_svg

    return {name: as_svg(figure) for name, figure in figures.items()}


def render(results: Results, plots: Mapping[str, str]) -> str:
    """Return the page as text."""
    machine = results["machine"]
    device = escape(str(machine["device"]))
    parts = [
        f"<div class='cards'>{''.join(_card(*card) for card in cards(results))}</div>",
        _plot(plots, "speed", "Compared with the quickest peer", _SPEED),
        _plot(plots, "length", "Time against length", _LENGTH),
        _plot(plots, "density", "Speed-up against density", _DENSITY),
        _list(verdicts(results)),
        _gallery(results),
        _table(results["entries"]),
        _list(notes(results["entries"])),
        _list([f"{what}: raised {error}" for what, error in results["raised"].items()]),
        _versions(results),
        _static(),
        _how(machine, results),
    ]
    broken = "" if results["is_whole"] else " This run was interrupted: it is incomplete."
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>attnbias on {device}</title><style>{CSS.read_text()}</style></head><body>"
        f"<header><div><h1>attnbias on {device}</h1>"
        "<p>Attention that computes only the relations you assume, timed against the calls it replaces.</p>"
        f"<p>{_machine_line(machine)}{broken}</p></div></header><main>{''.join(parts)}"
        f"<footer>attnbias {escape(str(machine['attnbias']))}. Made by <code>attnbias bench</code>; every "
        "case was compared with float64 before it was timed. "
        f"<a id='data' download='results.json' href='{_data_link(results)}'>All numbers as JSON</a>."
        "<p><button id='copy' type='button' hidden>Copy the JSON</button> "
        "<span id='copied' role='status'></span></p>"
        f"</footer></main><script>{SCRIPT.read_text()}</script></body></html>\n"
    )


_SPEED = (
    "Time of the quickest peer that gives the same result over ours: SDPA with <code>is_causal</code>, with "
    "a mask or on blocks cut out by hand, FlexAttention, a gather. Bars are medians, whiskers 20 % to 80 %; "
    "right of the line at 1x attnbias is faster."
)
_LENGTH = "Forward. A window grows with the tokens, all pairs with their square."
_DENSITY = (
    "The same tokens with more and more related pairs. Marks show which form the layout builder chose; the "
    "thin curves are one form forced. A dotted line shows from where on SDPA on all pairs, its mask dropped, "
    "is quicker."
)


def _machine_line(machine: Mapping[str, Any]) -> str:
    words = [f"{machine['architecture']}, {machine['cores']} cores"]
    if "level" in machine:
        words.append(f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}, {machine['level']}")
    if "capability" in machine:
        words.append(f"{machine['capability']}, CUDA {machine['cuda']}")
    words.append(f"torch {machine['torch']}")
    words.append(f"{machine['clock']}, median (20 % to 80 %)")
    return escape("; ".join(words))


def cards(results: Results) -> list[tuple[str, str]]:
    """Return the figures at the top of the page, each as a number and its meaning."""
    timed = [entry for entry in results["entries"] if is_timed(entry)]
    dense = [(entry, found[0], found[1][0]) for entry in timed if (found := quickest(entry))]
    shown = []
    if dense:
        for words, choose in (("fastest", max), ("slowest", min)):
            entry, peer, ratio = choose(dense, key=lambda item: item[2])
            meaning = f"{words} of {len(dense)}: {entry['case']}, {_pass(entry)}, vs {peer}"
            shown.append((f"{ratio:.3g}x", meaning))
        middle = median(ratio for _, _, ratio in dense)
        shown.append((f"{middle:.3g}x", f"median of {len(dense)}, each vs its quickest peer"))
    if timed:
        entry = max(timed, key=lambda entry: entry["ratios"].get(MATMUL, [0.0])[0])
        share = entry["ratios"].get(MATMUL, [0.0])[0]
        shown.append(
            (f"{share:.0%}", f"of torch.mm's rate on {entry['case']}, {_pass(entry)}: useful work only")
        )
    return shown


def _card(number: str, words: str) -> str:
    return f"<div class='card'><b>{escape(number)}</b><span>{escape(words)}</span></div>"


def _pass(entry: Entry) -> str:
    return "forward and backward" if entry["backward"] else "forward"


def _plot(plots: Mapping[str, str], name: str, title: str, lead: str) -> str:
    if name not in plots:
        return ""
    return f"<h2>{title}</h2><p class='lead'>{lead}</p>{_panel(title, plots[name])}"


def _panel(label: str, inner: str) -> str:
    """Return a box that scrolls by finger and by keyboard."""
    return f"<div class='panel' role='region' aria-label='{label}' tabindex='0'>{inner}</div>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def tiles_svg(picture: str) -> str:
    """Draw a layout's picture, '.+#e*', as squares: one path per kind of tile."""
    rows = picture.splitlines()
    strokes: dict[str, list[str]] = {}
    for y, row in enumerate(rows):
        x = 0
        for kind, run in groupby(row):
            width = len(list(run))
            if kind in KINDS:
                strokes.setdefault(kind, []).append(f"M{x} {y}h{width}v1h-{width}z")
            x += width
    paths = "".join(f"<path class='{KINDS[kind]}' d='{''.join(moves)}'/>" for kind, moves in strokes.items())
    size = f"viewBox='0 0 {max(map(len, rows), default=1)} {max(len(rows), 1)}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} preserveAspectRatio='none'>{paths}</svg>"


def _gallery(results: Results) -> str:
    figures = []
    for name, picture in results["pictures"].items():
        entry = next(entry for entry in results["entries"] if entry["relation"] == name)
        said = f"{entry['sizes']['keys']:,} keys, {entry['density']:.1%} of all pairs"
        if is_timed(entry):
            said += f"; {terminal.time(entry['seconds'][OURS][0])} forward"
        stats = entry["layout"]
        held = f"{stats['edges']:,} edges" if stats["edges"] else ""
        if stats["tiles_full"] + stats["tiles_partial"]:
            tiles = (
                f"{stats['tiles_full']} full and {stats['tiles_partial']} partial tiles of {stats['tile']}"
            )
            held = f"{tiles}, {held}" if held else tiles
        figures.append(
            f"<figure>{tiles_svg(picture)}<b>{escape(name)}</b>"
            f"<figcaption>{escape(said)}. {escape(held)}.</figcaption></figure>"
        )
    if not figures:
        return ""
    key = "".join(f"<i class='{name}'></i>{name}" for name in KINDS.values())
    return (
        "<h2>The relations</h2><p class='lead'>What is computed, in tiles of 64: queries down, keys across. "
        "Full tiles need no mask, partial ones hold bits, edges are listed pair by pair.<br>"
        f"<span class='key'>{key}</span></p>"
        f"<div class='gallery'>{''.join(figures)}</div>"
    )


def _table(entries: Sequence[Entry]) -> str:
    rows = []
    for entry in entries:
        what = f"<td><b>{escape(entry['case'])}</b><br><small>{_pass(entry)}</small></td>"
        if not is_timed(entry):
            rows.append(f"<tr>{what}<td class='wrong' colspan='7'>{why_untimed(entry)}</td></tr>")
            continue
        share = entry["ratios"].get(MATMUL, [0.0])[0]
        peers = "<br>".join(
            f"{escape(name)} <b>{terminal.number(ratio[0])}x</b> "
            f"<small>({terminal.number(ratio[1])} to {terminal.number(ratio[2])}{_eager_words(entry, name)})"
            "</small>"
            for name, ratio in others(entry).items()
        )
        seconds = Spread(*entry["seconds"][OURS])
        rows.append(
            f"<tr>{what}<td>{terminal.time(seconds.median)}<br><small>"
            f"{terminal.time(seconds.low)} to {terminal.time(seconds.high)}{_eager_time(entry)}</small></td>"
            f"<td>{terminal.number(entry['gflops'])}</td>"
            f"<td class='bar' style='--filled:{min(share, 1):.0%}'>{share:.0%}</td>"
            f"<td>{peers}{_refused(entry)}</td>"
            f"<td>{terminal.time(entry['layout']['seconds'][0])}"
            f"<br><small>{terminal.size(entry['layout']['bytes'])}</small></td>"
            f"<td>{terminal.size(entry['bytes'].get(OURS, 0))}</td>"
            f"<td>{escape(entry['backend'])}{_default(entry)}</td></tr>"
        )
    header = (
        "case",
        "time",
        "GFLOP/s",
        "of torch.mm",
        "peer / attnbias",
        "layout",
        "memory",
        "backend",
    )
    head = "".join(f"<th>{name}</th>" for name in header)
    return (
        "<h2>Every case</h2><p class='lead'>Only useful work is counted: two products of related pairs "
        "forward, five more backward. The column of peers has their time over ours, with 20 % to 80 %.</p>"
        + _panel("Every case", f"<table><tr>{head}</tr>{''.join(rows)}</table>")
    )


def _refused(entry: Entry) -> str:
    """Return why peers are missing, folded."""
    refused = entry["refused"]
    why = "".join(f"<p>{escape(name)} {escape(reason)}</p>" for name, reason in refused.items())
    return f"<details><summary>{len(refused)} not compared</summary>{why}</details>" if refused else ""


def _eager_time(entry: Entry) -> str:
    """Return our eager time, where it is not the device's."""
    return f"<br>eager {terminal.time(entry['eager'][OURS][0])}" if OURS in entry["eager"] else ""


def _eager_words(entry: Entry, name: str) -> str:
    ratio = eager_ratio(entry, name)
    return "" if ratio is None else f"; eager {terminal.number(ratio)}x"


def _default(entry: Entry) -> str:
    """Return the backend of a call with the relation, and its time if it was taken."""
    if DEFAULT not in entry["seconds"]:
        return ""
    seconds = terminal.time(entry["seconds"][DEFAULT][0])
    return f"<br><small>by default {escape(entry['default'])}, {seconds}</small>"


def _versions(results: Results) -> str:
    """Return a table of packages: versions, and the peers that are theirs."""
    machine = results["machine"]
    packages = {name: machine[name] for name in ("attnbias", "torch")} | machine.get("packages", {})
    peers: dict[str, list[str]] = {}
    for peer in dict.fromkeys(name for entry in results["entries"] for name in others(entry)):
        peers.setdefault(PACKAGES.get(peer, "torch"), []).append(peer)
    for name in ("cuda", "cudnn", "ptxas", "python"):
        packages |= {name: machine[name]} if machine.get(name) else {}
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(version))}</td>"
        f"<td>{escape('; '.join(peers.get(name, [])))}</td></tr>"
        for name, version in packages.items()
    )
    head = "<tr><th>package</th><th>version</th><th>peers in this run</th></tr>"
    return "<h2>Versions</h2>" + _panel("Versions", f"<table class='words'>{head}{rows}</table>")


def static_rows() -> list[list[str]]:
    """Return instructions per multiply-add over FlexAttention's, one row per pass and loop."""
    ours = load(f"attnbias, triton {STATIC_TRITON}")
    peer = load(f"FlexAttention, torch {STATIC_TORCH}, triton {STATIC_TRITON}")
    rows = []
    for which, name in PASSES.items():
        for loop in LOOPS:
            row = [f"{name}, {loop} tiles"]
            for sm in STATIC_SM:
                for d in (64, 128):
                    key = Key(sm, d, 128, which, loop)
                    there = key in ours and key in peer
                    row.append(f"{ours[key].instructions / peer[key].instructions:.2f}" if there else "")
            rows.append(row)
    return rows


def _static() -> str:
    head = "".join(f"<th>sm_{sm}<br>D {d}</th>" for sm in STATIC_SM for d in (64, 128))
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in static_rows())
    return (
        "<h2>GPU code, counted <span class='tag'>static</span></h2><p class='lead'>Instructions per "
        "multiply-add of the Triton kernels over FlexAttention's for the same work (bfloat16, Triton "
        f"{STATIC_TRITON}, torch {STATIC_TORCH}), counted in the machine code; below 1 is fewer. Nothing in "
        "this table was timed: it is not a speed-up.</p>"
        + _panel("GPU code", f"<table><tr><th>loop</th>{head}</tr>{rows}</table>")
    )


def _how(machine: Mapping[str, Any], results: Results) -> str:
    clock = escape(str(machine["clock"]))
    return (
        "<h2>How it was measured</h2><ul>"
        f"<li>{clock}; every call makes its results in fresh memory. Both sides run in turn, round by round, "
        "and a ratio is that of one round: a slow spell of the machine affects all equally.</li>"
        "<li>Peers must give the same results; one that does not is not timed.</li>"
        "<li>Layouts are built once and shared by all layers: time and bytes have columns of their own.</li>"
        "<li>Memory is the most that one call holds beyond its arguments, with results and gradients.</li>"
        f"{_apart(machine)}"
        f"<li>{len(results['entries'])} results. On other devices: <code>make bench</code>, or "
        "<code>python -m attnbias bench --device cuda</code>. The file "
        "<code>results/&lt;device&gt;.json</code> holds no host or user name; attach it to an issue, so that "
        "others can compare.</li></ul>"
    )


def _apart(machine: Mapping[str, Any]) -> str:
    if machine["kind"] != "cuda":
        return ""
    modes = machine.get("modes") or {}
    caps = ", ".join(f"{name} {value}" for name, value in modes.items() if value is not None)
    return (
        "<li>Times are the device's: a call is replayed from a CUDA graph, with an empty L2 cache. "
        "Eager is the wall time of a call among many, so it includes Python's part.</li>"
        f"<li>{escape(caps) or 'The driver told no clocks'}.</li>"
    )


def _data_link(results: Results) -> str:
    packed = base64.b64encode(json.dumps(results).encode()).decode()
    return f"data:application/json;base64,{packed}"

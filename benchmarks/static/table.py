"""Print the figures, each with its kind."""

from __future__ import annotations

from collections.abc import Sequence

from ..measure import terminal as report
from . import gate, work
from .arch import ARCH
from .figures import Figures, Key, Table

KINDS = {
    "loop": "",
    "tile, warps, stages": "static",
    "regs": "static",
    "spills": "static",
    "blocks/SM": "static",
    "instr/MFLOP": "static",
    "ratio": "static",
    "floor, goal": "",
    "fma": "static",
    "alu": "static",
    "xu": "static",
    "lsu": "static",
    "bound": "modelled",
    "model": "modelled",
}


def row(key: Key, mine: Figures, peer: Figures | None, version: tuple[int, int]) -> list[str]:
    """Return the cells of a loop, ours / FlexAttention's."""

    def both(name: str, form: str) -> str:
        return "/".join(format(getattr(x, name), form) for x in (mine, peer) if x is not None)

    bounds = "/".join(f"{x.bound:.0%} {x.limiter}" for x in (mine, peer) if x is not None)
    ratio = floors = ""
    if peer is not None:
        ratio = f"{mine.instructions / peer.instructions:.2f}"
        floors = f"{gate.most_instructions(key, version):.2f}, {gate.goal(key):.2f}"
    return [
        str(key),
        mine.config,
        both("regs", "d"),
        both("spills", "d"),
        both("ctas", "d"),
        both("instructions", ".0f"),
        ratio,
        floors,
        *(both(name, ".0f") for name in ("fma", "alu", "xu", "lsu")),
        bounds,
        both("model", ".0%"),
    ]


def show(ours: Table, peer: Table, version: tuple[int, int]) -> None:
    """Print the loops, those with a peer first."""
    order = sorted(ours, key=Key.order)
    for title, keys in (
        (
            "ours/FlexAttention's (causal mask, Inductor's choice)",
            [key for key in order if key in peer],
        ),
        ("ours, other lists and architectures", [key for key in order if key not in peer]),
    ):
        if not keys:
            continue
        rows = [row(key, ours[key], peer.get(key), version) for key in keys]
        gpus = ", ".join(f"sm_{cc} {ARCH[cc].gpu}" for cc in sorted({key.sm for key in keys}))
        print(f"\n{report.plain(f'{title}, bfloat16; {gpus}', list(KINDS), [list(KINDS.values()), *rows])}")
    print(
        "\nstatic: counted in the machine code; instructions are warp instructions for a million floating-"
        "\npoint operations of tensor work. modelled: tensor share of the busiest pipe's time (bound) and of"
        "\nthe issue model's (model; on sm_100 of tensor plus busiest other pipe). Nothing here was timed."
    )


def show_work(found: Sequence[work.Work]) -> None:
    """Print multiply-adds executed / needed."""
    kinds = {
        "relation": "",
        "tokens": "",
        "chosen tile": "static",
        "as edges": "static",
        "ours": "static",
        "ours, run": "emulated",
        "64": "static",
        "128": "static",
        "FlexAttention": "static",
        "at most": "",
    }
    rows = [list(kinds.values())]
    rows += [
        [
            x.name,
            f"{x.tokens:,}",
            str(x.tile),
            f"{x.edges:.0%}",
            f"{x.ours:.2f}",
            "no emulator" if x.emulated is None else f"{x.emulated:.2f}",
            f"{x.by_tile[64]:.2f}",
            f"{x.by_tile[128]:.2f}",
            f"{x.flex:.2f}",
            "" if x.most is None else f"{x.most:.2f}",
        ]
        for x in found
    ]
    title = "multiply-adds executed / needed, counted in the lists (run: the forward kernel, sm_80)"
    print(f"\n{report.plain(title, list(kinds), rows)}")

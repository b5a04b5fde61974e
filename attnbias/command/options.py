"""The arguments of the subcommands, with the help and examples that ``--help`` prints."""

from __future__ import annotations

import argparse
from typing import Any, Literal

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
EXIT_CODES = """\
exit codes: 0 all right; 1 a result is wrong; 2 the arguments are wrong, or a package that they need is
missing; 3 and 4 are explained by `attnbias report --help`; 130 you interrupted it; 141 the reader of its
output, such as `head`, went away."""
MAIN = f"""\
`attnbias show --help` and its like explain each command, with examples. Start with
  attnbias show "Causal() & Window(before=3)"     see what a relation is
  attnbias info                                   see what runs here
  attnbias verify                                 check it

{EXIT_CODES}
Environment variables: docs/command.md.
"""
_RELATION = "an expression such as 'Window(before=3) | Global([0])'; quote it for the shell"
_SHOW = """\
Draw which query (down) attends to which key (across), and say what it costs. The expression is parsed, never
run as Python: relations with their arguments, numbers, lists, & | ~ - .T, and the recipes. Up to 64 tokens
each pair is a character; above, each tile of the layout is one."""
_SHOW_EXAMPLES = """\
examples:
  attnbias show "Causal() & Window(before=3)" 12
  attnbias show "Window(before=255) | Global([0])" 4096 --png window.png
  attnbias show "Documents.from_lengths([5, 4]) & Causal()"     at the lengths of its data
  attnbias show "Causal()" 2 8 --q-start end                    the last 2 queries of 8, as in decoding
  attnbias show "longformer(4, [0])" 16                         a recipe; `attnbias show recipes` lists them
  attnbias show "Graph([[0, 1], [1, 2]], 3)" --json
"""
_PLAN = """\
Split the tokens of a relation over the ranks of a cluster, on paper: the work of each rank and the bytes that
it receives in a layer, beside an all-gather and a ring. Nothing is sent, and no cluster is needed."""
_PLAN_EXAMPLES = """\
examples:
  attnbias plan "Window(before=4095)" 1048576 --ranks 64
  attnbias plan "Causal()" 131072 --ranks 8 --split zigzag --heads 32/8 --dim 128 --json
"""
_VERIFY = """\
Compare every backend that can run here with float64: results and gradients, relation by relation. An error
may be twice that of eager PyTorch in the same dtype (gradients: three times); no tolerance is tuned. It takes
a minute or more on a CPU."""
_VERIFY_EXAMPLES = """\
examples:
  attnbias verify                             all checks; one row per relation, one column per backend
  attnbias verify --case window --verbose     every check whose line contains "window", a line each
  attnbias verify --backend cpu --random 500  500 random problems
  attnbias verify --long                      some rows of 65,536 tokens

`ab.verify(q, k, v, relation)` does it for your own tensors. Exit code 1: a check failed, or, with --random,
the backend refused every problem.
"""
THEORY_EXAMPLES = """\
examples:
  attnbias theory                        about ten seconds; exit code 1: a claim does not hold
  attnbias theory --figure figures.png
  attnbias theory --json
"""
_INFO = "List versions and devices, why each backend can or cannot run on them, and the optional packages."


def add_show(commands: Any) -> None:
    """Add ``attnbias show``."""
    show = _add(commands, "show", "draw a relation and its layout", _SHOW, _SHOW_EXAMPLES)
    show.add_argument("relation", help=f"{_RELATION}; or 'recipes' for a list of recipes")
    show.add_argument("q_len", type=int, nargs="?", help="number of queries (the relation's own, or 16)")
    show.add_argument("k_len", type=int, nargs="?", help="number of keys (as many as queries)")
    show.add_argument("--q-start", default="0", help="position of the first query: a number or 'end' (0)")
    show.add_argument("--tile", type=int, choices=(64, 128), help="tile size of the layout (the cheaper one)")
    show.add_argument(
        "--form", default="auto", help="form of the layout: tiles, edges or auto (the cheaper one)"
    )
    for kind in ("png", "svg"):
        show.add_argument(f"--{kind}", metavar="FILE", help=f"also draw into this file as {kind.upper()}")
    show.add_argument("--json", action="store_true", help="print picture and counts as JSON instead")


def add_plan(commands: Any) -> None:
    """Add ``attnbias plan``."""
    plan = _add(commands, "plan", "count work and bytes of a relation over ranks", _PLAN, _PLAN_EXAMPLES)
    plan.add_argument("relation", help=_RELATION)
    plan.add_argument("q_len", type=int, help="tokens, or queries")
    plan.add_argument("k_len", type=int, nargs="?", help="keys (as many as queries)")
    plan.add_argument("--ranks", type=int, required=True, help="number of ranks")
    plan.add_argument("--split", default="auto", help="tokens to ranks: auto, even, zigzag or work (auto)")
    plan.add_argument("--q-start", default="0", help="position of the first query: a number or 'end' (0)")
    plan.add_argument("--heads", default="32/8", help="query heads, or query heads/key heads (32/8)")
    plan.add_argument("--dim", default="128", help="head size, or D/E (128)")
    plan.add_argument(
        "--dtype", default="bf16", choices=sorted(DTYPES), help="of queries, keys and values (bf16)"
    )
    plan.add_argument("--batch", type=int, default=1, help="batch size (1)")
    plan.add_argument("--json", action="store_true", help="print all numbers as JSON instead")
    plan.add_argument("--figure", metavar="FILE", help="also draw all ranks into this file")


def add_verify(commands: Any) -> None:
    """Add ``attnbias verify``."""
    verify = _add(commands, "verify", "compare the backends with float64", _VERIFY, _VERIFY_EXAMPLES)
    verify.add_argument("--device", default=None, help="cpu, cuda or cuda:1 (a GPU if there is one)")
    verify.add_argument("--backend", default=None, help="only this backend (all that can run)")
    verify.add_argument("--case", default="", help="only checks whose line contains this text")
    verify.add_argument("--random", type=int, metavar="N", help="check N random problems instead")
    verify.add_argument("--seed", type=int, default=0, help="seed of the first random problem (0)")
    verify.add_argument("--small", action="store_true", help="small random problems, for TRITON_INTERPRET=1")
    verify.add_argument("--long", action="store_true", help="check some rows of 65,536 tokens instead")
    verify.add_argument("--verbose", action="store_true", help="print every check; else those that fail")
    verify.add_argument("--json", action="store_true", help="print the counts and failures as JSON instead")


def add_info(commands: Any) -> None:
    """Add ``attnbias info``."""
    info = _add(
        commands, "info", "list versions, devices and backends", _INFO, "example:\n  attnbias info --json\n"
    )
    info.add_argument("--json", action="store_true", help="print it as JSON instead")


def _add(commands: Any, name: str, brief: str, description: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=brief,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def start_of(text: str) -> int | Literal["end"]:
    """Read ``--q-start``."""
    if text == "end":
        return "end"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--q-start: wanted a number or 'end', got {text!r}") from None


def two_of(name: str, text: str) -> tuple[int, int]:
    """Read "a/b", or "a" for both."""
    first, _, second = text.partition("/")
    try:
        return int(first), int(second or first)
    except ValueError:
        raise ValueError(f"{name}: wanted a number or two with a slash between them, got {text!r}") from None

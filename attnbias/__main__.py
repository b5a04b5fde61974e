"""Draw relations, check the backends that can run here, and time them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from . import __version__
from .command import options
from .command.info import info
from .command.plan import plan
from .command.show import show
from .command.verify import verify
from .command.watch import Watch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        code = _run(arguments)
        _flush()
        return code
    except BrokenPipeError:  # `attnbias show ... | head`: nobody reads on
        _drop_output()
        return 141
    except OSError as error:  # of a file to write, or of the output
        print(f"attnbias: {error}", file=sys.stderr)
        try:
            _flush()
        except OSError:
            _drop_output()
        return 2
    except KeyboardInterrupt:
        print("attnbias: interrupted", file=sys.stderr)
        return 130


def _flush() -> None:
    if sys.stdout is not None:  # None where it was closed before Python began
        sys.stdout.flush()


def _drop_output() -> None:
    """Write nothing when Python flushes as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    given, rest = parser.parse_known_args(arguments)
    if rest and given.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if given.command == "bench":
            from .benchmarks.__main__ import main as run_benchmark

            return run_benchmark(rest) or 0
        if given.command in ("report", "tune"):
            from .report import command

            return {"report": command.report, "tune": command.tune}[given.command](given)
        commands = {"show": show, "plan": plan, "verify": verify, "info": info, "theory": _theory}
        return commands[given.command](given)
    except (ValueError, TypeError, NotImplementedError, ImportError, RecursionError) as error:
        print(f"attnbias: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="attnbias", description=__doc__, epilog=options.MAIN, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"attnbias {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    options.add_show(commands)
    options.add_plan(commands)
    options.add_verify(commands)
    options.add_info(commands)
    theory = commands.add_parser(
        "theory",
        help="check the paper's definitions and theorems on every backend; print its tables",
        epilog=options.THEORY_EXAMPLES,
        formatter_class=raw,
    )
    theory.add_argument("--json", action="store_true", help="print all of it as JSON instead")
    theory.add_argument("--figure", metavar="FILE", help="also draw Figures 1 to 4 of the paper to this file")
    _add_gpu(
        commands.add_parser("report", help="check and time all of a GPU: one file, 60 lines to paste"),
        commands.add_parser("tune", help="measure configurations of the GPU kernels, and keep the fastest"),
    )
    commands.add_parser("bench", help="run the benchmark; bench --help lists its options", add_help=False)
    return parser


def _add_gpu(report: argparse.ArgumentParser, tune: argparse.ArgumentParser) -> None:
    """Add the arguments of report and tune."""
    from .report.options import add_report, add_tune

    add_report(report)
    add_tune(tune)


def _theory(given: argparse.Namespace) -> int:
    from .symmetry import figures, theory

    if given.figure:
        figures.draw(given.figure)
    watch = Watch()
    found = theory.examine(watch)
    watch.clear()
    if given.json:
        print(json.dumps(found.as_dict()))
    else:
        print(found)
        if given.figure:
            print(f"wrote {given.figure}")
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())

"""Show a relation, plan it over ranks, verify the backends, report on a GPU, or run the benchmark."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from . import __version__
from .arguments import device_of
from .backends import cpu
from .layouts import Layout
from .op import dispatch
from .recipes import RECIPES
from .relations import parse
from .sharding import shard
from .sharding.report import draw
from .testing import checklist, soak

MOST_TILES = 64  # drawn as text along a side
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
OPTIONAL = {
    "triton": "the backend for GPUs",
    "nvidia-cudnn-frontend": "backend cudnn, NVIDIA's kernels for Hopper and Blackwell",
    "matplotlib": "plots, show --png",
    "rich": "tables and progress bars of bench",
    "safetensors": "Layout.save and load",
    "scipy": "node orders; a peer in bench",
    "torch_geometric": "integrations.pyg; a peer in bench",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
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
        return {"show": _show, "plan": _plan, "verify": _verify, "info": _info, "theory": _theory}[
            given.command
        ](given)
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        print(f"attnbias: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnbias", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="draw which query attends to which key, and the layout of tiles")
    show.add_argument(
        "relation",
        help="an expression such as 'Causal() & Window(before=3)' or 'longformer(4, [0])'; "
        "'recipes' lists the names that are not relations",
    )
    show.add_argument("q_len", type=int, nargs="?", help="number of queries (the relation's own, or 16)")
    show.add_argument("k_len", type=int, nargs="?", help="number of keys (as many as queries)")
    show.add_argument("--q-start", default="0", help="position of the first query: a number or 'end' (0)")
    show.add_argument("--tile", type=int, choices=(64, 128), help="tile size (the cheaper one)")
    show.add_argument("--form", default="auto", help="tiles, edges, or auto for the cheaper one (auto)")
    show.add_argument("--png", metavar="FILE", help="also write a picture of the tiles to this file")
    _add_plan(
        commands.add_parser("plan", help="shard a relation over ranks on paper: work, bytes, a picture")
    )
    verify = commands.add_parser("verify", help="compare every backend that can run here with float64")
    verify.add_argument("--device", default=None, help="cpu, cuda or cuda:1 (a GPU if there is one)")
    verify.add_argument("--backend", default=None, help="only this backend (all that can run)")
    verify.add_argument("--case", default="", help="only checks whose line contains this text")
    verify.add_argument("--random", type=int, metavar="N", help="check N random problems instead")
    verify.add_argument("--seed", type=int, default=0, help="seed of the first random problem (0)")
    verify.add_argument("--small", action="store_true", help="small random problems, for TRITON_INTERPRET=1")
    verify.add_argument("--long", action="store_true", help="check some rows of 65,536 tokens instead")
    commands.add_parser("info", help="print versions and devices, and why each backend can or cannot run")
    theory = commands.add_parser(
        "theory", help="check the paper's definitions and theorems on every backend; print its tables"
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


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("relation", help="an expression, as for show")
    plan.add_argument("q_len", type=int, help="tokens, or queries")
    plan.add_argument("k_len", type=int, nargs="?", help="keys (as many as queries)")
    plan.add_argument("--ranks", type=int, required=True, help="number of ranks")
    plan.add_argument("--split", default="auto", help="auto, even, zigzag or work (auto)")
    plan.add_argument("--q-start", default="0", help="position of the first query: a number or 'end' (0)")
    plan.add_argument("--heads", default="32/8", help="query heads, or query heads/key heads (32/8)")
    plan.add_argument("--dim", default="128", help="head size, or D/E (128)")
    plan.add_argument("--dtype", default="bf16", choices=sorted(DTYPES), help="of queries, keys and values")
    plan.add_argument("--batch", type=int, default=1, help="batch size (1)")
    plan.add_argument("--json", action="store_true", help="print all numbers as JSON instead")
    plan.add_argument("--figure", metavar="FILE", help="also write a picture to this file")


def _plan(given: argparse.Namespace) -> int:
    relation = parse(given.relation, RECIPES)
    (heads, key_heads), (size, value_size) = (
        _two(f"--{name}", getattr(given, name)) for name in ("heads", "dim")
    )
    lengths = given.q_len, given.q_len if given.k_len is None else given.k_len
    start = given.q_start if given.q_start == "end" else int(given.q_start)
    sizes = {"batch": given.batch, "heads": heads}
    planned = shard(relation, lengths, given.ranks, split=given.split, q_start=start, **sizes)
    dtype = DTYPES[given.dtype]
    report = planned.explain(heads, key_heads, (size, value_size), dtype, given.batch)
    picture = draw(planned.plan, given.figure)
    if given.json:
        print(json.dumps(report.as_dict()))
        return 0
    print(report)
    print(f"\nrank by key: o held, # fetched\n{picture}")
    if given.figure:
        print(f"wrote {given.figure}")
    return 0


def _two(name: str, text: str) -> tuple[int, int]:
    """Read "a/b", or "a" for both."""
    first, _, second = text.partition("/")
    try:
        return int(first), int(second or first)
    except ValueError:
        raise ValueError(f"{name}: wanted a number or two with a slash between them, got {text!r}") from None


def _show(given: argparse.Namespace) -> int:
    if given.relation == "recipes":
        return _list_recipes()
    relation = parse(given.relation, RECIPES)
    q_len, k_len = given.q_len, given.k_len
    if q_len is None:
        q_len, k_len = relation.lengths[0] or 16, relation.lengths[1]
    k_len = q_len if k_len is None else k_len
    start = given.q_start if given.q_start == "end" else int(given.q_start)
    print(relation)
    if q_len * k_len <= 1 << 16:
        print(relation.picture(q_len, k_len, start))
    layout = Layout.build(relation, q_len, k_len, q_start=start, form=given.form, tile=given.tile)
    if layout.q_tile.numel() > 1 and max(q_len, k_len) <= MOST_TILES * layout.tile:
        print(f"tiles of {layout.tile}: # full, + partial, e edges, * both\n{layout.picture()}")
    print(layout.stats())
    if given.png:
        layout.picture(given.png)
        print(f"wrote {given.png}")
    return 0


def _list_recipes() -> int:
    for name, recipe in RECIPES.items():
        signature = inspect.signature(recipe)
        bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        print(f"{name}{signature.replace(parameters=bare, return_annotation=signature.empty)}")
        print("    " + (inspect.getdoc(recipe) or "").partition("\n")[0].replace("``", ""))
    return 0


def _verify(given: argparse.Namespace) -> int:
    device = device_of(given.device)
    if given.backend is not None:
        dispatch.check_name(given.backend, "--backend")
    if given.backend == "triton":
        import triton  # noqa: F401  # the backend looks at it for an interpreter or a driver
    if given.random is not None:
        return _verify_random(given, device)
    started, lines = time.monotonic(), []
    is_long, backend = given.long, given.backend
    found = checklist.long_lines(device, backend) if is_long else checklist.lines(device, backend, given.case)
    for line in found:
        print(line, flush=True)
        lines.append(line)
    if not (backend or is_long):
        for name, why in checklist.backends_of(device).items():
            if all(line.backend != name for line in lines):
                print(f"{name}: {why or 'refuses all of these checks'}")
    if not lines:
        who = backend or "no backend"
        raise ValueError(f"nothing to verify: {who} runs none of these checks on {device}")
    failed = sum(bool(line.fault) for line in lines)
    seconds = time.monotonic() - started
    print(f"{len(lines) - failed} passed, {failed} failed on {device}, {seconds:.0f} s")
    return 1 if failed else 0


def _verify_random(given: argparse.Namespace, device: str) -> int:
    if given.random < 1:
        raise ValueError(f"--random: wanted at least 1 problem, got {given.random}")
    failed = refused = bare = 0
    started = shown = time.monotonic()
    for number in range(given.random):
        seed = given.seed + number
        try:
            drawn, faults, is_plain = soak.check(seed, given.backend, small=given.small, device=device)
        except NotImplementedError:
            refused += 1
            continue
        except Exception as error:  # the remaining problems are still worth checking
            failed += 1
            print(f"FAILED seed {seed}: {checklist.words_of(error)}", flush=True)
            continue
        bare += is_plain
        if faults:
            failed += 1
            print(f"FAILED {drawn}", *faults, sep="\n  ")
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{number + 1} of {given.random} problems, {failed} failed", file=sys.stderr)
    seconds = time.monotonic() - started
    print(
        f"{given.random - refused - failed} passed, {failed} failed, {refused} refused by "
        f"{given.backend or 'the chosen backends'}, {bare} run without the options that it refuses, "
        f"{seconds:.0f} s, seeds {given.seed}..{given.seed + given.random - 1}"
    )
    return 1 if failed or refused == given.random else 0


def _info(given: argparse.Namespace) -> int:
    print(f"attnbias {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    kernels = cpu.missing() or f"kernels at {cpu.isa()} (of {', '.join(cpu.isas())})"
    print(f"cpu: {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    print(f"     torch at {torch.backends.cpu.get_cpu_capability()}; {kernels}")
    devices = ["cpu"]
    for number in range(torch.cuda.device_count()):
        devices.append(f"cuda:{number}")
        major, minor = torch.cuda.get_device_capability(number)
        size = torch.cuda.get_device_properties(number).total_memory >> 30
        print(f"cuda:{number}: {torch.cuda.get_device_name(number)}, sm_{major}{minor}, {size} GiB")
    for device in devices:
        for name, why in checklist.backends_of(device).items():
            print(f"{device} {name}: {why or 'can run'}")
    for package, what in OPTIONAL.items():
        try:
            print(f"{package} {version(package)}: {what}")
        except PackageNotFoundError:
            print(f"{package} is not installed: {what}")
    return 0


def _theory(given: argparse.Namespace) -> int:
    from .symmetry import figures, theory

    if given.figure:
        figures.draw(given.figure)
    found = theory.examine()
    if given.json:
        print(json.dumps(found.as_dict()))
    else:
        print(found)
        if given.figure:
            print(f"wrote {given.figure}")
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())

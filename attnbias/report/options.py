"""The arguments of ``attnbias report`` and ``attnbias tune``; imports nothing that takes time."""

from __future__ import annotations

import argparse

import torch

EPILOG = """\
examples:
  attnbias report --device cuda --quick
  attnbias report --device cpu --quick --out try.json.gz

exit codes: 0 all right; 1 a result is wrong; 2 the arguments are; 3 a step raised; 4 the CUDA context or the
process died in a step. With several, the largest. What needs more memory than there is, or is not installed,
is noted and changes no code.

The file has no names of hosts, users or folders. A report that was ended goes on where it was; --fresh starts
anew. A step that kills its process is noted, and a new process goes on behind it.
"""
TUNE_EPILOG = """\
example:
  attnbias tune --dtype bf16 fp16 --dim 64 128

Exit code 1: a pass could not be measured.
"""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``attnbias report``."""
    parser.description = "Check and time everything on a device, in one file and at most 60 lines to paste."
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try it (cuda)")
    parser.add_argument("--backend", default=None, help="check this backend (the device's kernels)")
    parser.add_argument("--quick", action="store_true", help="about 2 minutes in place of 15")
    parser.add_argument(
        "--tune", action="store_true", help="also measure other configurations, and keep the fastest"
    )
    parser.add_argument("--fresh", action="store_true", help="start anew instead of going on")
    parser.add_argument("--out", metavar="FILE", help="the file (results/<GPU>.json.gz)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # a process of the report


def add_tune(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``attnbias tune``."""
    parser.description = (
        "Measure configurations of the kernels on this GPU; later calls take the fastest that is right."
    )
    parser.epilog, parser.formatter_class = TUNE_EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cuda", help="cuda or cuda:1 (cuda)")
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), default=["bf16"], help="(bf16)")
    parser.add_argument("--dim", nargs="+", type=int, default=[64, 128], help="head sizes (64 128)")
    parser.add_argument("--tile", nargs="+", type=int, choices=(64, 128), default=[128, 64], help="(128 64)")
    parser.add_argument("--tokens", type=int, default=4096, help="(4096)")
    parser.add_argument("--json", action="store_true", help="print all times as JSON instead")

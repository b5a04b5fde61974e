"""Count what options add to the loop over full tiles, as a ratio to the plain kernel's; all static.

Also a command: ``python -m attnbias.benchmarks.static.options``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

import attnbias as ab

from .figures import PASSES
from .ours import KERNELS, Recorder, as_shipped
from .sass import Compiled, Loop, analyse, tool

CAPABILITIES = (80, 90)
SIZES = (64, 128)
HEADS, TOKENS, TILE = 2, 512, 128
GATED = 64  # head size to which the limits apply: at 128 an option weighs less


def _alibi() -> dict[str, Any]:
    return {"terms": [ab.ALiBi(torch.linspace(0.1, 0.2, HEADS))]}


def _relative() -> dict[str, Any]:
    return {"terms": [ab.RelativeBias(torch.zeros(HEADS, 32), ab.t5_buckets(bidirectional=False))]}


# What is called, and the most instructions, as a ratio to plain.
OPTIONS: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    "ALiBi": (_alibi, 1.2),
    "T5 bias": (_relative, 1.4),
    "softcap": (lambda: {"softcap": 30.0}, 1.6),
    "dropout": (lambda: {"dropout_p": 0.1}, 2.0),
}


# Where what is wanted is not reached. Dropout: 28 products and exclusive ors of Philox4x32-7 serve four
# keys, and the bits have to be brought to the threads that own the pairs. ALiBi: a pair costs an addition,
# two pairs share a distance and its product.
MISSED = {
    (90, "ALiBi", "forward"): 1.21,
    (90, "ALiBi", "backward_query"): 1.24,
    (90, "softcap", "backward_query"): 1.63,
    (80, "dropout", "forward"): 2.62,
    (80, "dropout", "backward_query"): 2.09,
    (80, "dropout", "backward_key"): 2.49,
    (90, "dropout", "forward"): 2.33,
    (90, "dropout", "backward_query"): 2.50,
    (90, "dropout", "backward_key"): 2.58,
}


# Loops whose products ptxas runs one after the other: head size, option and pass, on sm_90.
SERIALISED = {(128, "dropout", "backward_query")}


class Figures(NamedTuple):
    """The counts of one pass with one option."""

    sm: int
    d: int  # head size
    which: str  # pass
    option: str
    instructions: float  # of the loop over full tiles, as a ratio to the plain kernel's
    spills: int  # in this loop
    serial: tuple[str, ...]  # ptxas's reasons to serialise wgmma

    @property
    def name(self) -> str:
        """Return the name of the loop."""
        return f"sm_{self.sm} D={self.d} {self.option} {PASSES[self.which]}"

    def faults(self) -> Iterator[str]:
        """Say which limits break."""
        most = MISSED.get((self.sm, self.option, self.which), OPTIONS[self.option][1])
        ratio = self.instructions
        if self.d == GATED and ratio > most:
            yield f"{self.name}: instructions {ratio:.2f} of the plain kernel's, at most {most:.2f}"
        is_known = (self.d, self.option, self.which) in SERIALISED
        for reason in () if is_known else self.serial:
            yield f"{self.name}: wgmma serialised: {reason}"


class _Recorder(Recorder):
    """Keeps the PTX of each kernel, too: only ptxas says whether it serialises products."""

    def __init__(self, cc: int) -> None:
        super().__init__(cc)
        self.kept: list[tuple[Compiled, str]] = []

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return the function that Triton calls for each launch of a kernel."""
        files = get_cache_manager(metadata.hash).get_group(f"{source.name[:150]}.json") or {}
        path = next(path for file, path in files.items() if file.endswith(".ptx"))

        def launch(gx: int, gy: int, gz: int, stream: int, cubin: bytes, *rest: Any) -> None:
            driver.active.kept.append((Compiled.from_parts(metadata, cubin, metadata.target.arch), path))

        return launch


@contextmanager
def _recording(cc: int) -> Iterator[_Recorder]:
    before = driver._active  # not .active: it would look for a GPU
    recorder = _Recorder(cc)
    driver.set_active(recorder)
    try:
        yield recorder
    finally:
        driver._active = before


def build(cc: int, d: int, **options: Any) -> dict[str, tuple[Compiled, str]]:
    """Compile a training step of causal attention, bfloat16.

    Returns:
        By pass the kernel and the path of its PTX.
    """
    layout = ab.Layout.build(ab.Causal(), TOKENS, TOKENS, form="tiles", tile=TILE)
    inputs = [torch.zeros(2, HEADS, TOKENS, d, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    query, key, value = inputs
    with as_shipped(), _recording(cc) as recorder:
        out = ab.attention(query, key, value, layout, backend="triton", **options)
        torch.autograd.grad(out.float().sum(), inputs)
    return {KERNELS[kernel.name]: (kernel, ptx) for kernel, ptx in recorder.kept if kernel.name in KERNELS}


def why_serial(cc: int, ptx: str) -> tuple[str, ...]:
    """Return ptxas's reasons to run wgmma one after the other; () if it does not."""
    with tempfile.NamedTemporaryFile() as to:
        command = [tool("ptxas"), "-v", "--gpu-name", f"sm_{cc}a", ptx, "-o", to.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(sorted(set(re.findall(r"(C75\d\d)\)[^\n]*serialized", done.stdout + done.stderr))))


def full_loop(kernel: Compiled) -> Loop:
    """Return the loop over full tiles: of those with the most tensor work the one with less to do."""
    loops = analyse(kernel, model=False).loops
    most = max(x.flops for x in loops)
    return min((x for x in loops if x.flops == most), key=lambda x: x.n)


def measure(capabilities: Sequence[int] = CAPABILITIES, sizes: Sequence[int] = SIZES) -> list[Figures]:
    """Count every pass with every option."""
    found = []
    for cc in capabilities:
        for d in sizes:
            plain = {which: full_loop(kernel) for which, (kernel, _) in build(cc, d).items()}
            for option, (make, _) in OPTIONS.items():
                for which, (kernel, ptx) in build(cc, d, **make()).items():
                    loop = full_loop(kernel)
                    ratio = round(loop.instructions / plain[which].instructions, 2)
                    serial = why_serial(cc, ptx) if cc == 90 else ()
                    found.append(Figures(cc, d, which, option, ratio, loop.spills, serial))
    return found


def broken_limits(found: Sequence[Figures]) -> list[str]:
    """Return which limits break."""
    return [fault for x in found for fault in x.faults()]


def show(found: Sequence[Figures]) -> None:
    """Print a line for each pass of each option."""
    print("\nOptions: instructions of the loop over full tiles, as a ratio to the plain kernel's (static)")
    for x in found:
        serial = f", wgmma serialised ({', '.join(x.serial)})" if x.serial else ""
        wanted = OPTIONS[x.option][1]
        print(f"  {x.name:32} {x.instructions:.2f}, wanted {wanted:.1f}; spills {x.spills}{serial}")


def main() -> None:
    """Print the counts, and fail where a limit breaks."""
    parser = argparse.ArgumentParser(
        prog="python -m attnbias.benchmarks.static.options", description="Count what options add to loops."
    )
    parser.add_argument("--sm", type=lambda text: [int(x) for x in text.split(",")], default=CAPABILITIES)
    parser.add_argument("--d", type=lambda text: [int(x) for x in text.split(",")], default=SIZES)
    options = parser.parse_args()
    found = measure(options.sm, options.d)
    show(found)
    faults = broken_limits(found)
    print(f"\n{len(faults)} limits broken" + "".join(f"\n  {x}" for x in faults))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()

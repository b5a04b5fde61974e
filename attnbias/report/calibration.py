"""The static model beside the clock: for each timed case what was modelled, executed and measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..benchmarks.static import figures
from ..benchmarks.static.arch import ARCH
from ..kernels.launch.config import Target, target_of
from ..testing.built import built
from .runner import Outcome, Run, Status, Step

PRODUCTS = {"forward": 2, "forward and backward": 9}  # matrix products of a tile that our kernels execute


def steps(run: Run) -> Iterator[Step]:
    """Yield the one step, which only computes."""
    yield Step("model: shares modelled and measured", lambda: _calibrate(run))


def _calibrate(run: Run) -> Outcome:
    target = target_of(run.device)
    if isinstance(target, str):
        return Outcome(Status.SKIPPED, f"nothing to calibrate: {target}")
    arch = max((known for known in ARCH if known <= target.arch), default=None)
    modelled = _modelled(target)
    lines = []
    for name, step in run.found("time").items():
        for which, each in step.get("data", {}).get("passes", {}).items():
            lines.append(_line(name, which, step["data"]["sizes"], each, arch, modelled))
    kernels = [each._asdict() for each in built()]
    words = f"{len(lines)} times beside {len(modelled)} modelled loops" if lines else "nothing was timed"
    return Outcome(data={"lines": lines, "modelled": modelled, "kernels": kernels}, words=words)


def _modelled(target: Target) -> dict[str, dict[str, Any]]:
    """Return the stored figures of this architecture, for the nearest Triton that they exist for."""
    names = [f"attnbias, triton {version}" for version in ("3.7.1", "3.9.0")]
    found = figures.read(names[target.triton >= (3, 9)])
    return {loop: row for loop, row in found.items() if loop.startswith(f"sm_{target.arch} ")}


def _line(
    name: str,
    which: str,
    sizes: dict[str, Any],
    timed: dict[str, Any],
    arch: int | None,
    modelled: dict[str, Any],
) -> dict[str, Any]:
    """Put what was executed in a second beside the peak of the architecture's known card."""
    heads = sizes["batch"] * sizes["heads"]
    macs = PRODUCTS[which] * sizes["executed"] * heads * sizes["size"]
    line = {"case": name, "pass": which, "macs": macs, "macs_per_second": macs / timed["device"]}
    if arch is not None:
        card = ARCH[arch]
        line |= {"card": card.gpu, "peak_macs": card.sms * card.mhz * 1e6 * card.tensor}
        line["measured_share"] = round(line["macs_per_second"] / line["peak_macs"], 4)
    start = (
        f"sm_{arch} D={sizes['size']} "
        if sizes["tile"] == 128
        else f"sm_{arch} D={sizes['size']} lists of 64 "
    )
    line["modelled_shares"] = {key: row["model"] for key, row in modelled.items() if key.startswith(start)}
    return line

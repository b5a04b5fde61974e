"""Peak extra memory of a forward and backward pass over a graph: ``python -m ... NAME HEADS SIZE``.

Run it in a process of its own. It counts what the passes add to resident memory: results, gradients and
scratch, not the inputs and the layout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from ..cases.graphs import GRAPHS, GraphCase
from ..cases.stored import GraphData
from .race import steps

STATUS, PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def limit(edges: int, nodes: int, heads: int, size: int) -> int:
    """Return what the passes may add: 24 bytes per edge and head, and three times q, k, v and out."""
    return 24 * edges * heads + 3 * 4 * (4 * nodes * heads * size)


def measure(graph: str, heads: int, size: int) -> int | None:
    """Measure in a new process; return bytes, or None if the system does not report them."""
    if not PEAK.exists():
        return None
    command = [sys.executable, "-m", "attnbias.benchmarks.measure.graph_memory", graph, str(heads), str(size)]
    # Every large block is then mapped by itself and returned to the system when it is freed.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return int(done.stdout)


def peak(case: GraphCase) -> int:
    """Return the bytes that a forward and backward pass adds to this process."""
    step = steps(case.attend, case.inputs(), backward=True)
    small = GraphCase.of(GraphData("small", case.graph.edge_index[:, :0], 64), case.heads, case.size)  # type: ignore[union-attr]
    steps(small.attend, small.inputs(), backward=True)()  # loads all code
    case.layout.validate()
    PEAK.write_text("5")  # resets the peak to what is in use now
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Return a size of this process, such as VmRSS, in bytes."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, heads, size = sys.argv[1:]
    print(peak(GraphCase.of(GRAPHS[name](), int(heads), int(size))))

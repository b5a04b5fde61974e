"""Count compiled GPU code, ours and FlexAttention's; needs no GPU."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from . import edges, gate, levels, table, whole_table, work
from . import options as with_options
from .arch import ARCH
from .count import count, names, versions
from .figures import STORE, Rows, read, rows_of, store


def _stored(name: str, options: argparse.Namespace, is_counted: bool) -> Rows:
    """Return the stored counts of the architectures that are counted now, or of the others."""
    pattern = re.compile(rf"sm_({'|'.join(map(str, options.sm))}) ")
    return {
        loop: row
        for loop, row in read(name, options.counts).items()
        if bool(pattern.match(loop)) == is_counted
    }


def _check_table(options: argparse.Namespace) -> None:
    """Print the figures of every row of the configuration table; fail where one is wrong or got worse."""
    path = options.counts or whole_table.STORE
    faults = whole_table.check(options.sm, options.d, options.jobs, path, options.store)
    print(f"\n{len(faults)} rows wrong or worse than stored" + "".join(f"\n  {x}" for x in faults))
    sys.exit(1 if faults else 0)


def main() -> None:
    """Print the tables; with --gate, fail where a floor breaks or a stored count got worse."""
    parser = argparse.ArgumentParser(prog="python -m attnbias.benchmarks.static", description=__doc__)
    parser.add_argument("--sm", type=lambda text: [int(x) for x in text.split(",")], default=sorted(ARCH))
    parser.add_argument("--gate", action="store_true", help="fail where a floor breaks or a count got worse")
    parser.add_argument("--store", action="store_true", help=f"store the counts in {STORE.name}")
    parser.add_argument("--rebuild", action="store_true", help="compile FlexAttention's kernels again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of processes (one per core)")
    parser.add_argument("--counts", type=Path, help=f"the file of stored counts ({STORE.name})")
    parser.add_argument(
        "--table", action="store_true", help="check every row of the configuration table instead"
    )
    parser.add_argument(
        "--d",
        type=lambda text: [int(x) for x in text.split(",")],
        default=whole_table.SIZES,
        help="head sizes, with --table",
    )
    options = parser.parse_args()
    if options.table:
        _check_table(options)
        return
    options.counts = options.counts or STORE
    torch_version, triton_version = versions()
    major, minor = map(int, triton_version.split(".")[:2])
    version = major, minor
    print(f"torch {torch_version}, triton {triton_version}; no GPU: static, modelled and emulated figures")
    found = count(options.sm, options.jobs, options.rebuild, options.counts)
    works = [work.measure(case) for case in work.cases()]
    table.show(found.ours, found.peer, version)
    edges.show(found.edges)
    levels.show(found.levels)
    with_options.show(found.options)
    table.show_work(works)

    our_name, peer_name, edge_name, level_name, option_name = names()
    counted = {
        our_name: rows_of(found.ours),
        peer_name: rows_of(found.peer),
        edge_name: {x.name: x._asdict() for x in found.edges},
        level_name: {x.name: x._asdict() for x in found.levels},
        option_name: {x.name: x._asdict() for x in found.options},
    }
    if options.store:
        kept = {name: _stored(name, options, False) | now for name, now in counted.items()}
        store(kept, options.counts)
    faults = gate.broken_floors(found.ours, found.peer, version) + edges.broken_floors(found.edges, version)
    faults += levels.broken_floors(found.levels) + with_options.broken_limits(found.options)
    for name in (our_name, edge_name, level_name, option_name):
        before = _stored(name, options, True)
        faults += gate.worse(counted[name], before)
        if not before:
            print(f"\nno stored counts to compare with: {name}")
    faults += [fault for x in works for fault in x.faults()]
    print(f"\n{len(faults)} floors broken or counts worse than stored" + "".join(f"\n  {x}" for x in faults))
    if options.gate and faults:
        sys.exit(1)


if __name__ == "__main__":
    main()

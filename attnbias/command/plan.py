"""``attnbias plan``."""

from __future__ import annotations

import argparse
import json

from ..recipes import RECIPES
from ..relations import parse
from ..sharding import shard
from ..sharding.report import draw
from .options import DTYPES, start_of, two_of


def plan(given: argparse.Namespace) -> int:
    """Shard a relation over ranks on paper; print the report."""
    relation = parse(given.relation, RECIPES)
    (heads, key_heads), (size, value_size) = (
        two_of(f"--{name}", getattr(given, name)) for name in ("heads", "dim")
    )
    lengths = given.q_len, given.q_len if given.k_len is None else given.k_len
    start = start_of(given.q_start)
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

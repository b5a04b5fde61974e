"""Random problems against float64, on each backend; and that a fault would be seen."""

from __future__ import annotations

import pytest
import torch

import attnbias as ab
from attnbias import soak


@pytest.mark.parametrize("backend", [None, "reference", "rows", "cpu"])
@pytest.mark.parametrize("block", range(4))
def test_random_problems_agree_with_float64(backend, block):
    done = 0
    for seed in range(10_000 + 25 * block, 10_025 + 25 * block):
        try:
            faults = soak.compare(soak.draw(seed), backend)
        except NotImplementedError:  # an option that the backend does not take
            continue
        assert not faults, (str(soak.draw(seed)), faults)
        done += 1
    assert done > (8 if backend == "cpu" else 15)


def test_a_wrong_bit_is_seen(monkeypatch):
    """Each pair of the layout that is dropped, or added, turns some result red."""

    def is_telling(drawn):
        query, key, _ = drawn.inputs
        plain = not drawn.options.keys() - {"q_start"} and query.dtype == torch.float32
        sizes = {"batch": query.shape[0], "heads": query.shape[1]}
        start = drawn.options["q_start"]
        return (
            drawn.form is not None
            and plain
            and drawn.relation.count(query.shape[2], key.shape[2], start, **sizes) > 3
        )

    drawn = next(filter(is_telling, map(soak.draw, range(10_000))))
    assert not soak.compare(drawn, "rows")
    plain = ab.Layout.columns

    def wrong(self, g, t):
        keys, counts = plain(self, g, t)
        counts = counts.clone()
        places = counts.nonzero()
        if len(places):
            counts[tuple(places[0])] = 0
        return keys, counts

    monkeypatch.setattr(ab.Layout, "columns", wrong)
    assert soak.compare(drawn, "rows")

"""Random problems against float64, on each backend; and that a fault would be seen."""

from __future__ import annotations

import pytest
import torch

import attnbias as ab
from attnbias import soak


@pytest.mark.parametrize("backend", [None, "reference", "rows"])
@pytest.mark.parametrize("block", range(4))
def test_random_problems_agree_with_float64(backend, block):
    done = 0
    for seed in range(10_000 + 25 * block, 10_025 + 25 * block):
        try:
            faults = soak.compare(soak.draw(seed), backend)
        except NotImplementedError:  # rows takes no terms
            continue
        assert not faults, (str(soak.draw(seed)), faults)
        done += 1
    assert done > 15


def test_a_wrong_bit_is_seen(monkeypatch):
    """Each pair of the layout that is dropped, or added, turns some result red."""
    drawn = next(
        d
        for d in map(soak.draw, range(10_000))
        if d.as_layout
        and d.inputs[0].dtype == torch.float32
        and d.relation.count(d.inputs[0].shape[2], d.inputs[1].shape[2], d.options["q_start"]) > 3
        and d.options.get("dropout_p") != 1.0
        and d.options.get("scale") is None
    )
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

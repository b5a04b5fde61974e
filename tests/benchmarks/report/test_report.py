"""Sentences and figures of the tables and the page."""

from __future__ import annotations

from cases.benchmarks import point

from attnbias.benchmarks.measure import record
from attnbias.benchmarks.report import page, tables


def test_verdicts_name_slower_cases():
    found = record.start({"device": "x"})
    found["sweep"] = [point(0.01, 10.0), point(1.0, 0.4, edges=0.5)]
    (line,) = tables.verdicts(found)
    assert "takes 2.00 of the time" in line and "at 100.0%" in line and "from 73% on with a mask" in line


def test_tiles_are_drawn_as_runs():
    drawn = page.tiles_svg("##.\n.+e")
    assert "viewBox='0 0 3 2'" in drawn
    assert "M0 0h2v1h-2z" in drawn and "M1 1h1v1h-1z" in drawn and "M2 1h1v1h-1z" in drawn
    assert drawn.count("<path") == 3


def test_the_static_table_has_a_figure_for_every_loop():
    rows = page.static_rows()
    assert len(rows) == 6 and all(0.2 < float(cell) < 2 for row in rows for cell in row[1:])

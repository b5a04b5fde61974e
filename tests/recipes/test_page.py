"""docs/recipes.md: every block of code runs by itself, and every picture shows what its block prints."""

from __future__ import annotations

import re

import pytest
from cases import ROOT
from recipe_pictures import draw, entries, grids_of, rectangles, run

from attnbias import recipes

PAGE = ROOT / "docs" / "recipes.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
MOST_BYTES = 10_000


def test_every_recipe_has_an_entry_that_calls_it():
    found = {entry.picture.stem: entry.code for entry in entries()}
    assert sorted(found) == sorted(recipes.RECIPES)
    assert all(f"ab.recipes.{name}(" in code for name, code in found.items())


@pytest.mark.parametrize("code", BLOCKS)
def test_block_can_be_pasted(code):
    run(code)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.title)
def test_picture_is_up_to_date(entry):
    """If this fails: python tools/recipe_pictures.py."""
    drawn = draw(grids_of(run(entry.code)))
    assert entry.picture.read_text() == drawn
    assert len(drawn) < MOST_BYTES


def test_no_picture_is_left_over():
    assert {entry.picture for entry in entries()} == set((PAGE.parent / "pictures/recipes").iterdir())


@pytest.mark.parametrize("code", BLOCKS[1:])
def test_rectangles_cover_the_marked_cells_once(code):
    for grid in grids_of(run(code)):
        covered = [[0] * len(line) for line in grid]
        for x, y, width, height in rectangles(grid):
            for row in covered[y : y + height]:
                row[x : x + width] = [n + 1 for n in row[x : x + width]]
        assert ["".join(".#"[n] for n in row) for row in covered] == grid

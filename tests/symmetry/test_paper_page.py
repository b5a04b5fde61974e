"""docs/paper.md: its code runs, and its statements, tables and slips are those that the command checks."""

from __future__ import annotations

import doctest

import pytest
from cases import ROOT

from attnbias.symmetry.claims import CLAIMS
from attnbias.symmetry.tables import SLIPS, TABLE_1, TABLE_2

PAGE = ROOT / "docs" / "paper.md"
TEXT = PAGE.read_text()
WORDS = " ".join(TEXT.split())


def rows_under(header):
    """Return the rows of the table with this header, as lists of cells."""
    lines = TEXT.partition(f"{header}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def test_code_of_the_page_runs():
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 40 and not failed


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_page_states_what_is_checked(claim):
    statement = claim.statement
    if claim.reading:
        truth = "true" if claim.reading.is_true else "false"
        theorem = WORDS.partition(f"**{claim.number}**,")[2]
        head = f"{claim.reading.number}. Read as {claim.reading.words}: **{truth}**. "
        assert f"{head}{statement[0].upper()}{statement[1:]}." in theorem
    else:
        assert f"**{claim.name}**, {claim.title}: {statement}." in WORDS
    assert not claim.condition or f"*Only if* {claim.condition}." in WORDS


def test_page_has_every_number_of_the_paper():
    for number in (*(f"Definition {n}" for n in (*range(3, 11),)), *(f"Theorem {n}" for n in range(1, 9))):
        assert f"**{number}" in TEXT, number
    for words in ("Definitions 1 and 2", "Equation 9", "Tables 1 and 2", "Figures 1 to 4"):
        assert words in TEXT


def test_tables_of_the_page_are_those_that_are_computed():
    first = rows_under("| mechanism | relations | symmetry group | data type | example | its symmetries |")
    for row, mechanism in zip(first, TABLE_1, strict=True):
        assert row[:5] == [
            mechanism.name,
            mechanism.relations,
            mechanism.symmetry,
            mechanism.data,
            mechanism.example,
        ]
        assert row[5].startswith(mechanism.group.name)
        assert ("of all integers: translations" in row[5]) == mechanism.is_of_translations
    assert rows_under("| model | attention | uses | here |") == [list(model) for model in TABLE_2]


def test_slips_of_the_page_are_those_of_the_command():
    found = rows_under("| place | printed | what holds |")
    assert found == [[slip.place, slip.printed, slip.holds] for slip in SLIPS]


def test_page_is_linked():
    assert "(paper.md)" in (ROOT / "docs" / "index.md").read_text()

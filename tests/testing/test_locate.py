"""Wrong numbers are described by the tiles that they fill."""

from __future__ import annotations

import pytest
import torch

import attnbias as ab
from attnbias.testing.locate import locate

SHAPE = 1, 2, 200, 8


def wrong_at(*index):
    wrong = torch.zeros(SHAPE, dtype=torch.bool)
    wrong[index] = True
    return wrong


ROWS = slice(64, 128)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (
            (0, 1, ROWS),
            "first at b 0, h 1, row 64, column 0; 512 of 3200; rows fill 1 tile of 64; all columns",
        ),
        (
            (0, 0, slice(0, 32), 5),
            "first at b 0, h 0, row 0, column 5; 32 of 3200; rows fill 1 tile of 32; columns only 5",
        ),
        ((0, 0, slice(7, 200, 64), 0), "rows are places [7] of tiles of 64; columns only 0"),
        ((0, 0, slice(None)), "rows all 200; all columns"),
        ((0, 0, [3, 4, 50]), "rows 3 to 50, 3 of them, in no tile's shape"),
        ((0, 0, slice(192, 200)), "rows fill 1 tile of 64"),  # the last tile, which the end cuts
    ],
)
def test_rows_and_columns(index, words):
    assert words in locate("out", wrong_at(*index), torch.zeros(SHAPE))


def test_results_without_columns():
    assert locate("lse", wrong_at(0, 0, ROWS)[..., 0], torch.zeros(SHAPE[:3])) == (
        "first at b 0, h 0, row 64; 64 of 400; rows fill 1 tile of 64; no NaN"
    )


def test_gradients_of_other_shapes():
    wrong = torch.tensor([[False, True], [True, True]])
    assert locate("sink", wrong, torch.zeros(2, 2)) == "first at [0, 1]; 3 of 4"


def test_nan_is_counted():
    got, wrong = torch.zeros(SHAPE), wrong_at(0, 0, ROWS)
    got[0, 0, 64] = torch.nan
    assert locate("out", wrong, got).endswith("; 8 NaN")
    assert locate("out", wrong, torch.full(SHAPE, torch.nan)).endswith("; all NaN")


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("out", slice(0, 64), "of 1 wrong tile rows 1 walk only masked tiles"),
        ("out", slice(64, 192), "of 2 wrong tile rows 2 walk full and masked tiles"),
        ("key", slice(128, 192), "of 1 wrong tile rows 1 walk only masked tiles"),
        ("key", slice(0, 64), "of 1 wrong tile rows 1 walk full and masked tiles"),
    ],
)
def test_the_tiles_that_wrong_rows_walk(name, rows, words):
    """Causal: a query's last tile is masked, those before it are full; for a key the first is masked."""
    layout = ab.Layout.build(ab.Causal(), 192, 192, form="tiles", tile=64)
    wrong = torch.zeros(1, 1, 192, 8, dtype=torch.bool)
    wrong[:, :, rows] = True
    assert words in locate(name, wrong, torch.zeros(wrong.shape), layout)

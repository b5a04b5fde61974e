"""Pictures for notebooks and by matplotlib: every cell is what the dense relation says."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import attnbias as ab
from attnbias.layouts.picture import KINDS, cells_of
from attnbias.testing import random_relation

LENGTHS = [(1, 1), (40, 97), (128, 128), (129, 70), (300, 171), (70, 1030)]
RELATIONS = [
    ab.Causal(),
    ab.Window(before=3) | ab.Global([0]),
    ab.Dilated(3, before=20),
    ab.Empty(),
    ab.Where(lambda b, h, q, k: (q * 7 + k * 3) % 5 == 0),
    ab.Causal() - ab.Window(before=70),
]


def blocks(dense, size):
    """Return the number of true pairs and of pairs in each square of this size, by loops over squares."""
    rows, columns = (range(0, length, size) for length in dense.shape)
    parts = [[dense[r : r + size, c : c + size] for c in columns] for r in rows]
    count = np.array([[int(part.sum()) for part in row] for row in parts])
    return count, np.array([[part.numel() for part in row] for row in parts])


def painted(html):
    """Read the cells that an SVG's paths paint, with their opacity."""
    _, _, columns, rows = map(int, re.search(r'viewBox="([^"]*)"', html)[1].split())
    grid = np.zeros((rows, columns))
    for runs, opacity in re.findall(r'<path d="([^"]*)" fill="#\w+" fill-opacity="([^"]*)"', html):
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", runs):
            row = grid[int(y), int(x) : int(x) + int(width)]
            assert len(row) == int(width) and not row.any()
            row[:] = float(opacity)
    return grid


@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
@pytest.mark.parametrize("form", ["tiles", "edges", "auto"])
@pytest.mark.parametrize("relation", RELATIONS, ids=repr)
def test_cells_of_a_layout_hold_their_share_of_its_pairs(relation, form, q_len, k_len):
    layout = ab.Layout.build(relation, q_len, k_len, form=form, tile=64)
    cells = cells_of(layout, 0)
    count, area = blocks(relation.dense(q_len, k_len), cells.size)
    assert max(q_len, k_len) <= 128 * cells.size
    np.testing.assert_array_equal(cells.share * area, count)
    np.testing.assert_array_equal(cells.kinds > 0, count > 0)
    of_edges = np.isin(cells.kinds, [KINDS.index("edges"), KINDS.index("edges and tile")])
    assert not of_edges.any() if form == "tiles" else form == "auto" or of_edges.sum() == (count > 0).sum()


def test_cells_of_several_tiles_hold_their_share():
    relation = ab.Window(before=300) | ab.Graph([[9000, 9001], [17, 17]], num_nodes=9100)
    cells = cells_of(ab.Layout.build(relation, 9100, tile=64), 0)
    assert cells.size == 128
    count, area = blocks(relation.dense(9100), 128)
    np.testing.assert_array_equal(cells.share * area, count)
    assert KINDS[cells.kinds[0, 70]] == "edges"
    assert KINDS[cells.kinds[10, 9]] == "full tile" and KINDS[cells.kinds[10, 10]] == "partial tile"


@pytest.mark.parametrize("seed", range(30))
def test_a_notebook_shows_the_pairs_of_any_relation(seed):
    relation = random_relation(seed, 1, batch=2, heads=2)
    html = relation._repr_html_()
    if html is None:  # one whose lengths cannot be guessed
        assert "Blocks" in repr(relation)
        return
    dense = relation.dense(
        *map(int, re.search(r"(\d+) queries \(down\) x (\d+) keys", html).groups()), batch=2, heads=2
    )
    first = dense if dense.dim() == 2 else dense[0, 0]
    assert max(first.shape) <= 128
    np.testing.assert_array_equal(painted(html), first.double().numpy())


def test_a_notebook_shows_a_relation_at_its_own_lengths_and_says_so():
    html = (ab.Documents.from_lengths([2, 3]) & ab.Causal())._repr_html_()
    assert "5 queries (down) x 5 keys (across), 0.36 of all pairs" in html
    assert "32 queries (down) x 32 keys" in ab.Causal()._repr_html_()
    bipartite = ab.Graph([[0, 1], [1, 0]], size=(7, 2))._repr_html_()
    assert "2 queries (down) x 7 keys" in bipartite
    by_head = ab.PerHead([ab.Full(), ab.Causal()])._repr_html_()
    assert "head 0 of 2" in by_head and (painted(by_head) == 1).all()


def test_a_notebook_falls_back_to_text_where_a_function_raises():
    table = torch.arange(20)
    assert ab.Where(lambda q, k: table[q] >= table[k])._repr_html_() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ab.Global([100])._repr_html_() is not None  # the guessed length is no mistake of the user's


def test_a_notebook_escapes_and_cuts_what_it_quotes():
    html = ab.Where(lambda q, k: q > k)._repr_html_()
    assert "<lambda>" not in html and "&lt;lambda&gt;" in html
    long = ab.Window(before=1) | ab.Prefix(2)
    for number in range(40):
        long = long | ab.Global([5 * number + 20])
    assert len(repr(long)) > 200 and len(re.search("<code[^>]*>(.*)</code>", long._repr_html_())[1]) < 200


def test_long_relations_are_shaded_in_a_page_of_bounded_size():
    points = torch.randint(3000, (2, 40_000), generator=torch.Generator().manual_seed(0))
    html = ab.Graph(points, num_nodes=3000)._repr_html_()
    shades = np.unique(painted(html))
    assert len(html) < 200_000 and len(shades) > 3 and shades.min() == 0 and shades.max() == 1
    assert shades[1] >= 0.4 and max(map(int, re.findall(r'(?:width|height)="(\d+)"', html))) <= 260
    assert ab.Graph(torch.zeros(2, 1).long(), num_nodes=1 << 20)._repr_html_() is None


def test_a_notebook_colours_a_layout_by_the_form_of_its_pairs():
    relation = ab.Causal() | ab.Graph([[300], [10]], num_nodes=320)
    html = ab.Layout.build(relation, 320, tile=64)._repr_html_()
    assert "Layout of 320 queries x 320 keys" in html
    for words in ("full tile", "partial tile", "edges", "10 full and 5 partial tiles of 64"):
        assert words in html
    cells = cells_of(ab.Layout.build(relation, 320, tile=64), 0)
    np.testing.assert_array_equal(painted(html) > 0, cells.kinds > 0)
    assert "group 0 of 2" in ab.PerHead([ab.Full(), ab.Causal()]).layout(70)._repr_html_()
    assert ab.Window(before=1).layout(1 << 20)._repr_html_() is None


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 0), (0, 5), (5, 0)])
def test_empty_lengths_are_drawn(q_len, k_len):
    layout = ab.Causal().layout(q_len, k_len)
    assert not painted(layout._repr_html_()).any()
    pytest.importorskip("matplotlib").use("Agg")
    assert layout.plot().get_title() == f"{q_len} queries x {k_len} keys"
    assert ab.Causal().plot(q_len, k_len).get_title() == "Causal()"


def test_plot_draws_pairs_with_integer_ticks_and_the_expression_as_title(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    relation = ab.Window(before=3) | ab.Global([0])
    axes = relation.plot(5, 9, "end")
    image = axes.images[0].get_array()
    np.testing.assert_array_equal(image[..., 3], relation.dense(5, 9, "end").double().numpy())
    assert axes.get_title() == repr(relation)
    for ticks in (axes.get_xticks(), axes.get_yticks()):
        assert len(ticks) > 2 and all(tick == int(tick) for tick in ticks)
    assert relation.plot(axes=axes, title="one") is axes and axes.get_title() == "one"
    layout = relation.layout(300)
    assert layout.plot(title="long").images[0].get_array().shape == (75, 75, 4)
    layout.picture(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")


def test_plot_draws_one_head_and_refuses_another():
    pytest.importorskip("matplotlib").use("Agg")
    relation = ab.PerHead([ab.Full(), ab.Causal()])
    for length in (6, 200):
        alpha = relation.plot(length, head=1).images[0].get_array()[..., 3]
        assert alpha[0, 0] > 0 and alpha[0, -1] == 0
        with pytest.raises(ValueError, match=r"head: wanted 0\.\.1, got 2"):
            relation.plot(length, head=2)


LAZY = """
import sys, attnbias
assert not {"matplotlib", "attnbias.layouts.html", "attnbias.layouts.plot"} & set(sys.modules)
sys.modules["matplotlib"] = None
assert "<svg" in attnbias.Causal()._repr_html_()
try:
    attnbias.Causal().plot(4)
except ImportError as error:
    print(error)
"""


def test_notebooks_need_no_matplotlib_and_plots_say_that_they_do():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "drawing needs matplotlib: pip install 'attnbias[plot]'"

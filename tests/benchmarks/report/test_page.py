"""The page of a run: what it holds, and its colours."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser

import pytest
from cases.benchmarks import whole_run

from attnbias.benchmarks.report import page, plots

to_hex = pytest.importorskip("matplotlib.colors").to_hex

VOID = {"meta", "br"}


class Tags(HTMLParser):
    """Checks that every tag is closed in its turn."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.words = [], {}, []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "a":
            self.links |= {dict(attrs)["id"]: dict(attrs)["href"]}

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def run():
    return whole_run()


@pytest.fixture(scope="module")
def drawn(run):
    return plots.draw_all(run)


@pytest.fixture(scope="module")
def text(run, drawn):
    return page.render(run, {name: plots.as_svg(figure) for name, figure in drawn.items()})


@pytest.fixture(scope="module")
def parsed(text):
    found = Tags()
    found.feed(text)
    assert found.open == []
    return found


def test_the_link_has_the_whole_run(parsed, run):
    kind, _, data = parsed.links["data"].partition(",")
    assert kind == "data:application/json;base64"
    assert json.loads(base64.b64decode(data)) == run


def test_versions_of_peers_are_shown(text):
    assert "<td>torch-geometric</td><td>2.8.1</td><td>PyG</td>" in text
    assert (
        "<td>torch</td><td>2.13.0</td><td>SDPA, mask; SDPA, chunks, mask kept; torch.sparse; SDPA; Flex</td>"
        in text
    )


def test_missing_peers_and_errors_say_why_without_a_pointer(parsed):
    for words in (
        "FA3 is not installed",
        "PyG knows only graphs <of nodes>",
        "knn@96: raised RuntimeError: <no> memory",
    ):
        assert words in parsed.words


def test_cards_say_what_was_compared(run):
    shown = dict(page.cards(run)[:2])
    assert shown == {
        "6.65x": "fastest of 6: window@4096, forward, vs SDPA, chunks, mask kept",
        "0.93x": "slowest of 6: causal@4096, forward, vs SDPA",
    }


def _schemes():
    """Return the variables of the light and of the dark scheme."""
    light, dark = page.CSS.read_text().split("@media (prefers-color-scheme: dark)")
    first, second = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in (light, dark))
    return {"light": first, "dark": first | second}


def test_every_colour_of_the_page_is_a_variable_of_both_schemes(text):
    schemes = _schemes()
    used = set(re.findall(r"var\(--([\w-]+)\)", text)) - {"filled"}
    assert used <= set(schemes["light"]) and set(plots.PALETTE) <= used
    assert {name: schemes["light"][name] for name in plots.PALETTE} == plots.PALETTE
    assert all(schemes["light"][name] != schemes["dark"][name] for name in plots.PALETTE)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 6 and not re.search(
        r"(fill|stroke): ?#\w{3,6}|(fill|stroke)='#", "".join(pictures)
    )


def _luminance(colour):
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out(scheme):
    """The ratios are those of WCAG: 4.5 for text, 3 for what has a label or a shape of its own beside it."""
    colours = _schemes()[scheme]

    def contrast(name, under):
        low, high = sorted(_luminance(colours[each]) for each in (name, under))
        return (high + 0.05) / (low + 0.05)

    texts = [(name, under) for name in ("ink", "soft", "blue", "wrong") for under in ("card", "back")]
    assert (
        min(contrast(*each) for each in (*texts, ("tag-ink", "tag"), ("card", "blue"), ("ink", "share")))
        >= 4.5
    )
    assert contrast("amber", "card") >= 3 and contrast("full", "well") >= 3


def test_plots_tell_curves_apart_without_colour(drawn):
    (bars,) = drawn["speed"].axes
    looks = {(to_hex(bar.get_facecolor()), bar.get_hatch()) for bar in bars.patches}
    assert looks == {(plots.BLUE, None), (plots.AMBER, "///")}
    for axes in (*drawn["length"].axes, *drawn["density"].axes):
        looks = [
            (line.get_linestyle(), line.get_marker()) for line in axes.lines if line.get_label()[0] != "_"
        ]
        assert len(looks) == len(set(looks)) >= 3


def test_no_point_is_cut_off(drawn):
    """The first point of a window, at 156 times, was above a fixed upper end."""
    for axes in drawn["density"].axes:
        low, high = axes.get_ylim()
        curves = [y for line in axes.lines if line.get_label()[0] != "_" for y in line.get_ydata()]
        assert low < min(curves) and 156 in [round(y) for y in curves] and max(curves) < high

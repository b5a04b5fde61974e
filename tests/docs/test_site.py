"""The documentation site: its navigation, its API pages, and what is generated or said twice."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator

import pytest
import readme_pictures
import support_page
from cases import ROOT
from cases.source import tree_of

import attnbias

DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text()
README = (ROOT / "README.md").read_text()
HOOK = tree_of(ROOT / "tools" / "docs_site" / "pages.py")
BRIDGES = ("flash_attn", "flex", "huggingface", "sdpa", "torchtitan", "varlen")
FOLDERS = ("nn", "nn.appendix", "recipes", "sharding", "structured", "symmetry", "testing")
FOLDERS = ("attnbias", *(f"attnbias.{name}" for name in (*FOLDERS, *(f"integrations.{x}" for x in BRIDGES))))
OPTIONAL = {"attnbias.integrations.pyg": "torch_geometric"}


def outside_pages() -> dict[str, str]:
    """Return the pages of the site that lie outside docs/: file of the repository to page."""
    for node in HOOK.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise AssertionError("tools/docs_site/pages.py has no PAGES")


def public_names(name: str) -> Iterator[str]:
    """Yield the public names of a module: ``__all__``, or else what it defines."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        yield from module.__all__
        return
    for each, value in vars(module).items():
        if not each.startswith("_") and getattr(value, "__module__", None) == name and callable(value):
            yield each


def test_navigation_has_every_page_once() -> None:
    nav = CONFIG.partition("\nnav:\n")[2].partition("\nvalidation:")[0]
    listed = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)", nav, re.MULTILINE)
    there = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted([*there, *outside_pages().values()])


def test_pages_from_outside_exist() -> None:
    assert [path for path in outside_pages() if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("setting", ["font: false", "omitted_files: warn", "anchors: warn"])
def test_site_fetches_nothing_and_warns_of_dead_links(setting: str) -> None:
    assert setting in CONFIG


def shown() -> dict[str, object]:
    """Return what the API pages show, by path."""
    found = {}
    for page in (DOCS / "api").glob("*.md"):
        for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            module, _, name = path.rpartition(".")
            if module not in OPTIONAL or importlib.util.find_spec(OPTIONAL[module]):
                found[path] = getattr(importlib.import_module(module), name)
    return found


@pytest.mark.parametrize("name", [*FOLDERS, *OPTIONAL])
def test_api_has_every_public_name(name: str) -> None:
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name])
    module, seen = importlib.import_module(name), list(shown().values())
    names = [each for each in public_names(name) if not inspect.ismodule(getattr(module, each))]
    assert names
    assert [each for each in names if not any(getattr(module, each) is one for one in seen)] == []


def test_support_matrix_is_what_the_backends_say() -> None:
    """If this fails: python tools/support_page.py."""
    assert support_page.PAGE.read_text() == support_page.make_page()


def test_support_matrix_asks_the_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    before = support_page.make_page()
    monkeypatch.setattr(
        attnbias.backends.rows, "why_not", lambda problem: ["mood: only on Sundays, got Monday"]
    )
    after = support_page.make_page()
    assert before != after and "no: only on Sundays |" in after


@pytest.mark.parametrize("path", readme_pictures.draw_all(), ids=lambda path: path.name)
def test_picture_of_the_readme_is_up_to_date(path) -> None:
    """If this fails: python tools/readme_pictures.py."""
    assert path.read_text() == readme_pictures.draw_all()[path]
    assert f"docs/pictures/{path.name}" in README


def test_rows_of_the_readme_are_those_of_the_benchmarks() -> None:
    for row in readme_pictures.read_rows():
        assert (
            f"| {row.label} | {row.time} | {row.peer} | **{row.ratio}** ({row.low} to {row.high}) |" in README
        )


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 100


def test_links_of_the_readme_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!https:)([^)#]+)", README) + re.findall(
        r'(?:src|srcset)="([^"]+)"', README
    ):
        assert (ROOT / link).exists(), link


def test_every_picture_is_linked() -> None:
    text = README + "".join(path.read_text() for path in DOCS.rglob("*.md"))
    pictures = [path for path in (DOCS / "pictures").rglob("*.*") if path.suffix in (".png", ".svg")]
    assert len(pictures) > 20 and [path.name for path in pictures if path.name not in text] == []


def test_versions_agree() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert attnbias.__version__ == version
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()

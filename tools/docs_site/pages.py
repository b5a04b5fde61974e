"""A hook of mkdocs: put pages and files from outside docs/ on the site, and mend what GitHub reads otherwise.

A link from a page to a file of the repository, such as ``../examples/train_gpt.py``, works on GitHub. Here
the file is copied to the site under ``files/``, or is a page of its own if ``PAGES`` names it. A link to a
file that does not exist stays as it is, and the strict build reports it.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

LOG = logging.getLogger("mkdocs.plugins.docs_site")
ROOT = Path(__file__).parent.parent.parent
PAGES = {  # file of the repository: page of the site
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/static/README.md": "static.md",
    "csrc/README.md": "csrc.md",
    "kernels/README.md": "kernels.md",
    "tools/README.md": "tools.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def target_of(link: str, page: str) -> str:
    """Return where a link of a page leads on the site; copy nothing yet."""
    source = SOURCES.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}" if (ROOT / path).is_file() else link


def mend_tables(text: str) -> str:
    r"""Write ``|`` for ``\|`` in the code of tables: Python-Markdown shows the backslash, GitHub needs it."""
    code = re.compile(r"`[^`\n]*`")
    lines = (
        code.sub(lambda found: found[0].replace(r"\|", "|"), line) if line.startswith("|") else line
        for line in text.split("\n")
    )
    return "\n".join(lines)


def convert(text: str, page: str) -> str:
    """Return the Markdown of a page with links for the site, relative to it."""

    def relative(found: re.Match[str]) -> str:
        target = target_of(found[1], page)
        return posixpath.relpath(target, posixpath.dirname(page) or ".") + (found[2] or "")

    return mend_tables(LINK.sub(relative, text))


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/, and every file that a page links to."""
    for page, source in SOURCES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    linked = set()
    for file in files.documentation_pages():
        for found in LINK.finditer(file.content_string):
            linked.add(target_of(found[1], file.src_uri))
    for uri in sorted(linked):
        if uri.startswith("files/"):
            path = ROOT / uri.removeprefix("files/")
            level = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri, abs_src_path=str(path), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Convert every page."""
    return convert(markdown, page.file.src_uri)


def on_page_content(html: str, page: Any, **_: Any) -> None:
    """Warn of a name that griffe took for a module: ``attnbias.attention`` is one, too."""
    for name in re.findall(r'doc-module">\s*<h2 id="([^"]+)"', html):
        LOG.warning("%s: %s is a module; name what is in it", page.file.src_uri, name)

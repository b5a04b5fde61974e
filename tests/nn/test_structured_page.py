"""docs/structured.md: its code runs, prints what its comments say, and its table is counted again."""

import contextlib
import io
import re

import pytest
import torch
from cases import ROOT

import attnbias as ab
from attnbias.nn import MultiLevelCache

PAGE = ROOT / "docs" / "structured.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
ROWS = re.findall(r"^\| ([\d, ]+).*?\| (None[\d, ]+) \| ([\d.]+) \| ([\d.]+) \|$", TEXT, re.MULTILINE)


def test_blocks_run_one_after_the_other():
    """What a comment after a print says is what it prints."""
    torch.manual_seed(0)
    printed, names = io.StringIO(), {}
    blocks = BLOCKS if _has_transformers() else BLOCKS[:-1]
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(block, names)
    said = re.findall(r"^print\(.*\)  # (.*?)(?:;.*)?$", "".join(blocks), re.MULTILINE)
    assert printed.getvalue().splitlines() == said and len(said) == 3
    assert len(BLOCKS) == 4 and "set_score" in BLOCKS[-1]


def _has_transformers():
    with contextlib.suppress(ImportError):
        import cases.huggingface  # noqa: F401 - imports transformers past the folder of the same name

        return True
    return False


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_shares_of_the_table_are_counted(row):
    ranks, widths = (eval(f"[{cell}]") for cell in row[:2])
    score, numbers = ab.MultiLevel(ranks, widths), 0
    for n in range(1, 8193):
        numbers += sum(r * (n % w if w else n) for r, w in zip(ranks, widths, strict=True))
    values = 64 * 8192 * 8193 // 2
    assert [f"{numbers / values:.3f}", f"{(numbers + values) / (2 * values):.3f}"] == list(row[2:])
    cache, tokens = MultiLevelCache(score), torch.zeros(1, 5000, 64)
    cache.attend(*[tokens[:, :3000]] * 3, ab.Window(before=1))
    cache.attend(*[tokens[:, 3000:]] * 3, ab.Window(before=1))
    held = sum(r * (5000 % w if w else 5000) for r, w in zip(ranks, widths, strict=True))
    assert cache.nbytes == 4 * (held + 64 * 5000)


def test_pages_link_to_it():
    assert len(ROWS) == 4
    for page in ("README.md", "docs/index.md", "docs/huggingface.md"):
        assert "structured.md)" in (ROOT / page).read_text()

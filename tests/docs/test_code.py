"""README.md, CONTRIBUTING.md and docs/: every block of Python runs, in the order of its page."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from cases import ROOT

import attnbias as ab

# Run by tests/recipes/test_page.py and tests/symmetry/test_paper_page.py.
ELSEWHERE = {"docs/recipes.md", "docs/paper.md"}
PAGES = [
    path
    for path in (
        "README.md",
        "CONTRIBUTING.md",
        *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")),
    )
    if path not in ELSEWHERE
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)

TENSORS = "import torch, attnbias as ab\nq, k, v = torch.randn(3, 2, 8, 64, 16)\n"
MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2))
"""
ONE_RANK = """
import os
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
"""
GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
MESH = """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
"""

# What a block takes from its reader, by page and the number of the block among those of Python.
GIVEN = {
    ("docs/coming-from.md", 0): TENSORS,
    ("docs/coming-from.md", 1): """
old = torch.nn.MultiheadAttention(512, 8, batch_first=True)
x, padding = torch.randn(1, 32, 512), torch.zeros(1, 32, dtype=torch.bool)
""",
    ("docs/coming-from.md", 3): """
from torch.nn.attention.flex_attention import create_block_mask
block_mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
""",
    ("docs/coming-from.md", 4): """
cu_q = cu_k = torch.tensor([0, 3, 8])
max_q = max_k = 5
""",
    ("docs/coming-from.md", 6): MODEL,
    ("docs/coming-from.md", 7): """
from types import SimpleNamespace
layer = SimpleNamespace(attention=SimpleNamespace())
titan = SimpleNamespace(layers={"0": layer})
""",
    ("docs/graphs.md", 0): """
pyg_layer = __import__("torch_geometric").nn.GATConv(16, 8, heads=4, edge_dim=3)
x, edge_attr = torch.randn(3, 16), torch.randn(4, 3)
""",
    ("docs/graphs.md", 1): ONE_RANK + "label, bias = torch.arange(3), torch.randn(4, 4)\n",
    ("docs/huggingface.md", 0): MODEL,
    ("docs/huggingface.md", 3): GROUP + MESH + "import torch\nids = torch.zeros(1, 256, dtype=torch.int64)\n",
    ("docs/scaling.md", 0): GROUP
    + "import torch\nids = torch.zeros(1, 131072)\nq, k, v = torch.randn(3, 1, 1, 131072, 8)\n",
    ("docs/tutorials/devices.md", 1): ONE_RANK
    + """
import torch
class Model(torch.nn.Embedding):
    def forward(self, ids, shard, positions):
        x = super().forward(ids)
        return ab.attention(x[:, None], x[:, None], x[:, None], shard)[:, 0]
model, lengths, total = Model(16, 16), [200, 56], 254
ids = targets = torch.randint(16, (1, 256))
""",
    ("CONTRIBUTING.md", 1): """
from dataclasses import dataclass
from attnbias.scores.terms import KernelTerm, Sizes, _distances
""",
}
# A machine of eight GPUs is one process here.
CHANGED = {("docs/scaling.md", 0): ('"cuda", (2, 4)', '"cpu", (1, 1)')}


class Block(NamedTuple):
    """A fenced block that is Python, or a session of it."""

    text: str
    is_session: bool


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of a page that can run."""
    return [
        Block(body, language not in {"python", "py"})
        for language, body in FENCE.findall(text)
        if language in {"python", "py"} or body.startswith(">>> ")
    ]


def run_session(text: str, known: dict[str, Any], name: str) -> None:
    """Run a session in these names, and check what it prints."""
    session = doctest.DocTestParser().get_doctest(text, known, name, name, 0)
    runner, printed = (
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE),
        io.StringIO(),
    )
    runner.run(session, out=printed.write, clear_globs=False)
    assert not runner.failures, printed.getvalue()
    known |= session.globs


def run_page(page: str, text: str) -> None:
    """Run the blocks of a page in one set of names."""
    known: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for block in blocks_of(text):
        if block.is_session:
            run_session(block.text, known, page)
            continue
        code = block.text.replace(*CHANGED.get((page, number), ("", "")))
        given = GIVEN.get((page, number), "")
        for part, name in ((given, f"given to {page}"), (code, f"{page}, block {number}")):
            exec(compile(part, name, "exec", dont_inherit=True), known)
        number += 1


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no process group and no variable behind."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)  # as transformers cannot read an empty one
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page: str) -> None:
    text = (ROOT / page).read_text()
    code = "".join(
        [*(each for (of, _), each in GIVEN.items() if of == page), *(b.text for b in blocks_of(text))]
    )
    for module in ("transformers", "torch_geometric"):
        if module in code:
            pytest.importorskip(module)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run_page(page, text)
    assert "<bound method" not in out.getvalue() and "<function" not in out.getvalue(), page


def test_given_names_are_of_blocks_that_exist() -> None:
    for page, number in {**GIVEN, **CHANGED}:
        blocks = [block for block in blocks_of((ROOT / page).read_text()) if not block.is_session]
        assert number < len(blocks), (page, number)
        assert CHANGED.get((page, number), ("", ""))[0] in blocks[number].text


@pytest.mark.parametrize(
    "text", ["```python\nraise KeyError\n```\n", "```\n>>> 1 + 1\n3\n```\n", "```py\nx = y\n```\n"]
)
def test_wrong_page_is_noticed(text: str) -> None:
    with pytest.raises((KeyError, AssertionError, NameError)):
        run_page("page.md", text)


def test_readme_shows_what_explain_prints() -> None:
    code, printed = re.search(
        r"```python\n(.*?)```\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    ).groups()
    out = io.StringIO()
    with contextlib.redirect_stdout(out), ab.use_backend(None):
        exec(code, {"__name__": "readme"})
    checker = doctest.OutputChecker()
    assert checker.check_output(printed, out.getvalue(), doctest.ELLIPSIS), out.getvalue()

"""docs/command.md is complete: subcommands, exit codes, environment variables."""

from __future__ import annotations

import ast
import re

from cases import ROOT
from cases.source import files, tree_of

from attnbias.__main__ import _parser

PAGE = (ROOT / "docs" / "command.md").read_text()
OURS = re.compile(r"\bATTNBIAS_[A-Z_]+\b")


def constants(tree: ast.Module) -> dict[str, str]:
    """Return the module's names of strings, such as VARIABLE."""
    return {
        ast.unparse(node.targets[0]): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def read_variables(tree: ast.Module) -> set[str]:
    """Return the environment variables that a module reads."""
    known, found = constants(tree), set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=inner, attr="get"), args=[key, *_]) if (
                ast.unparse(inner) == "os.environ"
            ):
                pass
            case ast.Call(func=ast.Attribute(attr="getenv"), args=[key, *_]):
                pass
            case ast.Subscript(value=inner, slice=key, ctx=ast.Load()) if ast.unparse(inner) == "os.environ":
                pass
            case _:
                continue
        if isinstance(key, ast.Constant):
            found.add(key.value)
        elif ast.unparse(key) in known:
            found.add(known[ast.unparse(key)])
    return found


def test_every_environment_variable_is_documented():
    sources = [path for _, path in files(ROOT, "attnbias", "kernels", "benchmarks")] + [ROOT / "setup.py"]
    found = set().union(*(read_variables(tree_of(path)) for path in sources))
    for _, path in files(ROOT, "csrc", suffixes=(".cpp", ".h")):
        found |= set(re.findall(r'getenv\("(\w+)"\)', path.read_text()))
    assert {"ATTNBIAS_CPU_LIBRARY", "ATTNBIAS_BACKEND", "ATTNBIAS_TRITON", "XDG_CACHE_HOME", "CXX"} <= found
    for path in sources:  # those that are read in some other way
        found |= set(OURS.findall(path.read_text()))
    documented = set(re.findall(r"`([A-Z_]+)`", PAGE))
    assert found <= documented, found - documented
    assert {name for name in documented if OURS.match(name)} <= found


def test_reading_a_variable_is_noticed():
    code = (
        'import os\nNAME = "A"\nos.environ.get(NAME)\nos.getenv("B")\nos.environ["C"]\nos.environ["D"] = "1"'
    )
    assert read_variables(ast.parse(code)) == {"A", "B", "C"}


def test_every_subcommand_and_exit_code_is_documented():
    choices = next(action.choices for action in _parser()._actions if action.dest == "command")
    assert all(f"`attnbias {name}" in PAGE for name in choices)
    assert set(re.findall(r"`attnbias (\w+)", PAGE)) - {"COMMAND"} == set(choices)
    codes = re.findall(r"^\| (\d+)(?:, (\d+))? \|", PAGE, re.MULTILINE)
    assert sorted(int(code) for pair in codes for code in pair if code) == [0, 1, 2, 3, 4, 130, 141]

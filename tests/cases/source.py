"""The project's source, read without running it: modules, their imports, functions and their sizes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

CPP = (".h", ".cpp")
PYTHON = (".py",)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def files(root: Path, *folders: str, suffixes: tuple[str, ...] = PYTHON) -> Iterator[tuple[str, Path]]:
    """Yield (path from the root, path) of every file of these folders."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes and "__pycache__" not in path.parts:
                yield path.relative_to(root).as_posix(), path


def modules(root: Path, packages: dict[str, str]) -> dict[str, Path]:
    """Return every module by its import name; ``packages`` maps folders to packages."""
    found = {}
    for folder, package in packages.items():
        for _, path in files(root, folder):
            parts = path.relative_to(root / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join(filter(None, (package, *parts)))] = path
    return found


class Import(NamedTuple):
    """One import: the module's full name, the line, and whether it is in a function or only for types."""

    target: str
    line: int
    is_lazy: bool
    is_for_types: bool


def imports(name: str, path: Path, known: dict[str, Path]) -> list[Import]:
    """Return a module's imports, each module once per line; ``known`` distinguishes modules from names."""
    package = (name if path.stem == "__init__" else name.rpartition(".")[0]).split(".")

    def visit(node: ast.AST, is_lazy: bool, is_for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(each.name, node.lineno, is_lazy, is_for_types) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(filter(None, (*above, node.module)))
            for each in node.names:
                inner = f"{base}.{each.name}"
                yield Import(inner if inner in known else base, node.lineno, is_lazy, is_for_types)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, is_lazy, True)
        else:
            is_lazy = is_lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, is_lazy, is_for_types)

    return list(dict.fromkeys(visit(tree_of(path), False, False)))


class Function(NamedTuple):
    """One function: its place, its lines without the docstring, its parameters without ``self``."""

    place: str
    name: str
    lines: int
    parameters: int
    is_kernel: bool  # Triton or C++
    is_launched: bool  # a kernel that no other kernel calls


def functions(root: Path, *folders: str) -> Iterator[Function]:
    """Yield every function of these folders, Python and C++."""
    found = [
        (name, node)
        for name, path in files(root, *folders)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
    ]
    kernels = [node for _, node in found if any("jit" in ast.unparse(each) for each in node.decorator_list)]
    called = {
        ast.unparse(call.func).rpartition(".")[2]
        for kernel in kernels
        for call in ast.walk(kernel)
        if isinstance(call, ast.Call)
    }
    for name, node in found:
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = sum(each.arg not in ("self", "cls") for each in given)
        first = node.body[0]
        words = 0 if ast.get_docstring(node) is None else (first.end_lineno or 0) - first.lineno + 1
        lines = (node.end_lineno or 0) - node.lineno + 1 - words
        is_kernel = node in kernels
        yield Function(
            f"{name}:{node.lineno}",
            node.name,
            lines,
            count,
            is_kernel,
            is_kernel and node.name not in called,
        )
    for name, path in files(root, *folders, suffixes=CPP):
        for line, function, lines, count in functions_of_cpp(path.read_text()):
            yield Function(f"{name}:{line}", function, lines, count, True, True)


NO_CODE = re.compile(
    r"//[^\n]*|/\*[\s\S]*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|^#(?:.*\\\n)*.*", re.M
)
SIGNATURE = re.compile(r"(\w+|operator\W{1,3})\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)[^()]*(?::[^:].*)?$", re.S)
CONTROL = ("if", "for", "while", "switch", "catch")


def functions_of_cpp(text: str) -> Iterator[tuple[int, str, int, int]]:
    """Yield (first line, name, lines, parameters) of C++ functions: braces after a list in parentheses."""
    text = NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    opened: list[tuple[int, re.Match[str] | None]] = []  # starts of the headers of open braces
    start = 0
    for found in re.finditer(r"[;{}]", text):
        at = found.start()
        if found[0] == "{":
            header = text[start:at]
            signature = None if "=" in header.partition("(")[0] else SIGNATURE.search(header)
            opened.append((at - len(header.lstrip()), signature))
        elif found[0] == "}" and opened:
            begin, signature = opened.pop()
            is_inside = any(outer for _, outer in opened)
            if signature and not is_inside and signature[1] not in CONTROL:
                parameters = re.sub(r"<[^<>]*>|\([^()]*\)", "", signature[2]).strip()
                first = text.count("\n", 0, begin) + 1
                lines = text.count("\n", 0, at) + 2 - first
                yield first, signature[1], lines, parameters.count(",") + 1 if parameters else 0
        start = at + 1

"""The house rules, checked on the source; a failure lists every place that breaks a rule.

The tables come first: the order of imports (``LAYERS``), its exceptions, and the limits.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cases import ROOT
from cases.source import CPP, PYTHON, files, functions, imports, modules, tree_of

PACKAGES = {  # folder: the package that it is installed as
    "attnbias": "attnbias",
    "kernels": "attnbias.kernels",
    "benchmarks": "attnbias.benchmarks",
    "tools": "",
}
FOLDERS = (*PACKAGES, "tests", "examples", "csrc")
OVERVIEWS = (*PACKAGES, "csrc", "tests/cases")  # folders whose modules are named in a docstring or README.md

# Lowest first. A module imports from its own row and lower ones, in functions too; types are exempt.
LAYERS = (
    (
        "attnbias.arguments",
        "attnbias.native",
        "attnbias.kernels",
        "ptxemu",
        "fakecuda",
        "recipe_pictures",
        "docs_site",
    ),
    ("attnbias.sets",),
    ("attnbias.layouts",),
    ("attnbias.relations",),  # above layouts, since Relation.layout builds one
    ("attnbias.recipes",),
    ("attnbias.scores",),
    ("attnbias.backends",),
    ("attnbias.op",),
    ("attnbias.attention",),
    ("attnbias.sharding",),
    ("attnbias.simplicial",),
    ("attnbias.testing", "attnbias.symmetry", "attnbias.structured"),
    ("attnbias.nn", "attnbias.integrations"),
    ("attnbias",),  # its __init__ only
    ("attnbias.benchmarks.cases",),
    ("attnbias.benchmarks.peers",),
    ("attnbias.benchmarks.measure",),
    ("attnbias.benchmarks.static",),
    ("attnbias.benchmarks.report",),
    ("attnbias.benchmarks.gate",),
    ("attnbias.benchmarks",),
    ("attnbias.report", "attnbias.command"),
    ("attnbias.__main__", "fakecuda.measure", "fakecuda.__main__", "readme_pictures", "support_page"),
)
_MADE_BY_METHOD = "graph.shard() makes a value of a higher row, which it imports when it is called"
ALLOWED: dict[tuple[str, str], str] = {  # (importer, imported): why it may import upward or in a cycle
    ("attnbias.relations.graph", "attnbias.sharding.graphs"): _MADE_BY_METHOD,
    ("attnbias.relations.graph", "attnbias.sharding.shard"): _MADE_BY_METHOD,
}
LEAVES = {"attnbias.kernels": ("torch", "triton")}  # import only these, the standard library and themselves
LAZY = (("attnbias.sets", "attnbias.layouts.tiles"), ("attnbias.relations", "attnbias.layouts.tiles"))

FILE_LINES = 500
FUNCTION_LINES, KERNEL_LINES = 80, 150
PARAMETERS, KERNEL_PARAMETERS, INNER_PARAMETERS = 14, 40, 12  # inner: functions that kernels call
GIVEN = {"flash_attn_varlen_func"}  # signatures of other libraries, which we cannot shorten
TOLERANCE = "attnbias/testing/tolerance.py"


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def layer_of(name: str) -> int | None:
    """Return the row of a module, that of its longest prefix; "attnbias" itself is not a prefix."""
    rows = {each: row for row, layer in enumerate(LAYERS) for each in layer}
    found = [each for each in rows if name == each or (each != "attnbias" and is_in(name, each))]
    return rows[max(found, key=len)] if found else None


# -- the rules: each yields a line for every place that breaks it ----------------------------------


def upward_imports(root: Path) -> Iterator[str]:
    known = modules(root, PACKAGES)
    for name, path in known.items():
        mine = layer_of(name)
        if mine is None:
            yield f"{name}: is in no row of LAYERS"
            continue
        for each in imports(name, path, known):
            place = f"{name}:{each.line}"
            for leaf, others in LEAVES.items():
                wanted = each.target.partition(".")[0] in (*others, *sys.stdlib_module_names)
                if is_in(name, leaf) and not (wanted or is_in(each.target, leaf)):
                    yield f"{place}: {leaf} may not import {each.target}"
            theirs = layer_of(each.target) if each.target in known else None
            if theirs is None or each.is_for_types or (name, each.target) in ALLOWED:
                continue
            if theirs > mine:
                yield f"{place}: imports {each.target}, which is above it"
            if not each.is_lazy and any(is_in(name, low) and each.target == high for low, high in LAZY):
                yield f"{place}: imports {each.target} at module level"


def import_cycles(root: Path) -> Iterator[str]:
    known = modules(root, PACKAGES)
    graph = {
        name: {
            each.target
            for each in imports(name, path, known)
            if each.target in known and not each.is_for_types and (name, each.target) not in ALLOWED
        }
        for name, path in known.items()
    }

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            fresh = graph[ahead.pop()] - seen
            seen |= fresh
            ahead += fresh
        return seen

    reach = {name: reached(name) for name in graph}
    cycles = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    for cycle in sorted(map(sorted, filter(None, cycles))):
        edges = [f"{a} -> {b}" for a in cycle for b in sorted(graph[a]) if b in cycle]
        yield "\n    ".join([f"{len(cycle)} modules:", *edges])


def long_files(root: Path) -> Iterator[str]:
    for name, path in files(root, *FOLDERS, suffixes=PYTHON + CPP):
        lines = len(path.read_text().splitlines())
        if lines > FILE_LINES:
            yield f"{name}: {lines} lines, at most {FILE_LINES}"


def long_functions(root: Path) -> Iterator[str]:
    for each in functions(root, *FOLDERS):
        most = KERNEL_LINES if each.is_kernel else FUNCTION_LINES
        if each.lines > most:
            yield f"{each.place}: {each.name} has {each.lines} lines, at most {most}"


def long_signatures(root: Path) -> Iterator[str]:
    for each in functions(root, *FOLDERS):
        inner = INNER_PARAMETERS if each.is_kernel else PARAMETERS
        most = KERNEL_PARAMETERS if each.is_launched else inner
        if each.parameters > most and each.name not in GIVEN:
            yield f"{each.place}: {each.name} has {each.parameters} parameters, at most {most}"


def tuned_tolerances(root: Path) -> Iterator[str]:
    for name, path in files(root, *FOLDERS):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"\batol=(?!`)", line) and name not in (TOLERANCE, "tests/test_house.py"):
                yield f"{name}:{number}: {line.strip()}"


def unnamed_modules(root: Path) -> Iterator[str]:
    for top in OVERVIEWS:
        paths = {path for _, path in files(root, top, suffixes=PYTHON + CPP)}
        for folder in sorted({path.parent for path in paths}):
            init, pages = folder / "__init__.py", {folder / "README.md", root / top / "README.md"}
            words = "\n".join(page.read_text() for page in pages if page.exists())
            if init.exists():
                words += ast.get_docstring(tree_of(init)) or ""
            for path in sorted(folder.iterdir()):
                is_module = path in paths or any(path in other.parents for other in paths)
                if is_module and not path.stem.startswith("__") and not re.search(rf"\b{path.stem}\b", words):
                    yield f"{path.relative_to(root)}: not named in its folder's docstring or README.md"


def undocumented_names(root: Path) -> Iterator[str]:
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    words = set(re.findall(r"\w+", "\n".join(page.read_text() for page in pages if page.exists())))
    for node in tree_of(root / "attnbias" / "__init__.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            missing = [name for name in ast.literal_eval(node.value) if name not in words]
            yield from (f"attnbias.{name}: neither README.md nor docs/ mentions it" for name in missing)


Rule = Callable[[Path], Iterator[str]]
RULES: tuple[Rule, ...] = (
    *(upward_imports, import_cycles, long_files, long_functions, long_signatures),
    *(tuned_tolerances, unnamed_modules, undocumented_names),
)


@pytest.mark.parametrize("rule", RULES)
def test_house_rules_hold(rule: Rule) -> None:
    broken = list(rule(ROOT))
    assert not broken, f"{rule.__name__}, {len(broken)} times:\n  " + "\n  ".join(broken)


# -- every rule can fail ---------------------------------------------------------------------------

FIFTEEN = ", ".join(f"a{i}" for i in range(15))
BAD: list[tuple[Rule, dict[str, str], str]] = [
    (
        upward_imports,
        {"attnbias/sets/a.py": "def f():\n    from ..op import call", "attnbias/op/call.py": ""},
        "attnbias.sets.a:2: imports attnbias.op.call, which is above it",
    ),
    (
        upward_imports,
        {"attnbias/sets/a.py": "from ..layouts.tiles import b", "attnbias/layouts/tiles.py": ""},
        "attnbias.sets.a:1: imports attnbias.layouts.tiles at module level",
    ),
    (upward_imports, {"kernels/a.py": "import numpy"}, "attnbias.kernels may not import numpy"),
    (upward_imports, {"attnbias/odds.py": ""}, "attnbias.odds: is in no row of LAYERS"),
    (
        import_cycles,
        {"attnbias/op/a.py": "from . import b", "attnbias/op/b.py": "def f():\n    from .a import g"},
        "2 modules:\n    attnbias.op.a -> attnbias.op.b\n    attnbias.op.b -> attnbias.op.a",
    ),
    (long_files, {"csrc/a.h": "\n" * 501}, "csrc/a.h: 501 lines, at most 500"),
    (long_functions, {"tests/a.py": "def f():\n" + "    pass\n" * 80}, "f has 81 lines, at most 80"),
    (long_functions, {"csrc/a.h": "void f() {\n" + "g();\n" * 149 + "}"}, "f has 151 lines, at most 150"),
    (
        long_functions,
        {"kernels/a.py": "@triton.jit\ndef f():\n" + "    pass\n" * 150},
        "f has 151 lines, at most 150",
    ),
    (long_signatures, {"attnbias/a.py": f"def f({FIFTEEN}): ..."}, "f has 15 parameters, at most 14"),
    (
        long_signatures,
        {"kernels/a.py": f"@triton.jit\ndef f({FIFTEEN}): ...\n@triton.jit\ndef g():\n    f()"},
        "f has 15 parameters, at most 12",
    ),
    (
        long_signatures,
        {"csrc/a.cpp": "struct S { void f(" + "int, " * 40 + "int) const { g(); } };"},
        "csrc/a.cpp:1: f has 41 parameters, at most 40",
    ),
    (tuned_tolerances, {"tests/a.py": "close(a, b, atol=1e-5)"}, "tests/a.py:1: close(a, b, atol=1e-5)"),
    (
        unnamed_modules,
        {"attnbias/op/__init__.py": '"""Has b."""', "attnbias/op/a.py": ""},
        "attnbias/op/a.py",
    ),
    (unnamed_modules, {"csrc/README.md": "a.h", "csrc/b/c.h": ""}, "csrc/b/c.h: not named"),
    (
        undocumented_names,
        {"attnbias/__init__.py": '__all__ = ["Causal", "Odd"]', "docs/a.md": "`Causal()`"},
        "attnbias.Odd: neither README.md nor docs/ mentions it",
    ),
]


@pytest.mark.parametrize(("rule", "tree", "words"), BAD, ids=[rule.__name__ for rule, _, _ in BAD])
def test_broken_rule_is_detected(rule: Rule, tree: dict[str, str], words: str, tmp_path: Path) -> None:
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert any(words in line for line in rule(tmp_path)), list(rule(tmp_path))

"""PTX text to a function: its parameters, variables, registers, labels and instructions.

It reads only what a compiler emits. A statement is an instruction; its operands are not interpreted here.
Names declared inside braces get the number of their scope, so that every name is unique afterwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .values import BITS, RAW, Array

_PARAMETER = re.compile(
    r"\.param\s+(?:\.align \d+\s+)?\.(\w+)(?:\s+\.ptr[^,\n]*?)?\s+([\w$]+)(\[\d+\])?\s*(?:,|$)", re.M
)
_VARIABLE = re.compile(
    r"(\.extern\s+|)\.(shared|local|global|const)\s+(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([\w$]+)\s*((?:\[\d*\])*)\s*(?:=\s*([^;]*))?;"
)
_TOKEN = re.compile(r"\s*(?:([{}])|([\w$.]+):(?!:)|([^;{}]*(?:\{[^}]*\}[^;{}]*)*);)", re.S)
_STATEMENT = re.compile(r"(?:@(!?)(%[\w.]+)\s+)?([a-z][\w.:]*)\s*(.*)$")


@dataclass(frozen=True, eq=False)
class Instruction:
    """One statement.

    Attributes:
        opcode: opcode with all modifiers, such as "ld.global.v4.b32".
        operands: text of each; braces or brackets enclose one operand.
        guard: the predicate register that must be true, or false after "!".
    """

    opcode: str
    operands: tuple[str, ...]
    guard: str | None = None

    @cached_property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def type(self) -> str:
        return self.opcode.rpartition(".")[2]

    def one_of(self, *names: str) -> str | None:
        """Return the modifier that is one of these, if any."""
        return next((part for part in self.modifiers if part in names), None)

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".strip()


class Parameter(NamedTuple):
    type: str
    name: str
    is_struct: bool


class Variable(NamedTuple):
    """A name in memory; ``data`` are the initial bytes of a global."""

    space: str  # shared, dynamic (the extern array after all shared variables), local or global
    offset: int
    data: Array


@dataclass
class Function:
    """One kernel of a module."""

    name: str
    parameters: list[Parameter]
    threads: int  # per CTA, if the text declares it
    cluster: int = 1  # CTAs of a cluster
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # number of the next instruction
    tables: dict[str, list[str]] = field(default_factory=dict)  # labels that a brx.idx may go to
    register_bits: dict[str, int] = field(default_factory=dict)  # by name, or by name without number
    variables: dict[str, Variable] = field(default_factory=dict)
    shared_bytes: int = 0  # static
    local_bytes: int = 0  # of a thread

    def bits(self, register: str, default: int = 32) -> int:
        """Return the declared width of a register."""
        family = re.sub(r"\d+$", "", register)
        return self.register_bits.get(register) or self.register_bits.get(family, default)


def parse(ptx: str, name: str | None = None) -> Function:
    """Read one kernel.

    Args:
        ptx: the text of a module.
        name: name of the kernel; None for the first one.

    Raises:
        KeyError: if there is no such kernel.
    """
    ptx = re.sub(r"//[^\n]*", "", ptx)
    wanted = re.escape(name) if name else r"[\w$]+"
    head = re.search(rf"\.entry\s+({wanted})\s*\((.*?)\)\s*(.*?)\{{", ptx, re.S)
    if head is None:
        raise KeyError(f"no kernel {name}; the module has {re.findall(r'.entry ([^(]*)', ptx)}")
    parameters = [Parameter(t, n, bool(size)) for t, n, size in _PARAMETER.findall(head[2].strip() + "\n")]
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head[3])
    cluster = re.search(r"\.reqnctapercluster\s+(\d+(?:\s*,\s*\d+)*)", head[3])
    ctas = math.prod(map(int, cluster[1].split(","))) if cluster else 1
    function = Function(head[1], parameters, int(threads[1]) if threads else 128, ctas)
    body = ptx[head.end() : _closing_brace(ptx, head.end())]
    outside = re.sub(r"\.extern\s+\.func.*?;", "", ptx, flags=re.S)
    outside = re.sub(r"^[^\n]*\.(?:func|entry)\b.*?^}", "", outside, flags=re.S | re.M)
    _declare_variables(function, outside)
    _declare_variables(function, body)
    body = re.sub(r"^\s*\.(loc|file|pragma)[^\n]*$", "", body, flags=re.M)
    _read_body(function, body)
    return function


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start + brace.start()
    raise ValueError("ptx: wanted a closing brace, got the end of the text")


def _declare_variables(function: Function, text: str) -> None:
    for extern, space, alignment, kind, name, dimensions, initial in _VARIABLE.findall(text):
        item = BITS[kind] // 8
        size = item * math.prod(int(n or 0) for n in re.findall(r"\[(\d*)\]", dimensions))
        nothing = np.zeros(0, np.uint8)
        if space == "shared" and extern:
            function.variables[name] = Variable("dynamic", 0, nothing)
        elif space == "shared":
            offset = _align(function.shared_bytes, int(alignment or item))
            function.variables[name] = Variable("shared", offset, nothing)
            function.shared_bytes = offset + size
        elif space == "local":
            offset = _align(function.local_bytes, 16)
            function.variables[name] = Variable("local", offset, nothing)
            function.local_bytes = _align(offset + size, 16)
        else:
            function.variables[name] = Variable("global", 0, _initial_bytes(initial, item, size))


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _initial_bytes(text: str, item: int, size: int) -> Array:
    data = np.zeros(max(size, 1), np.uint8)
    if re.fullmatch(r"[\s{}\w,-]*", text) and "0f" not in text.lower():
        numbers = [int(word.rstrip("U"), 0) for word in re.findall(r"-?\w+", text)]
        words = np.array([n & ((1 << 8 * item) - 1) for n in numbers], RAW[8 * item]).view(np.uint8)
        data[: len(words)] = words
    return data


class _Scope(NamedTuple):
    number: str
    names: dict[str, str]


def _read_body(function: Function, body: str) -> None:
    scopes, opened, label = [_Scope("", {})], 0, ""
    for brace, name, statement in _tokens(body):
        scope = scopes[-1]
        if brace == "{":
            opened += 1
            scopes.append(_Scope(f"s{opened}", dict(scope.names)))
        elif brace == "}":
            scopes.pop()
        elif name:
            label = name if name.startswith("$") else name + scope.number
            function.labels[label] = len(function.instructions)
        elif statement.startswith(".reg"):
            _declare_registers(function, statement, scope)
        elif statement.startswith(".branchtargets"):
            function.tables[label] = _split(statement.split(None, 1)[1])
        elif statement and not statement.startswith("."):
            function.instructions.append(_instruction(statement, scope))
    # A branch may come before its label, so the labels of its scope are known only now.
    function.instructions = [_resolve(ins, function) for ins in function.instructions]


def _tokens(body: str) -> Iterator[tuple[str, str, str]]:
    """Yield braces that open or close a scope, labels, and statements."""
    at = 0
    while body[at:].strip():
        found = _TOKEN.match(body, at)
        if found is None:
            raise ValueError(f"ptx: wanted a statement, got {body[at : at + 80]!r}")
        yield found[1] or "", found[2] or "", " ".join((found[3] or "").split())
        at = found.end()


def _declare_registers(function: Function, statement: str, scope: _Scope) -> None:
    _, kind, names = statement.split(None, 2)
    for name in _split(names):
        plain = name.partition("<")[0]
        if not plain.startswith("%"):
            scope.names[plain] = f"%{scope.number}{plain}"
        function.register_bits[scope.names.get(plain, plain)] = BITS.get(kind[1:], 32)


def _instruction(statement: str, scope: _Scope) -> Instruction:
    for name, unique in scope.names.items():
        statement = re.sub(rf"(?<![\w%.:]){re.escape(name)}(?![\w:])", unique, statement)
    found = _STATEMENT.match(statement)
    if found is None:
        raise ValueError(f"ptx: wanted a statement, got {statement!r}")
    negated, guard, opcode, operands = found.groups()
    target = _split(operands)
    if opcode.startswith("bra") and not opcode.startswith("brev") and not target[0].startswith("$"):
        target.append(target[0] + scope.number)
    return Instruction(opcode, tuple(target), f"{negated}{guard}" if guard else None)


def _resolve(ins: Instruction, function: Function) -> Instruction:
    if ins.name != "bra":
        return ins
    label = next(name for name in reversed(ins.operands) if name in function.labels)
    return Instruction(ins.opcode, (label,), ins.guard)


def _split(text: str) -> list[str]:
    """Split operands at the commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]

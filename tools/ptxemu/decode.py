"""Instructions to steps: functions that run one instruction on all lanes of a group.

Each family of instructions has a module whose decoders are registered by opcode::

    @instruction("shl")
    def _shl(ins: Instruction, code: Decoder) -> Step: ...

A decoder reads the text once and returns a ``Step``, which is called with the group and the mask of active
lanes. Operands become *sources*: functions from the group to values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np

from .parse import Function, Instruction
from .state import LOCAL, Group
from .values import BITS, NUMPY, RAW, Array, Mask, constant, raw

Step: TypeAlias = Callable[[Group, Mask], None]
Source: TypeAlias = Callable[[Group], Array]
Handler: TypeAlias = "Callable[[Instruction, Decoder], Step | None]"

_HANDLERS: dict[str, Handler] = {}

_SPECIAL: dict[str, Source] = {
    **{f"%tid.{axis}": lambda g, i=i: g.thread_index(i) for i, axis in enumerate("xyz")},  # type: ignore[misc]
    **{f"%ctaid.{axis}": lambda g, i=i: g.cta_index(i) for i, axis in enumerate("xyz")},  # type: ignore[misc]
    **{f"%ntid.{axis}": lambda g, i=i: constant(g.launch.block[i], 32) for i, axis in enumerate("xyz")},  # type: ignore[misc]
    **{f"%nctaid.{axis}": lambda g, i=i: constant(g.launch.grid[i], 32) for i, axis in enumerate("xyz")},  # type: ignore[misc]
    "%laneid": lambda g: g.lane,
    "%warpid": lambda g: g.thread >> np.uint32(5),
    "%lanemask_lt": lambda g: (np.uint32(1) << g.lane) - np.uint32(1),
    "%lanemask_eq": lambda g: np.uint32(1) << g.lane,
    "%dynamic_smem_size": lambda g: constant(g.launch.dynamic_shared_bytes, 32),
    "%clusterid.x": lambda g: g.cta_index(0),
    "%cluster_ctarank": lambda _: constant(0, 32),
    "%cluster_nctarank": lambda _: constant(1, 32),
    "%smid": lambda _: constant(0, 32),
    "%nsmid": lambda _: constant(1, 32),
    "%clock": lambda _: constant(0, 32),
    "%clock64": lambda _: constant(0, 64),
    "%globaltimer": lambda _: constant(0, 64),
}


class Unsupported(NotImplementedError):
    """An instruction, or a form of it, that the emulator does not know."""


def instruction(*prefixes: str) -> Callable[[Handler], Handler]:
    """Register a decoder for opcodes that start with one of these; the longest match wins."""

    def register(handler: Handler) -> Handler:
        for prefix in prefixes:
            assert prefix not in _HANDLERS, prefix
            _HANDLERS[prefix] = handler
        return handler

    return register


def decode(ins: Instruction, code: Decoder) -> Step | None:
    """Return the step of an instruction, or None if there is nothing to do."""
    ends = [len(ins.opcode), *(m.start() for m in reversed([*re.finditer(r"\.|::", ins.opcode)]))]
    handler = next((_HANDLERS[ins.opcode[:end]] for end in ends if ins.opcode[:end] in _HANDLERS), None)
    if handler is None:
        raise Unsupported(str(ins))
    try:
        return handler(ins, code)
    except Unsupported:
        raise
    except (KeyError, ValueError, IndexError, StopIteration) as error:
        raise Unsupported(f"{ins}: {error!r}") from error


@dataclass(frozen=True)
class Address:
    """An address operand, [register + offset]."""

    base: Source
    offset: int

    def __call__(self, group: Group, bias: int = 0) -> Array:
        """Return the address of each lane, plus ``bias``."""
        return group.wide(self.base(group)).astype(np.int64) + (self.offset + bias)


class Decoder:
    """The context for decoding a function: its registers' numbers and its parameters' places."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.registers: dict[str, int] = {}
        self.parameters = {parameter.name: i for i, parameter in enumerate(function.parameters)}
        self._read: set[str] | None = None

    def register(self, name: str) -> int:
        if not name.startswith("%"):
            raise Unsupported(f"register: wanted a name that starts with %, got {name!r}")
        return self.registers.setdefault(name, len(self.registers))

    def zeros(self) -> list[Array]:
        """Return the registers before the first instruction; PTX allows reading undefined ones."""
        return [constant(0, self.function.bits(name)) for name in self.registers]

    def is_read(self, name: str) -> bool:
        """Return whether any instruction may read a register, so that its value matters."""
        if self._read is None:
            self._read = set()
            for ins in self.function.instructions:
                reads_first = ins.name in ("st", "red") or ins.operands[:1] == () or ins.operands[0][0] == "["
                operands = ins.operands if reads_first else ins.operands[1:]
                self._read.update(re.findall(r"%[\w.]+", " ".join([*operands, ins.guard or ""])))
        return name in self._read

    # ---- operands

    def source(self, text: str, kind: str = "b32") -> Source:
        """Return an operand as values of a PTX type (``pred`` for predicates); b-types are raw bits."""
        if text.startswith("!"):
            plain = self.source(text[1:], kind)
            return lambda group: ~plain(group)
        view = NUMPY.get(kind)  # formats that numpy lacks stay raw
        bits = BITS[kind]
        if text.startswith("%"):
            return self._register_source(text, view)
        if text in self.parameters:
            i = self.parameters[text]
            return lambda group: group.launch.parameters[i]
        if text.partition("+")[0] in self.function.variables:
            return self._variable_source(text, bits)
        if re.match(r"0[fFdD][0-9a-fA-F]+$", text):
            value = constant(int(text[2:], 16), 32 if text[1] in "fF" else 64)
        else:
            value = constant(int(text.rstrip("U"), 0), 64)
            value = value != 0 if bits == 1 else value.astype(RAW[bits])
        fixed = np.asarray(value if view is None else value.view(view))
        return lambda group: fixed

    def _register_source(self, name: str, view: Any) -> Source:
        special = _SPECIAL.get(name)
        if special is not None:
            return special if view in (None, np.uint32, np.uint64) else lambda g: special(g).view(view)
        i = self.register(name)
        if view is None or np.dtype(view).kind in "bu":
            return lambda group: group.registers[i]
        return lambda group: group.registers[i].view(view)

    def _variable_source(self, text: str, bits: int) -> Source:
        name, _, more = text.partition("+")
        variable, offset = self.function.variables[name], int(more or 0)
        if variable.space == "global":
            return lambda group: constant(group.launch.variables[name] + offset, bits)
        if variable.space == "dynamic":
            return lambda group: constant(group.launch.dynamic_shared + offset, bits)
        start = LOCAL if variable.space == "local" else 0
        fixed = constant(start + variable.offset + offset, bits)
        return lambda group: fixed

    def sources(self, texts: Sequence[str], kind: str = "b32") -> list[Source]:
        return [self.source(text, kind) for text in texts]

    def predicate(self, text: str) -> Source:
        return self.source(text, "pred")

    def address(self, text: str) -> Address:
        """Return the address of an operand, [register + offset] or other contents of the brackets."""
        inside = text.strip().removeprefix("[").removesuffix("]").strip()
        found = re.match(r"([%\w$.]+)\s*(?:\+?\s*(-?\s*\w+))?$", inside)
        if found is None:
            raise Unsupported(f"address {text}")
        offset = int(found[2].replace(" ", ""), 0) if found[2] else 0
        return Address(self.source(found[1], "b64"), offset)

    @staticmethod
    def vector(text: str) -> list[str]:
        """Return the registers in braces, or the only one."""
        return [part.strip() for part in text.strip().removeprefix("{").removesuffix("}").split(",")]

    # ---- steps

    def assign(self, target: str, value: Callable[[Group], Array]) -> Step:
        """Return a step that writes a value to a register; "_" discards it."""
        if target == "_":
            return lambda group, mask: None
        i = self.register(target)
        return lambda group, mask: group.write(i, raw(value(group)), mask)

    def assign_all(self, targets: Sequence[str], values: Callable[[Group, Mask], Sequence[Array]]) -> Step:
        """Return a step that writes several results, each to a register."""
        numbers = [None if target == "_" else self.register(target) for target in targets]

        def step(group: Group, mask: Mask) -> None:
            for i, value in zip(numbers, values(group, mask), strict=False):
                if i is not None:
                    group.write(i, value, mask)

        return step

    def elementwise(self, target: str, function: Callable[..., Array], *sources: Source) -> Step:
        """Return a step that writes a function of the operands, lane by lane."""
        i = self.register(target)
        if len(sources) == 1:
            (a,) = sources
            return lambda group, mask: group.write(i, raw(function(a(group))), mask)
        if len(sources) == 2:
            a, b = sources
            return lambda group, mask: group.write(i, raw(function(a(group), b(group))), mask)
        a, b, c = sources
        return lambda group, mask: group.write(i, raw(function(a(group), b(group), c(group))), mask)


def refuse(ins: Instruction) -> NoReturn:
    raise Unsupported(str(ins))

"""An extension of griffe, which reads the docstrings of the API pages without importing the library.

It says what griffe cannot know: a subclass of ``Relation`` is a dataclass without a decorator;
``**options`` are the fields of ``Options``; a section may be called ``Example``; roles of Sphinx are names.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

OPTIONS = "op.problem.Options"  # the keyword arguments that several functions take as **options
DEFAULTS = "op.problem.DEFAULTS"
BASE = "attnbias.relations.relation.Relation"
MARKER = "integer"  # attnbias.relations.value.integer(least=..., default=...) declares a field
ROLE = re.compile(r":\w+:`~?\.?([^`]+)`")


def default_of(field: griffe.Attribute) -> Any:
    """Return the default of a field, None if it has none."""
    value = field.value
    if isinstance(value, griffe.ExprCall) and str(value.function) == MARKER:
        named = {each.name: each.value for each in value.arguments if isinstance(each, griffe.ExprKeyword)}
        return named.get("default")
    return value


def is_relation(cls: griffe.Class) -> bool:
    """Return whether a class is a subclass of ``Relation``."""
    return any(base.path == BASE for base in cls.mro())


def parameters_of(cls: griffe.Class) -> list[griffe.Parameter]:
    """Return the parameters of the ``__init__`` that the dataclass makes."""
    found = {}
    for base in [*(each for each in reversed(cls.mro()) if is_relation(each)), cls]:
        for field in base.members.values():  # its own: attributes has those of Relation as well
            is_field = isinstance(field, griffe.Attribute) and "property" not in field.labels
            if is_field and field.annotation is not None and not field.name.startswith("_"):
                found[field.name] = griffe.Parameter(
                    field.name,
                    annotation=field.annotation,
                    kind=griffe.ParameterKind.positional_or_keyword,
                    default=default_of(field),
                )
    return list(found.values())


class Docstrings(griffe.Extension):
    """Read our docstrings and relations as they are meant."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Give every relation the ``__init__`` of its fields, and functions their options by name."""
        if pkg.name == "attnbias":
            known = pkg[DEFAULTS].value
            defaults = {ast.literal_eval(str(k)): v for k, v in zip(known.keys, known.values, strict=True)}
            only = griffe.ParameterKind.keyword_only
            self._options = [
                griffe.Parameter(
                    each.name, annotation=each.annotation, kind=only, default=defaults[each.name]
                )
                for each in pkg[OPTIONS].attributes.values()
            ]
            self._visit(pkg)

    def _visit(self, scope: griffe.Module | griffe.Class) -> None:
        for member in list(scope.members.values()):
            if member.is_alias:
                continue
            if isinstance(member, griffe.Function):
                self._name_options(member)
            is_bare = isinstance(member, griffe.Class) and "__init__" not in member.members
            if is_bare and is_relation(member):
                self._add_init(member)
            if isinstance(member, griffe.Module | griffe.Class):
                self._visit(member)

    def _name_options(self, function: griffe.Function) -> None:
        last = list(function.parameters)[-1:]
        documented = function.docstring is not None and "**options" in function.docstring.value
        if last and str(last[0].annotation) == "Unpack[Options]" and not documented:
            del function.parameters[last[0].name]
            for each in self._options:
                function.parameters.add(each)

    def _add_init(self, cls: griffe.Class) -> None:
        self_ = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        made = griffe.Parameters(self_, *parameters_of(cls))
        cls.set_member("__init__", griffe.Function("__init__", parameters=made, parent=cls))

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring for griffe's parser of Google's style."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)  # a literal block follows
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)

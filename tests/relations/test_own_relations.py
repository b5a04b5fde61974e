"""User-defined relations, and how relations compare."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import types

import numpy as np
import pytest
import torch
from cases import ROOT

import attnbias as ab
from attnbias.relations import parse
from attnbias.relations.recipe import restore


class Knight(ab.Relation):
    """Keys two before or one after."""

    def related(self, q, k, b=None, h=None):
        return (q - k == 2) | (k - q == 1)


class Leap(ab.Relation):
    """Keys at a distance before, for allowed positions."""

    distance: int
    allowed: torch.Tensor

    def related(self, q, k, b=None, h=None):
        return (q - k == self.distance) & torch.isin(q, self.allowed.to(q.device))


def test_a_new_relation_needs_only_its_definition():
    assert Knight().picture(3, 3) == ".#.\n..#\n#.."
    layout = ab.Layout.build(Knight() | ab.Graph([[0], [0]], num_nodes=3), 3, 3)
    assert layout.to_dense().sum() == 4


def test_new_relation_is_a_value_like_any_other():
    """Without a private decorator it had no key, and compiled calls did not find it."""
    leap = Leap(2, torch.tensor([2, 3]))
    assert leap == Leap(2, torch.tensor([2, 3])) != Leap(2, torch.tensor([2, 4]))
    assert repr(leap) == "Leap(distance=2, allowed=[2, 3])"
    assert parse("Knight() & Window(before=2)") == Knight() & ab.Window(before=2)
    mixed = (leap | Knight()) & ab.Causal()
    for again in (pickle.loads(pickle.dumps(mixed)), restore(mixed.recipe.text, mixed.recipe.data)):
        assert again == mixed and torch.equal(again.dense(5, 5), mixed.dense(5, 5))
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    compiled = torch.compile(ab.attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, mixed), ab.attention(q, k, v, mixed))


class Holds(ab.Relation):
    """A relation that depends on an object of any kind."""

    held: object

    def related(self, q, k, b=None, h=None):
        return (q - k) % 3 == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(2000), np.where(np.arange(2000) == 999, 0, np.arange(2000))),
        (True, 1),
        ([torch.tensor([1.00001])], [torch.tensor([1.00002])]),
        ({"a": 1}, {"a": 2}),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1], dtype=torch.int16)),
    ],
    ids=["array", "bool", "tensors", "dict", "bfloat16"],
)
def test_relations_with_different_content_differ(one, other):
    """Fields that are not tensors were compared by their repr, which abbreviates."""
    assert Holds(one) != Holds(other) and Holds(one) == Holds(copy.deepcopy(one))
    assert len({Holds(one), Holds(other)}) == 2
    q, k, v = torch.randn(3, 1, 1, 7, 4)
    compiled = torch.compile(ab.attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, Holds(one)), ab.attention(q, k, v, Holds(one)))


def test_inconsistent_class_raises():
    with pytest.raises(TypeError, match=r"Odd: related\(\) is overridden and Window\._bind\(\) is not"):

        class Odd(ab.Window):
            def related(self, q, k, b=None, h=None):
                return q == k

    class Hidden(ab.Relation):
        def __init__(self, reach):
            object.__setattr__(self, "reach", reach)
            self.__post_init__()

        def related(self, q, k, b=None, h=None):
            return q - k == self.reach

    with pytest.raises(TypeError, match="Hidden: wanted every attribute declared as a field, got reach"):
        Hidden(3)


def test_a_class_made_in_a_function_does_not_leave_the_process():
    """Another process may have another class of that name."""

    class Local(ab.Relation):
        def related(self, q, k, b=None, h=None):
            return q == k

    assert not Local().recipe.is_portable and Knight().recipe.is_portable


def test_documents_with_an_empty_batch():
    layout = ab.Documents(torch.zeros(0, 8, dtype=torch.int64)).layout(8, 8)
    assert layout.to_dense().sum() == 0
    assert ab.attention(*torch.zeros(3, 0, 2, 8, 4), layout).shape == (0, 2, 8, 4)


def test_the_example_in_contributing_works_as_written(monkeypatch):
    """Its relation had to be registered in a list that the guide did not mention, and did not compile."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "class Half" in block)
    module = types.ModuleType("half")
    monkeypatch.setitem(sys.modules, "half", module)
    exec(code, vars(module))
    half = module.Half(least=1)
    assert half.picture(4, 4) == "#...\n#...\n##..\n##.."
    assert parse("Half(least=1)") == restore(*half.recipe[:2]) == half
    assert ab.Layout.build(half, 200, 200).to_dense().equal(half.dense(200, 200))
    with pytest.raises(ValueError, match="least: wanted at least 0, got -1"):
        module.Half(-1)

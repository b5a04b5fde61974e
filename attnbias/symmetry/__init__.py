"""The theory of relations, computed: their properties, their order by inclusion, and their symmetries.

A relation among n tokens is a directed graph with loops. What attention over it can tell apart follows from
that graph: a permutation of the tokens that maps it to itself passes through the layer, and no other does.
"""

from .groups import Automorphisms, automorphisms, equivariance
from .inclusion import Hierarchy, hierarchy, is_within
from .properties import Properties, is_translation_invariant, properties

__all__ = [
    "Automorphisms",
    "Hierarchy",
    "Properties",
    "automorphisms",
    "equivariance",
    "hierarchy",
    "is_translation_invariant",
    "is_within",
    "properties",
]

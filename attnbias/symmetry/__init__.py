"""The theory of relations, computed: their properties, their order by inclusion, and their symmetries.

A relation among n tokens is a directed graph with loops. That graph decides what attention can distinguish: a
permutation of the tokens commutes with the layer if and only if it maps the graph to itself.

Modules: ``properties`` (reflexive, transitive, acyclic, ...), ``inclusion`` (the order of relations, and of
mechanisms), ``groups`` (automorphisms, and how far a layer is from commuting with a permutation). Those about
the paper: ``claims`` (its statements as checks), ``tables`` (its tables and slips), ``figures``, ``theory``
(the report of ``attnbias theory``). A new claim is a function in the module of ``claims`` where it fits, with
the decorator ``@CLAIMS.add``.
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

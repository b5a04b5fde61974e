"""Tools that test the library; use them to test code that calls it.

One comparison and its callers. ``tolerance`` holds the rule that every comparison follows, ``textbook`` the
plain attention it measures against, ``inputs`` tensors surrounded by NaN, ``draw`` random relations and
problems. ``compare`` runs a call and the textbook on the same numbers, gradients included, and applies the
rule. Its callers are ``verify`` (``attnbias.verify``), ``soak`` (``attnbias verify --random``), ``checklist``
(``attnbias verify``) and the benchmarks, which check each case before they time it. ``shipped`` holds the
checks of the kernels as they are shipped, with which a GPU starts; ``built`` lists the kernels that were
compiled, and ``locate`` says where in a result wrong numbers sit.

Import the names below from here. To compare a further result, add it to ``compare``; to draw a further
relation or score term, add it to ``draw``; to check a further kernel by name, add it to ``checklist``.
"""

from .draw import Seed, as_rng, random_relation
from .inputs import GUARD, lengths, make_inputs
from .textbook import eager
from .tolerance import assert_no_worse, magnitudes

__all__ = [
    "GUARD",
    "Seed",
    "as_rng",
    "assert_no_worse",
    "eager",
    "lengths",
    "magnitudes",
    "make_inputs",
    "random_relation",
]

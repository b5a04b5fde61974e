"""The paper's statements as checks of a backend, under the paper's numbers, and a few of our own.

The paper is "Relational inductive biases on attention mechanisms" (Mijangos et al.).

Modules: ``claim`` (the record), ``measure`` (tokens, tolerances, permutations, the relation that a backend
assumes), ``definitions``, ``relations`` (Theorems 1 to 4), ``symmetries`` (Theorems 5 to 8), ``beyond``
(not in the paper). A new claim is a function with the decorator ``@CLAIMS.add``, in the paper's order; give
it relations for which its check must fail.
"""

from . import beyond, definitions, relations, symmetries
from .claim import Attend, Check, Claim, Claims, Reading

PARTS = {
    "What an attention layer is": definitions.CLAIMS,
    "The relation that each mechanism assumes": relations.CLAIMS,
    "The permutations with which each mechanism commutes": symmetries.CLAIMS,
    "Beyond the paper": beyond.CLAIMS,
}
CLAIMS = [claim for part in PARTS.values() for claim in part]

__all__ = ["CLAIMS", "PARTS", "Attend", "Check", "Claim", "Claims", "Reading"]

"""Tables 1 and 2 of the paper, with what is computed beside its words, and its slips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..relations import Bipartite, Causal, Full, Graph, Neighbors, Relation, Window
from .claims.measure import PREVIOUS, TOKENS
from .groups import Automorphisms, automorphisms
from .properties import Properties, has_only_translations, properties


@dataclass(frozen=True)
class Mechanism:
    """A row of Table 1: the paper's words, and a relation among ``TOKENS`` tokens to compute with."""

    name: str
    relations: str  # the paper's three other columns
    symmetry: str
    data: str
    relation: Relation
    example: str  # the relation in words

    @property
    def properties(self) -> Properties:
        """Properties of the relation."""
        return properties(self.relation, TOKENS)

    @property
    def group(self) -> Automorphisms:
        """Symmetries of the relation among the tokens."""
        return automorphisms(self.relation, TOKENS)

    @property
    def is_of_translations(self) -> bool:
        """Whether the symmetries of the same relation on all integers are exactly the translations."""
        is_by_position = self.relation.lengths == (None, None)
        return is_by_position and has_only_translations(self.relation, TOKENS)


# The carbon atoms of para-xylene: a ring of six, with one more at opposite atoms.
_BONDS = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 3], [1, 2, 3, 4, 5, 0, 6, 7]])
XYLENE = Graph(torch.cat((_BONDS, _BONDS.flip(0)), 1), num_nodes=TOKENS)
_THREE = [[0, 3, 5], [1, 0, 6], [2, 7, 4], [3, 1, 2], [4, 6, 0], [5, 2, 7], [6, 5, 1], [7, 4, 3]]
NEAREST = Neighbors(torch.tensor(_THREE))

TABLE_1 = (  # the paper's order, "from the most general to the most specific"
    Mechanism(
        "graph",
        "depends on the data",
        "dynamic",
        "with graph structure for each instance",
        XYLENE,
        "an instance, the bonds of the eight carbon atoms of xylene",
    ),
    Mechanism(
        "sparse",
        "arbitrary",
        "arbitrary",
        "with specific graph relationships",
        NEAREST,
        "three chosen keys for each of eight tokens",
    ),
    Mechanism("self", "fully connected", "permutations", "relational or bidirectional", Full(), "Full()"),
    Mechanism("masked", "previous elements", "translation", "sequential", Causal(), "Causal()"),
    Mechanism(
        "strided",
        "p previous elements",
        "translation",
        "bounded sequential",
        Window(before=PREVIOUS),
        f"Window(before={PREVIOUS})",
    ),
    Mechanism(
        "encoder-decoder",
        "bipartition",
        "block system",
        "partitional",
        Bipartite(TOKENS // 2),
        f"Bipartite({TOKENS // 2})",
    ),
)


class Model(NamedTuple):
    """A row of Table 2, and how the model runs here."""

    name: str
    attention: str
    uses: str
    here: str


_ATTACH = "attnbias.integrations.huggingface.attach"
TABLE_2 = (
    Model(
        "GAT",
        "graph",
        "classifying nodes, clustering, recommendation, 3D models",
        "attnbias.integrations.pyg.GATConv; its score is additive, not a dot product",
    ),
    Model("BERT", "self", "sentiment analysis, classifying text, answering questions", _ATTACH),
    Model(
        "GPT",
        "masked",
        "generating text, translation, summaries; generative pretraining on many tasks without labels",
        _ATTACH,
    ),
    Model(
        "Unlimiformer",
        "sparse",
        "analysing and classifying text, language processing; long sequences with limited resources",
        "attnbias.integrations.huggingface.NearestKeys",
    ),
    Model(
        "ViT",
        "strided",
        "classifying images, detecting objects, segmentation; patterns in space by position and by content",
        f"{_ATTACH}; patch_neighborhood there relates near patches, the original model relates all",
    ),
    Model(
        "T5", "encoder-decoder", "translation, summaries, generating text; training on many tasks", _ATTACH
    ),
)


class Slip(NamedTuple):
    """A sentence of the paper that does not hold as printed, and what does; ``claim`` checks it, if any."""

    place: str
    printed: str
    holds: str
    claim: str = ""


SLIPS = (
    Slip(
        "Definition 1",
        "D is the pairs of all of X",
        "of a part of X: nothing would be left to predict",
    ),
    Slip(
        "Definitions 7, 8, 9",
        "weights as in Equation 4, a softmax over all tokens",
        "a softmax over the neighbours, as in Lemma 1; else rows do not sum to 1, against Proposition 1",
        "Definition 7",
    ),
    Slip(
        "Section 3, attention as Definition 4",
        "the message is alpha(x_i, x_j) v(x_j), a function of the pair",
        "alpha divides by a sum over all neighbours; the messages are (e^s v, e^s), the update divides",
        "Definition 4",
    ),
    Slip(
        "Proposition 1",
        "the attention matrix is stochastic",
        "only in the rows of tokens with neighbours: in Theorem 2 the rows of inputs are empty",
        "Proposition 1",
    ),
    Slip(
        "Theorem 2",
        "alpha_ij > 0 if and only if x_i is in X and y_j in Y",
        "i in Y and j in X, as the proof says above it; m and n are the other way round in Definition 6",
        "Theorem 2",
    ),
    Slip(
        "Theorem 3",
        "reflexive, antisymmetric and transitive, so the order is total",
        "these make it partial; it is total because any two tokens are related. O(x) is the relation of "
        "successors, and the order its reflexive, transitive closure",
        "Theorem 3",
    ),
    Slip("Theorem 4", "masked where t > j > i", "j < t or j > i: since t <= i, no j fulfils the printed one"),
    Slip(
        "Theorems 6 and 7",
        "equivariant to translations, as a group acting on n tokens",
        "see the four readings: false for n tokens, true for moved sequences and on the integers",
        "Theorem 6",
    ),
    Slip(
        "Theorem 7, proof",
        "a unique topological order, which a translation preserves",
        "there is one only if p >= 1; every increasing map preserves it, translations also keep i - j",
        "Theorem 7",
    ),
    Slip("Corollary 1", "t = max{n}", "p = n - 1, so t = 0; with t = n there would be no key", "Corollary 1"),
    Slip(
        "Theorem 8",
        "block permutations, epimorphisms that keep x ~ y",
        "permutations within X and within Y; an exchange of X and Y keeps ~, too, and does not commute",
        "Theorem 8",
    ),
    Slip(
        "Table 1",
        "one order from the most general to the most specific",
        "two orders, of mechanisms and of relations (above): neither puts encoder-decoder last, and strided "
        "attention contains masked attention as a mechanism",
    ),
    Slip("Section 3.2", "Table 3.2", "Table 2"),
    Slip("Section 3.2, Appendix A.2", "GPT is [11], which is Transformer-XL", "[25], as in Table 2"),
    Slip(
        "Section 3.2",
        "S4 uses stride attention",
        "S4 is a convolution as long as the sequence: relation Causal(), signed weights, no softmax",
    ),
    Slip("Section 3.2, Table 2", "ViT uses stride attention", "the original ViT relates all patches: Full()"),
    Slip(
        "Appendix B",
        "scores of -1e9",
        "a token without neighbours then gets the mean of all tokens, against Lemma 1; here it gets zeros",
    ),
    Slip(
        "Appendix B.4",
        "SparseAttention with a stride",
        "strided attention with stride = p + 1 keys, itself included",
    ),
)

"""The report of ``attnbias theory``: the paper's mechanisms, analysed by their relations, and its claims."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..attention import attention
from ..op import dispatch
from ..op.problem import Problem
from ..relations import Bipartite, Causal, Full, Graph, Neighbors, Relation, Window
from .claims import CLAIMS, MEMORY, PREVIOUS, TOKENS, Attend, Claim
from .groups import automorphisms
from .inclusion import hierarchy
from .properties import properties


class Mechanism(NamedTuple):
    """A row of the table: a relation to analyse, and names that are only printed."""

    name: str
    relation: Relation
    tokens: int
    model: str  # named in the paper
    data: str  # named in the paper


_GRAPH = Graph(torch.tensor([[1, 0, 2, 1, 3, 2, 4, 2], [0, 1, 1, 2, 2, 3, 2, 4]]), num_nodes=TOKENS)
_NEAREST = Neighbors(
    torch.tensor([[0, 3, 5], [1, 0, 6], [2, 7, 4], [3, 1, 2], [4, 6, 0], [5, 2, 7], [6, 5, 1], [7, 4, 3]])
)

MECHANISMS = (
    Mechanism("self", Full(), TOKENS, "BERT", "sets"),
    Mechanism("masked", Causal(), TOKENS, "GPT", "sequences"),
    Mechanism("strided", Window(before=PREVIOUS), TOKENS, "ViT", "sequences, grids"),
    Mechanism("encoder-decoder", Bipartite(MEMORY), TOKENS + MEMORY, "T5", "pairs of sequences"),
    Mechanism("sparse", _NEAREST, TOKENS, "Unlimiformer", "long sequences"),
    Mechanism("graph", _GRAPH, TOKENS, "GAT", "graphs"),
)


def report() -> tuple[str, bool]:
    """Return the text of ``attnbias theory``, and whether every claim held wherever it could run."""
    lines = [f"Mechanisms, computed from their relations among {TOKENS} tokens", ""]
    for mechanism in MECHANISMS:
        relation, tokens = mechanism.relation, mechanism.tokens
        groups = [automorphisms(relation, tokens)]
        if isinstance(relation, Bipartite):  # as a layer sees it: queries and keys permuted separately
            groups.append(automorphisms(Full(), TOKENS, keys=MEMORY))
        names = [group.name + (f", order {group.order}" if "_" in group.name else "") for group in groups]
        lines += [
            f"{mechanism.name}: {relation!r}"
            + (f" among {tokens}: {TOKENS} queries, {MEMORY} keys" if len(groups) > 1 else ""),
            f"    properties   {properties(relation, tokens)}",
            f"    symmetries   {'; queries and keys separately: '.join(names)}",
            f"    named, not computed: {mechanism.model}; {mechanism.data}",
        ]
    lines.append("")
    square = {each.name: each.relation for each in MECHANISMS if each.tokens == TOKENS}
    square[f"strided, p = {TOKENS - 1}"] = Window(before=TOKENS - 1)
    lines += ["By inclusion", "", str(hierarchy(square, TOKENS, TOKENS)), ""]
    lines += ["Claims (those on symmetry are numbered here, not as in the paper)", ""]
    held = True
    for claim in CLAIMS:
        verdicts, holds = _try_backends(claim)
        held = held and holds
        lines.append(f"{'holds' if holds else 'FAILS'}  {claim.name}: {claim.statement}")
        if claim.condition:
            lines.append(f"       only if: {claim.condition}")
        lines.append(f"       {verdicts}")
    return "\n".join(lines), held


def backends() -> dict[str, Attend]:
    """Return attention on each backend, by name."""

    def named(name: str) -> Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor, relation: Relation) -> Tensor:
            place = _device(name)
            q, k, v = query.to(place), key.to(place), value.to(place)
            return attention(q, k, v, relation, backend=name).cpu()

        return attend

    return {name: named(name) for name in dispatch.BACKENDS}


def _device(name: str) -> str:
    """Return the device on which a backend is tried."""
    return "cuda" if dispatch.KERNELS["cuda"] == name and torch.cuda.is_available() else "cpu"


def why_not(name: str, relation: Relation) -> list[str]:
    """List why a backend cannot run a claim on this relation."""
    query = torch.zeros(1, 1, TOKENS, 8, device=_device(name))
    memory = query.new_zeros(1, 1, relation.lengths[1] or TOKENS, 8)
    return dispatch.BACKENDS[name].why_not(Problem(query, memory, memory[..., :6], relation))


def _try_backends(claim: Claim) -> tuple[str, bool]:
    """Describe a claim's outcome on each backend, and return whether it held wherever it could run."""
    passed, failed, refused = [], [], []
    for name, attend in backends().items():
        if why_not(name, claim.relation):
            refused.append(name)
            continue
        try:
            faults = claim.faults(attend)
        except NotImplementedError:  # raised for another relation that the claim uses
            refused.append(name)
            continue
        if faults:
            failed.append(f"{name} ({'; '.join(faults)})")
        else:
            passed.append(name)
    words = [
        f"{what} {', '.join(names)}"
        for what, names in (("on", passed), ("not on", failed), ("not run by", refused))
        if names
    ]
    return "; ".join(words), bool(passed) and not failed

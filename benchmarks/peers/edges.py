"""Peers that work on lists of pairs: a gather of torch, PyG, torch's sparse matrices."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch
from torch import Tensor

from ..cases.graphs import GraphCase
from ..cases.tokens import Attend, Case
from . import masks
from .reasons import CannotRunError


def gather(case: Case) -> Attend:
    """Gather the neighbours' keys and values, then a dense softmax; takes and gives [1, N, H, D]."""
    listed = masks.neighbours(case)
    if listed is None or case.batch > 1 or case.key_heads is not None:
        raise CannotRunError("needs the same number of neighbours for every query of one batch element")
    scale, index = case.size**-0.5, listed.to(case.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.einsum("nhd,nkhd->nhk", query[0], key[0][index]) * scale
        return torch.einsum("nhk,nkhd->nhd", scores.softmax(-1), value[0][index])[None]

    return attend


def _edges(case: Case) -> Tensor:
    """Return sources and targets [2, E] of a graph or of lists of neighbours."""
    if case.batch > 1 or case.key_heads is not None:
        raise CannotRunError("takes one graph, whose heads have their own keys")
    if isinstance(case, GraphCase):
        return case.edge_index
    listed = masks.neighbours(case)
    if listed is None:
        raise CannotRunError("knows only graphs")
    target = torch.arange(case.tokens).repeat_interleave(listed.shape[1])
    return torch.stack((listed.reshape(-1), target))


def pyg(case: Case) -> Attend:
    """Call PyG's TransformerConv without its linear layers: gather, softmax, scatter; takes [1, N, H, D]."""
    edge_index = _edges(case).to(case.device)
    if not find_spec("torch_geometric"):
        raise CannotRunError("is not installed")
    from torch_geometric.nn import TransformerConv

    layer = TransformerConv(case.size, case.size, heads=case.heads)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = layer.propagate(edge_index, query=query[0], key=key[0], value=value[0], edge_attr=None)
        return out[None]

    return attend


def torch_sparse(case: Case) -> Attend:
    """Use torch's sparse products and a softmax by scattering, per head; takes dense heads [1, H, N, D]."""
    if case.device != "cpu":
        raise CannotRunError("runs only on CPUs")
    nodes, edge_index = case.tokens, _edges(case)
    column, row = (x.contiguous() for x in edge_index[:, edge_index[1].argsort(stable=True)])
    ptr, scale = torch.searchsorted(row, torch.arange(nodes + 1)), case.size**-0.5

    def matrix(values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(ptr, column, values, (nodes, nodes), check_invariants=False)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        pattern = matrix(torch.zeros(len(column)))

    def softmax(scores: Tensor) -> Tensor:
        most = scores.new_full((nodes,), -torch.inf).scatter_reduce_(0, row, scores, "amax")
        weights = torch.exp(scores - most[row])
        return weights / scores.new_zeros(nodes).index_add_(0, row, weights)[row]

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.sparse.sampled_addmm(pattern, q, k.T, beta=0.0, alpha=scale)
        return matrix(softmax(scores.values())) @ v

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.stack([head(*each) for each in zip(query[0], key[0], value[0], strict=True)])[None]

    return attend

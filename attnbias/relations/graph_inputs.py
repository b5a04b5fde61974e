"""Read graphs as other libraries hold them; none is imported: what an object can do tells what it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import check_dense

Size = tuple[int, int]


def read_edges(given: Any) -> tuple[Any, Size | None]:
    """Return the edge_index in what a caller gave, and its (sources, targets) where that knows them.

    Takes PyG's ``Data``, ``Batch``, one edge type of its ``HeteroData``, and its ``EdgeIndex``.
    """
    if hasattr(given, "sparse_size"):  # EdgeIndex
        sources, targets = given.sparse_size()
        known = sources is not None and targets is not None
        return given.as_tensor(), (int(sources), int(targets)) if known else None
    if hasattr(given, "edge_types"):
        raise TypeError(
            "edge_index: a HeteroData has several kinds of edges; wanted one, as data['a', 'to', 'b']"
        )
    if isinstance(given, Tensor) and given.is_nested:
        check_dense("edge_index", given)
    if hasattr(given, "tocoo") or (isinstance(given, Tensor) and given.layout != torch.strided):
        raise TypeError(
            "edge_index: wanted [2, E], got a sparse matrix; Graph.from_adjacency takes it, row = query"
        )
    if isinstance(given, Tensor | np.ndarray) or not hasattr(given, "keys"):
        return given, None
    edge_index = getattr(given, "edge_index", None)
    if edge_index is None:
        adjacency = getattr(given, "adj_t", None)
        if adjacency is None:
            raise ValueError(f"edge_index: this {type(given).__name__} has neither edge_index nor adj_t")
        query, key, (targets, sources) = read_adjacency(adjacency)
        return torch.stack((key, query)), (sources, targets)
    edge_index, size = read_edges(edge_index)
    if size is None:
        sources, targets = given.size()
        if sources is not None and targets is not None:
            size = int(sources), int(targets)
    return edge_index, size


def read_adjacency(matrix: Any) -> tuple[Tensor, Tensor, Size]:
    """Return the row and column of each entry of a matrix, and its shape.

    Takes dense and sparse torch tensors, arrays, nested lists, scipy's sparse matrices and arrays, and
    torch_sparse's ``SparseTensor``. Every stored entry of a sparse matrix counts, zeros too.
    """
    if hasattr(matrix, "sparse_size") or hasattr(matrix, "edge_index"):  # EdgeIndex, Data
        raise TypeError(f"adjacency: wanted a matrix, got {type(matrix).__name__}; Graph(...) takes it")
    if hasattr(matrix, "sparse_sizes"):  # SparseTensor
        row, column, _ = matrix.coo()
        rows, columns = matrix.sparse_sizes()
        return row, column, (int(rows), int(columns))
    if hasattr(matrix, "tocoo"):
        entries = matrix.tocoo()
        shape = _two_sizes(entries.shape)
        row, column = (torch.from_numpy(np.asarray(x, np.int64)) for x in (entries.row, entries.col))
        return row, column, shape
    try:
        tensor = matrix if isinstance(matrix, Tensor) else torch.as_tensor(matrix, device="cpu")
        tensor = tensor.detach()
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"adjacency: wanted a matrix [queries, keys], got {type(matrix).__name__}") from None
    if tensor.is_nested:
        check_dense("adjacency", tensor)
    shape = _two_sizes(tensor.shape)
    if tensor.layout == torch.strided:
        row, column = tensor.nonzero().T
        return row, column, shape
    if tensor.layout == torch.sparse_coo:
        if tensor.sparse_dim() != 2:
            raise ValueError(f"adjacency: wanted 2 sparse dimensions, got {tensor.sparse_dim()}")
        row, column = tensor._indices()  # not coalesced: duplicates count twice
        return row, column, shape
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc):
        by_row = tensor.layout == torch.sparse_csr
        ptr = (tensor.crow_indices() if by_row else tensor.ccol_indices()).long()
        minor = (tensor.col_indices() if by_row else tensor.row_indices()).long()
        count = torch.arange(len(ptr) - 1, device=ptr.device)
        major = torch.repeat_interleave(count, ptr.diff(), output_size=len(minor))
        return (major, minor, shape) if by_row else (minor, major, shape)
    raise TypeError(f"adjacency: wanted a dense, COO, CSR or CSC tensor, got {tensor.layout}")


def _two_sizes(shape: Any) -> Size:
    if len(shape) != 2:
        raise ValueError(f"adjacency: wanted a matrix [queries, keys], got shape {list(shape)}")
    return int(shape[0]), int(shape[1])

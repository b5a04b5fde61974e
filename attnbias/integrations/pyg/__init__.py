"""PyG's attention layers on attnbias kernels: the same arguments, parameters and results.

``TransformerConv``, ``GATConv`` and ``GATv2Conv`` take the arguments of their namesakes in PyG 2.8 and load
their state dicts. PyG itself is not needed. No message is stored: memory grows with nodes times features and
edges times heads, never with edges times features.

``edge_index`` is a tensor [2, E] of sources and targets, an ``attnbias.Graph``, or a sparse matrix with a row
per target (PyG's ``adj_t``): ``torch.sparse`` or torch_sparse's ``SparseTensor``. It may also be the
``Shard`` of a graph; ``x`` and ``edge_attr`` are then those of this rank. A graph holds its layout. The
layout of a tensor is kept while the tensor is alive and unchanged, so all layers and steps that get the same
tensor share it. Torch does not count writes through ``.data`` or through a NumPy array that shares the
memory: pass a new tensor after such a write. For a static graph pass a ``Graph``;
``torch.compile(fullgraph=True)`` needs one that the layer has been called with before.

In training, dropout keeps or drops each pair of nodes, duplicate edges together. Where per-edge weights are
computed anyway (edge features of ``TransformerConv``, ``return_attention_weights`` of the other two) it drops
edge by edge, with the same draws as PyG.

Modules: ``transformer``, ``gat`` and ``gatv2`` (one operator each), ``layer`` (their base classes and linear
maps), ``edges`` (reads ``edge_index``; sums over edges in chunks). A new operator is a subclass of
``layer.Conv`` in a file of its own.
"""

from .gat import GATConv
from .gatv2 import GATv2Conv
from .transformer import TransformerConv

__all__ = ["GATConv", "GATv2Conv", "TransformerConv"]

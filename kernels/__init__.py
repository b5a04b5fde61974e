"""Triton kernels, installed as ``attnbias.kernels``.

A leaf: the modules here import torch, triton and each other (relatively), nothing of attnbias. They
see tensors and sizes only: ``tile`` is what a kernel does with one tile, ``bias`` what score terms and
dropout do to it; ``forward``, ``row_sums`` and ``backward`` are the kernels over a layout's tile lists,
``config`` says in which tiles they run on which GPU, and ``launch`` starts them. ``edges`` and
``edges_backward`` are the kernels over its edge lists, by the work items of ``edge_items``; ``edge_tile`` is
what they do with one.
"""

if __name__ == "kernels":  # the repository's root is on the path, before an installed attnbias
    raise ImportError("kernels/ is installed as attnbias.kernels; import it by that name")

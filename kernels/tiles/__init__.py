"""Kernels over a layout's tile lists.

``tile`` loads, masks and stores one tile, ``walk`` finds the tiles of a list, ``chunks`` multiplies them.
``levels`` does so for multi-level scores, ``terms`` for score terms and dropout; ``extras`` is what a call
has of these. ``forward``, ``row_sums``, ``backward_query`` and ``backward_key`` are the kernels, and
``term_grads`` adds up what ``backward_query`` stores of the gradients of terms, ``pieces`` joins what they
leave of long lists.
"""

"""The ways to compute a call.

Each backend is a module or folder with ``name``, ``why_not(problem)`` and either ``attend``, or ``forward``
and ``backward``; ``attnbias.op.dispatch`` describes both kinds and lists the backends.

``reference``    the specification: plain PyTorch on the relation itself
``rows``         plain PyTorch on a layout's lists
``sdpa``         PyTorch's own attention
``cpu``          the C++ kernels of ``csrc/``
``triton``       the GPU kernels of ``kernels/``
``cudnn``        NVIDIA's ``cudnn.flex_attention``, by name only

They share ``call`` (what a backend gets), ``places`` (where its rows and keys stand in a larger problem),
``strides`` (how results lie in memory), ``philox`` (the bits of dropout) and ``edge_terms`` (score terms of
edges). They import layouts, scores and relations, never ``op``.
"""

"""The same attention computed by others.

=========  ====================================================================================
registry   ``PEERS``: all of them, and what each needs
reasons    why a peer cannot run a case
masks      the kind of a case's mask, read from its relation
sdpa       torch's dense kernels
flex       FlexAttention
flash      FlashAttention 2, 3 and 4
libraries  xFormers, NATTEN, flashinfer and cuDNN Flex, where they are installed
edges      a gather, PyG and torch's sparse matrices
=========  ====================================================================================

Imports ``cases``. A new peer is a function of a case, listed in ``PEERS``; it raises ``CannotRunError`` with
a reason for a case that it cannot run.
"""

"""The same attention computed by others.

=========  ====================================================================================
registry   ``PEERS``: peers made of torch and PyG, and the names of all
masks      the kind of a case's mask, read from its relation
libraries  flash-attn, xFormers, NATTEN and flashinfer, where they are installed
=========  ====================================================================================

Imports ``cases``. A new peer is a function of a case, listed in ``PEERS``; it raises ``CannotRunError`` with
a reason for a case that it cannot run.
"""

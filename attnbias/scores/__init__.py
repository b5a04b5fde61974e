"""The score of a pair: its formula, and the terms that are added to it.

``terms`` has the terms and the parts of which kernels read them, ``buckets`` the distances that share an
entry of a table. ``additive`` and ``multilevel`` are formulas other than the dot product. ``heads`` gives
terms and scores of some of the heads and batches.

Import from the modules. A new term of a known part is a class in ``terms``, for which CONTRIBUTING.md has a
recipe; a new formula is a module here, and a case in ``op/codec.py``.
"""

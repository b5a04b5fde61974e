"""Exact sets of pairs at given lengths, and the algebra on them.

A bound relation (``bound``) holds its pairs as ranges of keys in each row (``intervals``, which also has
the rows and groups that the forms share), one by one (``edges``), or as a test on each pair
(``predicate``). ``inclusion`` decides whether one set lies in another; ``permute`` puts
ranges in another order; ``select`` keeps some queries and keys; ``sort`` sorts edges in C++. Two
records pass between other folders: ``pairs``, a relation's pairs on a GPU, and ``levels``, the blocks of a
multi-level score.

Import from the modules. Nothing here knows tiles or what a device costs. A new form of sets is a module
here, held by ``Bound`` and read by ``layouts/choose.py``.
"""

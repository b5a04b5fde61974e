"""The middle of a call: check it, choose a backend, run it.

``problem``     the checked arguments; every argument error is raised there, in the ``words`` of that module
``dispatch``    the list of backends, and the choice among them
``run``         runs a problem: in eager as one ``Call``, while tracing as the op
``library``     the PyTorch op, its derivative, and the short cut of eager calls
``codec``       how a traced call is written into the op's arguments, and read back
``explain``     ``attnbias.explain``
``weights``     ``attnbias.attention_weights`` and ``edge_weights``
``merge``       ``attnbias.merge``

A new option of ``attention`` is a field of ``problem.Options``, ``Problem`` and ``backends.call.Call``, and
an argument of the op in ``codec``. May import what is below it: backends, scores, relations, layouts, sets.
"""

"""The subcommands of ``attnbias`` that look at relations and check backends.

``options`` has their arguments, help and examples. ``show`` draws a relation, ``plan`` shards one on paper,
``verify`` compares the backends with float64, ``info`` lists versions and devices. ``watch`` says how far a
command is. ``attnbias.__main__`` calls them; ``report`` and ``tune`` are in ``attnbias.report``, ``bench`` in
the benchmarks. To add a subcommand, write its module, its arguments in ``options``, and its row in
docs/command.md.
"""

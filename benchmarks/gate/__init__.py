"""Floors that speed must not fall below: ``attnbias bench gate``.

===========  ==================================================================================
floors       the floors of cases of tokens, and the gate's table
graphs       the floors of graphs
density      limits of the sweep over density
term_costs   limits of score terms, softcap and dropout
level_costs  limits of multi-level scores
pairs        floors of bfloat16 on CPUs that multiply pairs of it
lines        one line of the table: a ratio against its floor or limit
===========  ==================================================================================

Imports ``cases``, ``peers`` and ``measure``. A new floor is a line in the module of its kind.
"""

"""Timers, timed runs and their records.

=============  ================================================================================
timing         clocks, samples and spreads
clocks         clocks, power, temperature and modes of a GPU
machine        what a run is recorded with: GPU, driver, versions; also of ``attnbias report``
race           a case and its peers, timed in turn
run            one run of ``attnbias bench``: every case, then the sweeps
sweep          speed against density and against length
record         the results of a run, kept as JSON
layouts_anew   the time of a layout that every step makes anew
terminal       tables and progress on the terminal
layout_times   ``attnbias bench layouts``: the time of building a layout
recipe_times   ``attnbias bench layouts``: time and memory of building the layout of every recipe
pair_costs     ``attnbias bench costs``: constants of the builder's choice between tiles and edges
graph_memory   peak memory of a pass over a graph, in a process of its own
=============  ================================================================================

Imports ``cases`` and ``peers``.
"""

"""Benchmarks of attnbias and its peers; installed as ``attnbias.benchmarks``.

==============  ================================================================================
cases           the problems to time
peers           the same attention computed by others
measure         clocks, runs, sweeps and their record
static          counts of compiled GPU code, without a GPU
report          tables, plots and a page of a run
gate            floors that speed must not fall below
suite           the cases under pytest-benchmark, for the bench files
bench_forward   the forward pass
bench_backward  forward and backward
bench_graph     graphs and lists of neighbours
bench_layout    building layouts
conftest        ``--device`` of the bench files
==============  ================================================================================

``attnbias bench`` (``__main__``) prints tables and writes JSON, plots and a page. ``pytest benchmarks`` runs
the same cases under pytest-benchmark, which can save and compare runs. A folder imports only those above it
in this table. In ``attnbias``, only the command line imports this package.
"""

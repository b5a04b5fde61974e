"""What attnbias costs beside its peers, installed as ``attnbias.benchmarks``.

``python -m attnbias.benchmarks`` prints tables and draws a plot; ``pytest benchmarks`` runs the
same cases under pytest-benchmark, which can save and compare runs.
"""

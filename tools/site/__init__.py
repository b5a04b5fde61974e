"""What the documentation site needs beyond mkdocs: ``pages`` (a hook of mkdocs) and ``docstrings`` (of griffe).

Both run in the environment of ``make docs``, which has neither torch nor attnbias.
"""

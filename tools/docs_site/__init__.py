"""Parts of the documentation site: ``pages`` (a hook of mkdocs) and ``docstrings`` (an extension of griffe).

Both run in the environment of ``make docs``, which has neither torch nor attnbias.
"""

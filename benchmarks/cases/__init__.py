"""The problems to time: relations among tokens, and graphs.

=========  ====================================================================================
tokens     ``Case``: a relation and sizes; every named case of tokens
graphs     ``GraphCase``: attention along the edges of a graph; every named graph
stored     real graphs: three in data/, others read from a user's folder
drawn      graphs drawn from a seed
recipes    every recipe at the sizes of a model, and the same pairs as a ``mask_mod``
catalog    the named cases of a device, tokens and graphs together
=========  ====================================================================================

Imports ``attnbias`` only. A new case is a maker and a line in ``tokens.py`` or ``graphs.py``.
"""

"""Kernels over a layout's edge lists.

``items`` cuts the lists into work items, ``tile`` is what a kernel does with its items, ``launch`` is what
the passes share. ``forward``, ``rows`` and ``columns`` are the passes.
"""

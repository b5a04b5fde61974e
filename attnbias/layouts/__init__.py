"""Layouts: a relation bound to lengths, as lists of tiles and edges.

``header``      sizes, and where each field lies: start there to add a field
``record``      the two tensors of a layout, their fields, and what is kept about them
``layout``      the public class: a record with methods
``build``       from a relation to a layout, by one of four builders:
                ``native`` (C++, ranges), ``host`` (NumPy, all), ``device`` (PyTorch, pairs on a GPU),
                ``outlined`` (PyTorch, other data on a GPU)
``choose``      tiles or edges, and the tile size, by the constants in ``costs``
``tiles``       sets of pairs as tiles and bit patterns; ``evaluate`` does it for predicates
``levels``      tiles by the depth of a multi-level score
``fill``        from finished lists to the buffer
``outline``     which tiles of data on a device hold pairs; ``outlined`` lists them there, and ``overflow``
                tells the host when they did not fit
``cache``       layouts built once; ``streams`` makes them safe for other streams and captured CUDA graphs
``validate``    checks of a layout from outside; ``storage`` saves and loads
``stats``       counts of work
``picture``     draws tiles as characters, and counts the cells that ``html`` (notebooks) and ``plot``
                (matplotlib) colour
``runs``        ranges of keys read back from tiles, for kernels that take ranges

Imports ``attnbias.sets`` and the C++ library, no relation and no backend.
"""

from .cache import LayoutCache, layout_cache
from .layout import Layout
from .stats import Stats

__all__ = ["Layout", "LayoutCache", "Stats", "layout_cache"]

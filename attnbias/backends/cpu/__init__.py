"""The C++ kernels for CPU tensors, called through ctypes; ``csrc/README.md`` describes them.

- ``backend``: what the dispatcher calls: ``why_not``, ``forward``, ``backward``.
- ``extras``: terms, sink, dropout and scores other than q.k, packed for the kernels.
- ``abi``: the structs of ``csrc/attnbias.h``. A new field goes there and into the header.
- ``library``: the functions of the shared library, and the instruction set that they run on.

Only ``attnbias.backends`` and what it may import are imported here; layouts use ``attnbias/native.py``.
"""

from .backend import backward, forward, name, why_not
from .library import force_isa, isa, isas, library, missing

__all__ = ["backward", "force_isa", "forward", "isa", "isas", "library", "missing", "name", "why_not"]

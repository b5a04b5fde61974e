"""The Triton backend for NVIDIA GPUs.

``backend`` runs a call with the kernels of ``attnbias.kernels``, which ``kernels`` imports. ``terms`` packs
score terms for them and returns their gradients, ``work`` says how long lists are. Importing this package
does not import triton.
"""

from .backend import backward, forward, name, why_not

__all__ = ["backward", "forward", "name", "why_not"]

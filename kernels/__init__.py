"""Triton kernels, installed as ``attnbias.kernels``.

A leaf: the modules here import torch, triton and each other (relatively), nothing of attnbias. They
see tensors and sizes only. There are none yet.
"""

if __name__ == "kernels":  # the repository's root is on the path, before an installed attnbias
    raise ImportError("kernels/ is installed as attnbias.kernels; import it by that name")

"""Triton kernels, installed as ``attnbias.kernels``.

A leaf: the modules here import torch, triton and each other (relatively), nothing of attnbias. They see
tensors and sizes only. ``records`` holds the records that kernels take, ``launch`` the configurations for
each GPU and the code that starts kernels, ``tiles`` the kernels over a layout's tile lists, ``edges`` those
over its edge lists. README.md explains units and names.
"""

if __name__ == "kernels":  # the repository's root is on the path, before an installed attnbias
    raise ImportError("kernels/ is installed as attnbias.kernels; import it by that name")

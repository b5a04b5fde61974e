"""The table of all peers; one that cannot run a case raises with a reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch.nn.attention import SDPBackend

from ..cases.tokens import Attend, Case
from . import edges, flash, flex, libraries, sdpa
from .reasons import CannotRunError

__all__ = [
    "BY_HEAD",
    "BY_NODE",
    "COMPILED",
    "DENSE",
    "FORWARD_ONLY",
    "PACKAGES",
    "PEERS",
    "SLOW",
    "CannotRunError",
]

PEERS: dict[str, Callable[[Case], Attend]] = {
    "SDPA": sdpa.sdpa,
    "SDPA flash": partial(sdpa.sdpa_by, backend=SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": partial(sdpa.sdpa_by, backend=SDPBackend.CUDNN_ATTENTION),
    "SDPA efficient": partial(sdpa.sdpa_by, backend=SDPBackend.EFFICIENT_ATTENTION),
    "SDPA, mask": sdpa.sdpa_mask,
    "SDPA, chunks": sdpa.sdpa_chunks,
    "SDPA, chunks, mask kept": partial(sdpa.sdpa_chunks, keep_mask=True),
    "SDPA, loop": sdpa.sdpa_documents,
    "SDPA, cut": sdpa.sdpa_cut,
    "SDPA, all pairs": sdpa.sdpa_dense,
    "gather": edges.gather,
    "PyG": edges.pyg,
    "Flex": flex.flex,
    "Flex 64": partial(flex.flex, block=64),
    "Flex FLASH": flex.flex_flash,
    "Flex max-autotune": flex.flex_tuned,
    "torch.sparse": edges.torch_sparse,
    "flash-attn": flash.fa2,
    "FA3": flash.fa3,
    "FA4": flash.fa4,
    "cuDNN Flex": libraries.cudnn_flex,
    "xFormers": libraries.xformers,
    "NATTEN": libraries.natten,
    "flashinfer": libraries.flashinfer,
}
PACKAGES = {  # where it is not torch
    "PyG": "torch-geometric",
    "flash-attn": "flash-attn",
    "FA3": "flash-attn-3",
    "FA4": "flash-attn-4",
    "cuDNN Flex": "nvidia-cudnn-frontend",
    "xFormers": "xformers",
    "NATTEN": "natten",
    "flashinfer": "flashinfer-python",
}
DENSE = "SDPA, all pairs"  # a bound, not a peer: it computes something else
COMPILED = ("Flex", "Flex FLASH", "FA4", "cuDNN Flex")  # take ten seconds or more before their first call
SLOW = ("Flex max-autotune",)  # take minutes
# By type of device.
FORWARD_ONLY = {"Flex": "cpu", "Flex 64": "cpu", "torch.sparse": "cpu", "flashinfer": "cuda"}
# Take [B, N, H, D].
BY_NODE = ("gather", "PyG", "flash-attn", "FA3", "FA4", "cuDNN Flex", "xFormers", "NATTEN", "flashinfer")
BY_HEAD = ("torch.sparse",)  # takes [B, H, N, D], each head dense

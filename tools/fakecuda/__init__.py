"""A libcuda that runs nothing, under Triton's real CUDA launcher: to time host work and count launches.

``driver`` makes it Triton's driver. ``measure`` times calls of attention, and ``python -m fakecuda`` prints
the table of them. ``libcuda.c`` is the fake.
"""

from .driver import DEVICES, Launch, fake_gpu, why_not

__all__ = ["DEVICES", "Launch", "fake_gpu", "why_not"]

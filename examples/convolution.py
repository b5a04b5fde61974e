"""A convolution as attention: a head for each tap of the kernel, related to one offset.

A query with a single key gives it weight 1, whatever the scores are, and one without a key gets zeros, which
is zero padding. So nine heads, one for each offset of a 3 x 3 kernel, are a Conv2d once their values are
multiplied by the taps and added up. One head over all nine neighbours is not: its weights are positive and
add up to 1, so it can only take means. It takes a second.

    python examples/convolution.py [--size 28] [--channels 8]
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import Tensor

import attnbias as ab


def as_attention(image: Tensor, kernel: Tensor) -> Tensor:
    """Convolve [B, C, height, width] with [out, C, n, n], n odd."""
    shape, reach = tuple(image.shape[2:]), kernel.shape[2] // 2
    offsets = itertools.product(range(-reach, reach + 1), repeat=2)
    relation = ab.PerHead([ab.Neighborhood(shape, radius=0, offset=offset) for offset in offsets])
    tokens = image.flatten(2).mT[:, None]  # [B, 1, height * width, C]
    value = tokens @ kernel.flatten(2).permute(2, 1, 0)  # [B, n * n, height * width, out]
    scores = torch.zeros_like(value)  # they do not matter
    return ab.attention(scores, scores, value, relation).sum(1).mT.unflatten(2, shape)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=28, help="height and width of the images")
    parser.add_argument("--channels", type=int, default=8)
    given = parser.parse_args()
    torch.manual_seed(0)
    image = torch.randn(4, 3, given.size, given.size, dtype=torch.float64)
    for n in (1, 3, 5):
        kernel = torch.randn(given.channels, 3, n, n, dtype=torch.float64)
        with ab.use_backend("rows"):  # the one for float64
            far = as_attention(image, kernel) - torch.conv2d(image, kernel, padding=n // 2)
        print(f"{n} x {n}: {n * n} heads differ from torch's convolution by at most {far.abs().max():.0e}")


if __name__ == "__main__":
    main()

"""Dropout bits: Philox4x32-7, the same on every backend, tiling and thread count."""

import math

from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _multiply(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of a product of two 32-bit words."""
    # In 16-bit halves: the whole product has 64 bits, and a signed overflow is not defined.
    low = multiplier * (word & 0xFFFF)
    high = multiplier * (word >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Encrypt a counter of four 32-bit words with a key of two; all int64 tensors that broadcast.

    Example:
        >>> import torch
        >>> zero = torch.zeros((), dtype=torch.int64)
        >>> [f"{word.item():08x}" for word in philox((zero,) * 4, (zero,) * 2)]
        ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    c0, c1, c2, c3 = counter
    for i in range(ROUNDS):
        key0, key1 = ((word + i * step) & WORD for word, step in zip(key, KEY_STEPS, strict=True))
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, dropout_p: float, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Say which pairs survive dropout.

    Args:
        seed: the 64-bit key, int64 of one element, on the device of the positions.
        dropout_p: share of the pairs to drop, from 0 (keep all) to 1 (drop all).
        b: batch index, int64; ``b, h, q, k`` broadcast together.
        h: query head, int64.
        q: query position (row + q_start), int64.
        k: key position, int64.

    Returns:
        bool, True = kept, in the shape the positions broadcast to.
    """
    key = (seed & WORD, seed >> 32 & WORD)
    words = philox((k >> 2, q & WORD, h, b), key)
    lane = k & 3
    word = words[0]
    for i in (1, 2, 3):
        word = words[i].where(lane == i, word)
    return word >= math.floor(dropout_p * 2**32)

"""Where the rows and keys of a call stand in the whole of which it computes a part."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Places(NamedTuple):
    """Where the rows, keys, batches and heads of a call stand in the whole of which it is a part.

    A call over some of the rows of a problem, and the keys that they need, gets the same results as the whole
    problem: distances, levels and the bits of dropout follow positions in the whole. Terms are given for the
    whole, too, but for batches and heads, of which they have those of the call.

    Positions increase. Each tile of the layout is one of the whole: it starts at a row ``p - q_start`` and at
    a key that are multiples of its size, and its rows and keys follow each other; the last may be cut short.
    A layout of edges only has no tiles, so its rows and keys may stand anywhere. Nothing checks this.

    ``queries`` and ``keys`` are both given or both None; then ``q_len``, ``k_len`` and ``q_start`` mean
    nothing.
    """

    queries: Tensor | None = None  # int32 [Q], dense: position of each row
    keys: Tensor | None = None  # int32 [K], dense: position of each key
    q_len: int = 0  # lengths of the whole
    k_len: int = 0
    q_start: int = 0  # of the whole: the row at position p is its row p - q_start; the layout has the same
    first_batch: int = 0  # added to the numbers of batches and heads, for the bits of dropout
    first_head: int = 0


NO_PLACES = Places()

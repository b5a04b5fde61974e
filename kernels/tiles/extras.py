"""The options of a call besides queries, keys and values, as kernels take them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..launch.config import PLAIN_LOOPS, Present
from ..launch.split import Work
from ..records import NO_PLACES, Places
from .levels import NO_LEVELS, Levels, plan
from .terms import NO_DROPOUT, Dropout, Terms

LOG2E = 1 / math.log(2)
SMALLEST = 1e-20  # of c: what is masked becomes -inf * c, which must not be NaN


class Extras(NamedTuple):
    """Dropout, terms, levels, q_start, places and work of a call."""

    dropout: Dropout = NO_DROPOUT
    terms: Terms | None = None
    levels: Levels = NO_LEVELS  # for which q comes divided by the ranks
    q_start: int = 0  # position of the first query; of the whole, if the call is a part
    places: Places = NO_PLACES
    work: Work | None = None  # how long the lists are; None: none is cut

    def present(self, softcap: float, **more: bool) -> Present:
        """Say what kernels are compiled with; ``more`` are other fields."""
        levels = self.levels
        chunks, loops = plan(levels.prefixes, levels.shares_first) if levels.prefixes else ((), PLAIN_LOOPS)
        return Present(
            softcap=softcap != 0,
            dropout=self.dropout.seed is not None,
            terms=self.terms is not None,
            levels=len(levels.prefixes),
            per_pair=levels.per_pair,
            chunks=chunks,
            loops=loops,
            **more,
        )

    def arguments(self, scale: float, softcap: float) -> dict[str, Any]:
        """Return what every kernel over tiles takes of these."""
        return {
            "c": score_unit(scale, softcap),
            "inner": scale / softcap if softcap else 1.0,
            "seed": self.dropout.seed,
            "drop_above": self.dropout.above,
            "regrow": self.dropout.regrow,
            "q_start": self.q_start,
            "first_batch": self.dropout.first_batch,
            "first_head": self.dropout.first_head,
            "q_positions": self.places.queries,
            "k_positions": self.places.keys,
            "whole_rows": self.places.q_len,
            "terms": self.terms,
            "table": self.levels.table,
        }


def score_unit(scale: float, softcap: float) -> float:
    """Return c > 0, from a score to a power of 2; a scale of 0 gives weights of exactly 1.

    Without softcap the scale is not negative: q is.
    """
    return max((softcap or scale) * LOG2E, SMALLEST)


def least_score(c: float) -> float:
    """Return what is below every score and term over c; times c, or some levels, it is still finite."""
    return -1e36 / max(c, 1.0)


PLAIN = Extras()

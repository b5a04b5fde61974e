"""Blocks of queries and keys chosen by data: block maps, and lists of key blocks for each query block."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_count, as_indices, check_dense
from ..layouts.outline import Fault, Grid, Outline, outline_counts, overlap
from ..sets.bound import Bound, Place
from ..sets.intervals import Intervals, ceil_div, make_groups
from .relation import Relation
from .tables import find_rows


class Blocks(Relation):
    """Whole blocks of keys for each block of queries: maps and top-k lists of block-sparse attention.

    Block ``i`` holds the positions from ``i * size`` on; the last block may be cut short by the length.

    Args:
        blocks: the key blocks that each query block sees, as booleans [nq, nk], [H, nq, nk] or
            [B, H, nq, nk], or as their numbers [nq, n], [H, nq, n] or [B, H, nq, n], in any order, -1 = none.
            Sizes 1 of B and H broadcast. A number that occurs twice counts once.
        size: positions in a block, or (queries, keys) where they differ.
        counts: of lists, how many numbers of each to read, [nq], [H, nq] or [B, H, nq].

    Example:
        >>> import attnbias as ab
        >>> print(ab.Blocks([[True, False], [True, True]], size=2).picture(4, 3))
        ##.
        ##.
        ###
        ###
        >>> ab.Blocks([[0, -1], [0, 1]], size=2).equivalent(ab.Blocks([[0, 0], [1, 0]], size=2), 4, 3)
        True
    """

    blocks: Tensor
    size: int | Sequence[int]

    def __init__(self, blocks: Any, size: int | Sequence[int], counts: Any = None) -> None:
        table = _as_table(blocks)
        if counts is not None:
            table = _cut(table, counts)
        pair = tuple(size) if isinstance(size, Sequence) else (size, size)
        if len(pair) != 2:
            raise ValueError(f"size: wanted one number, or those of queries and keys, got {size!r}")
        object.__setattr__(self, "blocks", table)
        object.__setattr__(self, "size", tuple(as_count("size", n, 1) for n in pair))
        self.__post_init__()

    @property
    def _sizes(self) -> tuple[int, int]:
        """Queries and keys in a block."""
        return cast(tuple[int, int], self.size)

    @property
    def _is_map(self) -> bool:
        return self.blocks.dtype == torch.bool

    @property
    def _table(self) -> Tensor:
        """The data as [B, H, nq, n]."""
        return self.blocks[(None,) * (4 - self.blocks.dim())]

    @property
    def batch_size(self) -> int:
        return self._table.shape[0]

    @property
    def head_count(self) -> int:
        return self._table.shape[1]

    def _check(self, at: Place) -> None:
        super()._check(at)
        (q_size, k_size), (q_blocks, k_blocks) = self._sizes, self._table.shape[2:]
        if not (at.q_start >= 0 and at.q_start + at.q_len <= q_blocks * q_size):
            where = f" at q_start = {at.q_start}" if at.q_start else ""
            raise ValueError(
                f"relation: these Blocks have {q_blocks} blocks of {q_size} queries, "
                f"got q_len = {at.q_len}{where}"
            )
        if self._is_map and ceil_div(at.k_len, k_size) != k_blocks:
            raise ValueError(
                f"relation: these Blocks have {k_blocks} blocks of {k_size} keys, got k_len = {at.k_len}"
            )
        if not self._is_map and self.blocks.device.type == "cpu":
            most, last = int(self.blocks.max()) if self.blocks.numel() else -1, ceil_div(at.k_len, k_size) - 1
            if most > last:
                raise ValueError(f"blocks: wanted key blocks from -1 (none) to {last}, got {most}")

    def related(self, q: Tensor, k: Tensor, b: Tensor | None = None, h: Tensor | None = None) -> Tensor:
        table, (q_size, k_size) = self._table.to(q.device), self._sizes
        mine, theirs = (torch.div(x, n, rounding_mode="floor") for x, n in ((q, q_size), (k, k_size)))
        row, exists = find_rows(table.shape[:3], mine, b, h)
        if not table.numel():
            return torch.zeros_like(exists & (theirs >= 0))
        flat, n = table.flatten(0, 2), table.shape[3]
        if self._is_map:
            exists = exists & (theirs >= 0) & (theirs < n)
            return flat[row, theirs.clamp(0, n - 1)] & exists
        found = torch.zeros_like(exists & (theirs >= 0))
        for numbers in flat.unbind(1):
            found = found | (numbers[row] == theirs)
        return found & exists & (theirs >= 0)

    def _bind(self, at: Place) -> Bound:
        table, (q_size, k_size) = self._table.cpu().numpy(), self._sizes
        group = make_groups(self.batch_size, self.head_count)
        q_blocks = table.shape[2]
        # The ranges of key blocks of each query block; then a row for each query.
        flat = table.reshape(group.size * q_blocks, table.shape[3])
        row, block = np.nonzero(flat if self._is_map else flat >= 0)
        if not self._is_map:
            block = flat[row, block]
        last = int(block.max(initial=-1)) + 1
        form = Intervals.empty(q_blocks, last, group).from_ranges(row, block, block + 1)
        start, stop = (x.astype(np.int64) * k_size for x in (form.start, form.stop))
        form = replace(form, start=start, stop=stop).with_empty_row()

        def bind_some(at: Place) -> Bound:
            mine = at.positions // q_size
            exists = (mine >= 0) & (mine < q_blocks)
            rows = np.where(exists, np.arange(group.size)[:, None] * q_blocks + mine, group.size * q_blocks)
            some = form.take_rows(rows.reshape(-1), at.q_len)
            return at.bind_ranges(some.row, some.start, some.stop, group)

        return at.in_steps(bind_some) if group.size == 1 else bind_some(at)

    def _outline(self, at: Place, tile: int) -> Outline:
        grid, table, (q_size, k_size) = Grid.of(at, tile), self._table, self._sizes
        chosen, faults = table.to(grid.device), list[Fault]()
        if not self._is_map:
            nk = ceil_div(max(at.k_stop, 0), k_size)
            is_wrong = (chosen < -1) | (
                (chosen >= nk) if not at.is_moved else torch.zeros_like(chosen).bool()
            )
            faults.append(
                Fault(is_wrong.any(), f"blocks: wanted key blocks from -1 (none) to {nk - 1}, got another")
            )
            listed = torch.where((chosen < 0) | (chosen >= nk), nk, chosen)
            chosen = torch.zeros(*table.shape[:3], nk + 1, dtype=torch.bool, device=grid.device)
            chosen = chosen.scatter(-1, listed, True)[..., :-1]
        # Queries times keys that a tile shares with chosen blocks.
        shared = overlap(grid.queries, q_size, table.shape[2]) @ chosen.double()
        pairs = shared @ overlap(grid.keys, k_size, chosen.shape[3]).T
        return outline_counts(pairs, grid.areas)._replace(faults=tuple(faults))


def _as_table(blocks: Any) -> Tensor:
    """Return a private copy of a map of booleans, or of lists of numbers."""
    if not isinstance(blocks, Tensor):
        array = np.ascontiguousarray(blocks) if isinstance(blocks, np.ndarray) else blocks
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # as_indices says what is wrong
            made = torch.as_tensor(array, device="cpu")
            if made.numel() or isinstance(blocks, np.ndarray):  # it also knows that empty lists hold integers
                blocks = made
    if isinstance(blocks, Tensor) and blocks.dtype == torch.bool:
        check_dense("blocks", blocks)
        if blocks.dim() not in (2, 3, 4):
            raise ValueError(f"blocks: wanted 2 or 3 or 4 dimensions, got shape {list(blocks.shape)}")
        with torch.inference_mode(False):
            return blocks.detach().clone()
    numbers = as_indices("blocks", blocks, (2, 3, 4))
    is_known = numbers.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_known and numbers.numel() and int(numbers.min()) < -1:
        raise ValueError(f"blocks: wanted -1 (none) or more, got {int(numbers.min())}")
    return numbers


def _cut(table: Tensor, counts: Any) -> Tensor:
    """Leave the first numbers of each list, as many as its count."""
    if table.dtype == torch.bool:
        raise ValueError("counts: wanted None with a map of booleans, got counts")
    sizes = as_indices("counts", counts, (1, 2, 3)).to(table.device)
    if sizes.shape != table.shape[:-1]:
        raise ValueError(
            f"counts: wanted {list(table.shape[:-1])}, one for each list, got {list(sizes.shape)}"
        )
    if sizes.device.type == "cpu" and not torch.compiler.is_compiling() and sizes.numel():
        least, most = (int(x) for x in sizes.aminmax())
        if least < 0 or most > table.shape[-1]:
            wrong = least if least < 0 else most
            raise ValueError(f"counts: wanted 0 to {table.shape[-1]}, got {wrong}")
    place = torch.arange(table.shape[-1], device=table.device)
    return torch.where(place < sizes[..., None], table, -1)


def topk_blocks(scores: Tensor, k: int, size: int | Sequence[int] = 128) -> Blocks:
    """Choose the ``k`` key blocks of the highest score for each query block; the device is not waited for.

    Args:
        scores: [nq, nk], [H, nq, nk] or [B, H, nq, nk]; a block of score -inf or NaN is never chosen.
        k: blocks to choose; all where there are fewer.
        size: positions in a block, or (queries, keys).

    Example:
        >>> import torch
        >>> import attnbias as ab
        >>> ab.topk_blocks(torch.tensor([[3.0, 1.0, 2.0], [-torch.inf, 5.0, 4.0]]), 2, size=64)
        Blocks(blocks=[[0, 2], [1, 2]], size=[64, 64])
    """
    check_dense("scores", scores)
    if not scores.is_floating_point() or scores.dim() not in (2, 3, 4):
        raise ValueError(
            f"scores: wanted floating-point numbers [nq, nk], [H, nq, nk] or [B, H, nq, nk], "
            f"got {scores.dtype} {list(scores.shape)}"
        )
    known = scores.detach().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = known.topk(min(as_count("k", k), scores.shape[-1]), dim=-1)
    return Blocks(torch.where(best.values > -torch.inf, best.indices, -1), size)

"""Layouts: a relation bound to lengths, as the lists of tiles and edges that kernels read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.serialization import add_safe_globals
from torch.utils import _pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from .build import build_layout
from .fill import Form
from .picture import MOST_TILES, cells_of, draw
from .record import Record
from .stats import Stats, count_work
from .storage import load, save
from .validate import validate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..relations.relation import Relation
    from ..scores.multilevel import MultiLevel


class Layout(Record):
    """A relation bound to lengths: plain tensors that every kernel, layer and process can share.

    Its whole state is two tensors: ``buffer``, int32 on the layout's device, and ``where``, int64 on the
    host, which holds the sizes below and the offset of each field in the buffer. All fields are views.
    With G groups, C = 2 classes (0 full tiles, 1 partial tiles), ``q_tiles = ceil(q_len / tile)``, and with a
    multi-level score of L levels C = L + 2 (full tiles by their depth, 0 to L, then partial ones):

    ================  ======================  ============================================================
    field             shape                   meaning
    ================  ======================  ============================================================
    ``group``         [batch, heads]          the group that serves a batch and head; batch, heads may be 1
    ``q_ptr``         [G, q_tiles, C + 1]     bounds of each class in ``q_tile`` for a query tile
    ``q_tile``        [tiles + 1]             key tiles by query tile, increasing in a class; one spare entry
    ``q_mark``        [tiles + 1]             pattern of a partial tile, depth of a full one: its class
    ``k_ptr`` ...     as above                the same tiles by key tile: ``k_ptr, k_tile, k_mark``
    ``patterns``      [P, tile, tile / 32]    bit j of word w of row r: query r, key 32 w + j
    ``patterns_t``    [P, tile, tile / 32]    the same with rows = keys
    ``q_order``       [G * q_tiles]           ``g * q_tiles + t``, longest work first; ``k_order`` likewise
    ``edge_ptr``      [G * q_len + 1]         edges of row ``g * q_len + i`` (empty without edges)
    ``edge_key``      [E]                     key of each edge, increasing in a row
    ``edge_id``       [E]                     the caller's number of the edge
    ``col_ptr``       [G * k_len + 1]         the same edges by key
    ``col_query``     [E]                     query of each edge, increasing in a column
    ``col_edge``      [E]                     its place in ``edge_key``
    ================  ======================  ============================================================

    A full tile has no bounds to check along the side that a kernel walks: by query, the key tile at a
    ragged end is partial; by key, the query tile at a ragged end is partial. Bits past the ends are 0.
    With a multi-level score a tile whose pairs differ in depth is partial too, and ``where`` goes on with
    the widths and prefixes of the levels.
    """

    @staticmethod
    def build(
        relation: Relation,
        q_len: int,
        k_len: int | None = None,
        *,
        q_start: int | Literal["end"] = 0,
        device: torch.device | str = "cpu",
        form: Form = "auto",
        tile: int | None = None,
        batch: int | None = None,
        heads: int | None = None,
        score: MultiLevel | None = None,
        capacity: int | tuple[int, int] | None = None,
    ) -> Layout:
        """Build a layout without looking in a cache.

        Args:
            relation: what to lay out.
            q_len: number of queries.
            k_len: number of keys; as many as queries if None.
            q_start: position of the first query among the keys, or "end".
            device: where the tensors go; "cpu" costs are assumed on the CPU, a GPU's elsewhere.
            form: "tiles" or "edges" forces one form, "auto" chooses per query tile by counted work.
            tile: 64 or 128; chosen by counted work when None.
            batch: batch size, for relations that fit any.
            heads: head count, for relations that fit any.
            score: the multi-level score that it is for; its pairs are all in tiles.
            capacity: room for so many tiles, or for (tiles, partial tiles). The layout is then made on the
                device without waiting for it, so that a CUDA graph can capture it. One that does not fit
                raises at once on a CPU; on a GPU it is left empty, and a later call of ``attention`` raises.

        Example:
            >>> import attnbias as ab
            >>> stats = ab.Layout.build(ab.Causal(), 256, tile=64).stats()
            >>> stats.tiles_full, stats.tiles_partial, stats.patterns, stats.pairs, stats.executed
            (6, 4, 1, 32896, 40960)
        """
        made = build_layout(
            relation,
            q_len,
            q_len if k_len is None else k_len,
            q_start=q_start,
            device=device,
            form=form,
            tile=tile,
            batch=batch,
            heads=heads,
            score=score,
            capacity=capacity,
        )
        return Layout(made.buffer, made.where)

    def check(self, q_len: int, k_len: int, batch: int, heads: int) -> None:
        """Raise ValueError unless the layout fits tensors of these sizes."""
        self.header.check(q_len, k_len, batch, heads)

    def columns(self, g: int, t: int) -> tuple[Tensor, Tensor]:
        """Decode query tile ``t`` of group ``g``: keys [n], and how often each pair counts [rows, n]."""
        tile, device = self.tile, self.buffer.device
        first, stop = t * tile, min((t + 1) * tile, self.q_len)
        begin, *_, middle, end = self.q_ptr[g, t].tolist()
        inside = torch.arange(tile, device=device)
        keys = (self.q_tile[begin:end].long()[:, None] * tile + inside).reshape(-1)
        counts = torch.ones(stop - first, end - begin, tile, dtype=torch.int64, device=device)
        words = self.patterns[self.q_mark[middle:end].long()][:, : stop - first].long()
        bits = (words[..., None] >> torch.arange(32, device=device)) & 1  # [n, rows, tile/32, 32]
        counts[:, middle - begin :] = bits.flatten(2).transpose(0, 1)
        counts = counts.reshape(stop - first, (end - begin) * tile)
        exists = keys < self.k_len
        keys, counts = keys[exists], counts[:, exists]
        if self.edges:
            ptr = self.edge_ptr[g * self.q_len + first : g * self.q_len + stop + 1].long()
            edge_key = self.edge_key[int(ptr[0]) : int(ptr[-1])].long()
            row = torch.repeat_interleave(torch.arange(stop - first, device=device), ptr[1:] - ptr[:-1])
            extra, place = torch.unique(edge_key, return_inverse=True)
            more = torch.zeros(stop - first, len(extra), dtype=torch.int64, device=device)
            more.index_put_((row, place), torch.ones_like(row), accumulate=True)
            keys, counts = torch.cat((keys, extra)), torch.cat((counts, more), 1)
        return keys, counts

    def rows(self, start: int, stop: int) -> Tensor:
        """Count each pair of query rows ``start:stop``, [batch, heads, stop - start, k_len]."""
        strips = torch.zeros(
            self.groups, stop - start, self.k_len, dtype=torch.int64, device=self.buffer.device
        )
        for g in range(self.groups):
            for t in range(start // self.tile, -(-stop // self.tile)):
                keys, counts = self.columns(g, t)
                low, high = max(start, t * self.tile), min(stop, (t + 1) * self.tile)
                part = counts[low - t * self.tile : high - t * self.tile]
                strips[g, low - start : high - start].index_add_(1, keys, part)
        return strips[self.group.long()]

    def to_dense(self) -> Tensor:
        """Return the related pairs as booleans, [q_len, k_len], or [batch, heads, q_len, k_len]."""
        dense = self.rows(0, self.q_len) > 0
        return dense[0, 0] if self.batch == self.heads == 1 else dense

    def stats(self) -> Stats:
        """Count tiles by kind, pairs needed and executed, edges and bytes, summed over the groups."""
        return count_work(self)

    def validate(self) -> None:
        """Raise ValueError, saying what is wrong, unless every field is consistent."""
        validate(self)
        self.trust()

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file."""
        save(self, path)

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> Layout:
        """Read a file that :meth:`save` wrote; raise ValueError if it is damaged."""
        return Layout(*load(path)).trust().to(device)

    def picture(self, path: str | Path | None = None, *, group: int = 0) -> str:
        """Draw the tiles: '#' full, '+' partial, '.' empty, 'e' edges; with a path, also a picture there."""
        if path is not None:
            from .plot import save

            save(cells_of(self, group), path, self._words)
        return draw(self, group)

    def plot(self, axes: Axes | None = None, *, group: int = 0, title: str | None = None) -> Axes:
        """Draw with matplotlib which pairs are related, coloured by how the layout holds them.

        Above 128 tokens a cell stands for a square of pairs, and is shaded by how many of them are related.

        Args:
            axes: where to draw; those of a new figure if None.
            group: which of its groups.
            title: what to write above.

        Example:
            >>> import attnbias as ab
            >>> axes = ab.Causal().layout(300, 300).plot()  # doctest: +SKIP
        """
        from .plot import plot

        return plot(cells_of(self, group), title or self._words, axes)

    @property
    def _words(self) -> str:
        return f"{self.q_len:,} queries x {self.k_len:,} keys"

    def _repr_html_(self) -> str | None:
        from .html import page

        if max(self.q_len, self.k_len) > MOST_TILES * self.tile:
            return None
        several = [f"group 0 of {self.groups}"] if self.groups > 1 else []
        title = f"Layout of {self._words}"
        return page(cells_of(self, 0), title, [*several, str(self.stats())], tile=self.tile)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return torch.equal(self.where, other.where) and torch.equal(
            self.buffer, other.buffer.to(self.buffer.device)
        )

    __hash__ = None  # type: ignore[assignment]  # a record of tensors, compared by content

    def __reduce__(self) -> tuple[type[Layout], tuple[Tensor, Tensor]]:
        return Layout, (self.buffer.detach(), self.where)  # without what is kept on the buffer

    def __repr__(self) -> str:
        return (
            f"Layout(q_len={self.q_len}, k_len={self.k_len}, q_start={self.q_start}, "
            f"batch={self.batch}, heads={self.heads}, tile={self.tile}, tiles={self.tiles}, "
            f"edges={self.edges}, device={str(self.device)!r})"
        )


_pytree.register_pytree_node(
    Layout,
    lambda layout: ([layout.buffer, layout.where], None),
    lambda leaves, _: Layout(*leaves),
    serialized_type_name="attnbias.Layout",
    flatten_with_keys_fn=lambda layout: (
        [(_pytree.GetAttrKey(name), getattr(layout, name)) for name in ("buffer", "where")],
        None,
    ),
)


def _collate(batch: list[Layout], **_: Any) -> Layout:
    """Let samples of a batch share one layout; see :func:`torch.utils.data.default_collate`."""
    if any(layout != batch[0] for layout in batch):
        raise TypeError(
            "layout: samples with different layouts do not make a batch; put relations into the samples, "
            "and call layout() on what they become"
        )
    return batch[0]


default_collate_fn_map[Layout] = _collate
add_safe_globals([Layout])  # torch.load(weights_only=True) may make one: it is validated before use

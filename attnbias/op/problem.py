"""The checked arguments of one call of ``attention``; every argument error is raised here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

import torch
from torch import Tensor

from ..arguments import as_flag, check_dense, words_of
from ..backends.places import Places
from ..layouts.layout import Layout
from ..layouts.overflow import raise_overflow
from ..relations import Full
from ..relations.listing import count_edges
from ..relations.relation import Relation
from ..scores.additive import AdditiveScore, Score
from ..scores.multilevel import MultiLevel
from ..scores.terms import KernelTerm, Sizes
from .words import advise_option, describe, guess_order, shape_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..layouts.fill import Form
    from ..scores.terms import Term

DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))

LARGEST_ON_EDGES = 256  # head size: larger ones are for tiles, unless the relation is a graph

_FULL = Full()


class Options(TypedDict, total=False):
    """The keyword arguments of ``attention``, ``explain``, ``verify`` and ``attention_weights``."""

    terms: Sequence[Term]
    score: Score | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    dropout_p: float
    q_start: int | Literal["end"]
    enable_gqa: bool | None


DEFAULTS: Options = {
    "terms": (),
    "score": None,
    "scale": None,
    "softcap": None,
    "sink": None,
    "dropout_p": 0,  # dynamo makes a symbol of a float default, then finds it cannot be one
    "q_start": 0,
    "enable_gqa": None,
}


class Problem:
    """One call of ``attention``, checked, with its defaults filled in.

    Made in every call, so it is a plain record with slots, and the checks are cheap. Under ``torch.compile``
    and ``torch.export``, checks that depend on lengths run when the op does.

    Args:
        query: [B, H, Q, D] or [H, Q, D].
        key: [B, Hk, K, D] or [Hk, K, D]; Hk divides H.
        value: [B, Hk, K, E] or [Hk, K, E].
        relation: a Relation, a Layout, or None for ``Full()``.
        terms: score terms, added in this order.
        score: None, the dot product, an ``AdditiveScore`` or a ``MultiLevel``.
        scale: factor of the score; None is ``D**-0.5`` for the dot product, else 1.
        softcap: c of ``c * tanh(score / c)``; None or 0 is off.
        sink: one more logit per head, without a value, [H].
        dropout_p: share of the probabilities to drop.
        q_start: position of the first query among the keys, or "end" (= K - Q).
        enable_gqa: False refuses fewer key heads than query heads.
        return_lse: whether the caller wants the lse.
        return_max: whether the caller wants the largest score of each row.
        places: where this stands in a larger problem of which it is a part; with positions, the relation is a
            Layout, and their q_start is taken.

    Raises:
        TypeError: for an argument of the wrong kind.
        ValueError: for one of the right kind that does not fit.
    """

    __slots__ = (
        "dropout_p",
        "form",
        "key",
        "layout",
        "places",
        "q_start",
        "query",
        "relation",
        "return_lse",
        "return_max",
        "scale",
        "score",
        "seed",
        "sink",
        "softcap",
        "squeeze",
        "terms",
        "value",
    )
    query: Tensor  # [B, H, Q, D]
    key: Tensor  # [B, Hk, K, D]
    value: Tensor  # [B, Hk, K, E]
    squeeze: bool  # the inputs came without a batch dimension
    relation: Relation | None  # exactly one of relation
    layout: Layout | None  # and layout is set
    form: Form  # in which a relation is laid out
    terms: tuple[Term, ...]
    score: Score | None
    scale: float
    softcap: float  # 0.0 = off
    sink: Tensor | None  # [H]
    dropout_p: float
    q_start: int
    places: Places | None
    return_lse: bool
    return_max: bool
    seed: Tensor | None  # int64 [1]: set by draw_seed

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        relation: Relation | Layout | None = None,
        *,
        return_lse: bool = False,
        return_max: bool = False,
        places: Places | None = None,
        **options: Unpack[Options],
    ) -> None:
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            raise_overflow()
        given: Options = {**DEFAULTS, **options} if options else DEFAULTS
        if len(given) != len(DEFAULTS):
            unknown = next(name for name in options if name not in DEFAULTS)
            raise TypeError(f"{unknown}: no such argument; {advise_option(unknown, DEFAULTS)}")
        self.squeeze = _check_tensors(query, key, value)
        if self.squeeze:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        _check_shapes(query, key, value, given["enable_gqa"])
        self.query, self.key, self.value = query, key, value
        if options:
            self.score = score = _check_score(given["score"])
            self.scale = _check_scale(given["scale"], query, score)
            self.softcap = _check_softcap(given["softcap"])
            self.sink = _check_sink(given["sink"], query)
            self.dropout_p = _check_dropout(given["dropout_p"])
            self.terms = _check_terms(given["terms"])
            self.q_start = _resolve(given["q_start"], query, key)
        else:  # what the checks make of the defaults
            self.scale = float(query.shape[-1] ** -0.5)
            self.softcap, self.dropout_p, self.q_start = 0.0, 0, 0
            self.score, self.sink, self.terms = None, None, ()
        self.places = places
        if places is not None and places.queries is not None:
            self.q_start = places.q_start
        self.return_lse = as_flag("return_lse", return_lse)
        self.return_max = as_flag("return_max", return_max)
        self.seed = self.relation = self.layout = None
        if relation is None:
            self.relation = _FULL
        elif isinstance(relation, Relation):
            self.relation = relation
        elif isinstance(relation, Layout):
            self.layout = relation
        else:
            raise TypeError(
                f"relation: wanted a Relation, a Layout or None (= Full), got {describe(relation)}"
            )
        self.form = self._find_form()
        if not is_compiling:
            self._fit()

    def _find_form(self) -> Form:
        """Return the form of the layout; numbers for edges, and scores without a tile kernel, need edges."""
        if isinstance(self.score, AdditiveScore):
            return "edges"
        if self.terms and any(isinstance(term, KernelTerm) and term.part == "edge" for term in self.terms):
            return "edges"
        is_graph = self.relation is not None and self.relation.listed
        return "tiles" if self.query.shape[3] > LARGEST_ON_EDGES and not is_graph else "auto"

    def _fit(self) -> None:
        """Raise unless places, terms, score and relation fit the lengths."""
        if self.places is not None:
            _fit_places(self.places, self)
        if self.terms or self.score is not None:
            sizes = self.sizes
            for term in self.terms:
                if isinstance(term, KernelTerm):
                    term.check(sizes)
            if self.score is not None:
                self.score.check(sizes, self.query.shape[3])
        if self.layout is not None:
            fit_layout(self.layout, self)
        elif self.relation is not _FULL:
            assert self.relation is not None
            B, H, Q, _ = self.query.shape
            try:
                self.relation.check(Q, self.key.shape[2], self.q_start, batch=B, heads=H)
            except ValueError as error:
                raise ValueError(f"{error}{guess_order(self.key, self.relation.lengths[1])}") from None
        if self.form == "edges":
            _fit_edges(self)

    @property
    def sizes(self) -> Sizes:
        """The sizes that terms are made for: with positions, the lengths are those of the whole."""
        batch, heads, q_len, _ = self.query.shape
        k_len = self.key.shape[2]
        if self.places is not None and self.places.queries is not None:
            q_len, k_len = self.places.q_len, self.places.k_len
        dtype = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        return Sizes(batch, heads, q_len, k_len, self.q_start, self.query.device, dtype)

    def lay_out(self) -> Layout:
        """Return its layout, from the relation's cache unless it was given."""
        relation, query, score = self.relation, self.query, self.score
        if relation is None:
            assert self.layout is not None
            return self.layout
        B, H, Q, _ = query.shape
        return relation.layout(
            Q,
            self.key.shape[2],
            q_start=self.q_start,
            device=query.device,
            form=self.form,
            batch=B,
            heads=H,
            score=score if isinstance(score, MultiLevel) and self.form != "edges" else None,
        )

    def draw_seed(self) -> None:
        """Draw the dropout seed from torch's generator; nothing is drawn without dropout."""
        if self.dropout_p > 0:
            self.seed = torch.randint(0, 2**63 - 1, (1,), device=self.query.device)


def fit_layout(layout: Layout, problem: Problem) -> None:
    """Raise unless a layout is for the tensors, q_start and score of a problem."""
    query, key, q_start = problem.query, problem.key, problem.q_start
    B, H, Q, _ = query.shape
    header = layout.header
    header.check(Q, key.shape[2], B, H)
    if header.q_start != q_start:
        raise ValueError(
            f"q_start: this layout was built with q_start={header.q_start}, got {q_start}; "
            "pass the same value to layout() and attention()"
        )
    score = problem.score if isinstance(problem.score, MultiLevel) else None
    if score is not None or header.classes != 2:
        sizes = problem.sizes
        wanted = None if score is None else score.bind(sizes.q_len, sizes.k_len, q_start)
        if header.levels != wanted:
            raise ValueError(
                f"score: this layout was built for the levels {header.levels}, the score has {wanted}; "
                "pass the same score to layout() and attention()"
            )
    if layout.buffer.device != query.device:
        raise ValueError(
            f"relation: wanted a layout on the query's device, {query.device}, "
            f"got one on {layout.buffer.device}; use layout.to(query.device)"
        )


def _fit_places(places: Places, problem: Problem) -> None:
    """Raise unless positions are for the tensors of a problem, and the lengths have room for them."""
    for name, number in (("first_batch", places.first_batch), ("first_head", places.first_head)):
        if number < 0:
            raise ValueError(f"places.{name}: wanted at least 0, got {number}")
    if (places.queries is None) != (places.keys is None):
        missing = "queries" if places.queries is None else "keys"
        raise ValueError(f"places.{missing}: wanted positions, as the other side has them, got None")
    device = problem.query.device
    for name, positions, count, length in (
        ("queries", places.queries, problem.query.shape[2], places.q_len),
        ("keys", places.keys, problem.key.shape[2], places.k_len),
    ):
        if positions is None:
            continue
        if positions.dtype != torch.int32 or positions.shape != (count,):
            got = f"{positions.dtype} {shape_of(positions)}"
            raise ValueError(f"places.{name}: wanted torch.int32 [{count}], got {got}")
        if positions.device != device:
            raise ValueError(f"places.{name}: wanted the query's device, {device}, got {positions.device}")
        if not positions.is_contiguous():
            raise ValueError(f"places.{name}: wanted a dense tensor, got a stride of {positions.stride(0)}")
        if length < count:
            raise ValueError(f"places.{name[0]}_len: wanted at least the {count} {name} here, got {length}")
    if places.queries is not None and problem.layout is None:
        got = repr(problem.relation)
        raise ValueError(f"relation: wanted a Layout of the queries and keys at these places, got {got}")


def _fit_edges(problem: Problem) -> None:
    """Raise unless all pairs are edges, and each ``EdgeBias`` has a number for every edge."""
    counts = [term.edges for term in problem.terms if isinstance(term, KernelTerm) and term.edges is not None]
    if problem.relation is not None and counts:
        wanted = count_edges(problem.relation, "terms: EdgeBias")
        for count in counts:
            if count != wanted:
                raise ValueError(f"terms: EdgeBias.bias: wanted {wanted} numbers, one per edge, got {count}")
    layout = problem.layout
    if layout is not None:
        if layout.tiles:
            is_score = isinstance(problem.score, AdditiveScore)
            needed = "score: AdditiveScore" if is_score else "terms: EdgeBias"
            raise ValueError(f"{needed} wants a layout with edges only; build it with form='edges'")
        if any(count < layout.edge_numbers for count in counts):
            raise ValueError(
                f"terms: EdgeBias.bias: this layout names edges up to {layout.edge_numbers - 1}, "
                f"got {min(counts)} numbers"
            )


def _check_score(score: object) -> Score | None:
    if score is not None and not isinstance(score, (AdditiveScore, MultiLevel)):
        wanted = "None (the dot product), an AdditiveScore or a MultiLevel"
        raise TypeError(f"score: wanted {wanted}, got {words_of(score)}")
    return score


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Check kind, rank, dtype and device; return whether the batch dimension is missing."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_dense(name, x)
    rank = query.dim()
    if rank not in (3, 4):
        raise ValueError(f"query: wanted [B, H, Q, D] or [H, Q, D], got {rank} dimensions, {shape_of(query)}")
    dtype, device = query.dtype, query.device
    if dtype not in DTYPES:
        raise TypeError(f"query: wanted float32, float16, bfloat16 or float64, got {dtype}")
    for name, x in (("key", key), ("value", value)):
        if x.dim() != rank:
            raise ValueError(f"{name}: wanted {rank} dimensions like query, got {x.dim()}, {shape_of(x)}")
        if x.dtype != dtype:
            raise TypeError(f"{name}: wanted the query's dtype, {dtype}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name}: wanted the query's device, {device}, got {x.device}")
    return rank == 3


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool | None) -> None:
    B, H, _, D = query.shape
    key_batch, Hk, K, key_size = key.shape
    value_batch, value_heads, value_length, E = value.shape
    for name, batch in (("key", key_batch), ("value", value_batch)):
        if batch != B:
            raise ValueError(f"{name}: wanted the query's batch size, {B}, got {batch}")
    if value_heads != Hk:
        raise ValueError(f"value: wanted the key's head count, {Hk}, got {value_heads}")
    if enable_gqa is not None:
        enable_gqa = as_flag("enable_gqa", enable_gqa)
    if Hk != H:
        if Hk == 0 or H % Hk != 0:
            hint = guess_order(key, Hk if query.shape[2] == K else None)
            raise ValueError(f"key: wanted a head count that divides the query's {H}, got {Hk}{hint}")
        if enable_gqa is False:
            raise ValueError(f"key: wanted the query's {H} heads because of enable_gqa=False, got {Hk}")
    if value_length != K:
        raise ValueError(f"value: wanted the key's length, {K}, got {value_length}")
    if D == 0:
        raise ValueError(f"query: wanted a head size D of at least 1, got {shape_of(query)}")
    if key_size != D:
        raise ValueError(f"key: wanted the query's head size D, {D}, got {key_size}")
    if E == 0:
        raise ValueError(f"value: wanted a value size E of at least 1, got {shape_of(value)}")


def _check_scale(scale: float | None, query: Tensor, score: Score | None) -> float:
    if scale is None:
        return float(query.shape[-1] ** -0.5) if score is None else 1.0
    # A comparison, not math.isfinite: dynamo follows it for a scale that it traces as a symbol.
    if not (_is_number(scale) and -math.inf < scale < math.inf):
        raise _wrong_number("scale", "a finite number", scale)
    return scale


def _check_softcap(softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    if not (_is_number(softcap) and 0 <= softcap < math.inf):
        raise _wrong_number("softcap", "a finite number of at least 0", softcap)
    return softcap


def _check_dropout(dropout_p: float) -> float:
    if not (_is_number(dropout_p) and 0 <= dropout_p <= 1):
        raise _wrong_number("dropout_p", "a number from 0 to 1", dropout_p)
    return dropout_p


def _check_sink(sink: Tensor | None, query: Tensor) -> Tensor | None:
    if sink is None:
        return None
    heads = query.shape[1]
    if not isinstance(sink, Tensor):
        raise TypeError(f"sink: wanted a tensor [H], got {words_of(sink)}")
    check_dense("sink", sink)
    if sink.dim() != 1 or sink.shape[0] != heads:
        raise ValueError(f"sink: wanted a logit per query head, [{heads}], got {shape_of(sink)}")
    if sink.dtype not in DTYPES:
        raise TypeError(f"sink: wanted a floating-point tensor, got {sink.dtype}")
    if sink.device != query.device:
        raise ValueError(f"sink: wanted the query's device, {query.device}, got {sink.device}")
    return sink


def _check_terms(terms: Sequence[Term]) -> tuple[Term, ...]:
    if not isinstance(terms, (list, tuple)):
        raise TypeError(f"terms: wanted a list or tuple of score terms, got {words_of(terms)}")
    for i, term in enumerate(terms):
        if not callable(getattr(term, "value", None)):
            raise TypeError(
                f"terms[{i}]: wanted a score term, which has a method value(b, h, q, k), got {words_of(term)}"
            )
    return tuple(terms)


def _resolve(q_start: int | Literal["end"], query: Tensor, key: Tensor) -> int:
    if q_start == "end":
        return key.shape[2] - query.shape[2]
    if not isinstance(q_start, (int, torch.SymInt)) or isinstance(q_start, bool):
        raise TypeError(f"q_start: wanted an int or 'end', got {q_start!r}")
    return q_start


def _is_number(x: object) -> bool:
    return isinstance(x, (float, int, torch.SymFloat, torch.SymInt)) and not isinstance(x, bool)


def _wrong_number(name: str, wanted: str, got: object) -> TypeError | ValueError:
    if _is_number(got):
        return ValueError(f"{name}: wanted {wanted}, got {got}")
    return TypeError(f"{name}: wanted {wanted}, got {words_of(got)}")

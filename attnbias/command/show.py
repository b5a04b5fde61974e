"""``attnbias show``."""

from __future__ import annotations

import argparse
import inspect
import json

from ..layouts import Layout
from ..layouts.picture import MOST_PAIRS, cells_of
from ..recipes import RECIPES
from ..relations import Relation, parse
from ..relations.display import cells, lengths_of
from .options import start_of

MOST_DRAWN = 64  # pairs along a side, or tiles, that are drawn as text
_LENGTH = 16  # of a relation that fits any


def show(given: argparse.Namespace) -> int:
    """Draw a relation and its layout."""
    if given.relation == "recipes":
        return _list_recipes(given.json)
    relation = parse(given.relation, RECIPES)
    q_len, k_len = lengths_of(relation, given.q_len, given.k_len, _LENGTH)
    start = start_of(given.q_start)
    layout = Layout.build(relation, q_len, k_len, q_start=start, form=given.form, tile=given.tile)
    is_short = max(q_len, k_len) <= MOST_DRAWN
    pairs = relation.picture(q_len, k_len, start) if is_short else ""
    has_tiles = layout.q_tile.numel() > 1 or not is_short
    tiles = layout.picture() if has_tiles and max(q_len, k_len) <= MOST_DRAWN * layout.tile else ""
    kinds = {kind: path for kind, path in (("png", given.png), ("svg", given.svg)) if path}
    for kind, path in kinds.items():
        _save(relation, layout, path, kind)
    files = list(kinds.values())
    if given.json:
        found = {"relation": repr(relation), "q_len": q_len, "k_len": k_len, "q_start": layout.q_start}
        drawn = {"pairs": pairs.split("\n") if pairs else None, "tiles": tiles.split("\n") if tiles else None}
        print(json.dumps({**found, **drawn, "layout": dict(layout.stats()), "files": files}))
        return 0
    print(relation)
    if pairs:
        print(pairs)
    if tiles:
        print(f"tiles of {layout.tile}: # full, + partial, e edges, * both\n{tiles}")
    if not (is_short or tiles):
        print(f"{q_len:,} x {k_len:,} are too many to draw as text; --png FILE draws them")
    print(layout.stats())
    for path in files:
        print(f"wrote {path}")
    return 0


def _save(relation: Relation, layout: Layout, path: str, kind: str) -> None:
    """Draw the pairs if they are few, else the layout, whose tiles and edges then tell more."""
    from ..layouts.plot import save

    q_len, k_len = layout.q_len, layout.k_len
    if max(q_len, k_len) <= MOST_PAIRS:
        save(cells(relation, q_len, k_len, layout.q_start, 0, 0), path, repr(relation), kind)
    else:
        save(cells_of(layout, 0), path, repr(relation), kind)


def _list_recipes(as_json: bool) -> int:
    found = []
    for name, recipe in RECIPES.items():
        signature = inspect.signature(recipe)
        bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        call = f"{name}{signature.replace(parameters=bare, return_annotation=signature.empty)}"
        brief = (inspect.getdoc(recipe) or "").partition("\n")[0].replace("``", "")
        found.append({"name": name, "call": call, "what": brief})
    if as_json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{each['call']}\n    {each['what']}" for each in found))
    return 0

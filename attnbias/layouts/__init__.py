"""Layouts: a relation bound to lengths, as lists of tiles and edges."""

from .cache import LayoutCache, layout_cache
from .layout import Layout, Stats

__all__ = ["Layout", "LayoutCache", "Stats", "layout_cache"]

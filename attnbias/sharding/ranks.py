"""The ranks that a relation is sharded over, and whether they all hold the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch.distributed as dist

from ..arguments import as_count
from ..sets.predicate import Predicate

if TYPE_CHECKING:
    from ..sets.bound import Bound


class Ranks(NamedTuple):
    """One rank among several; without a group it is a plan on paper."""

    rank: int
    size: int
    group: Any  # a ProcessGroup or None


def find_ranks(mesh: Any, rank: int | None) -> Ranks:
    """Return the ranks of a mesh, a process group, the default group (None) or a plain number of ranks."""
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        size = as_count("mesh", mesh, 1)
        rank = as_count("rank", 0 if rank is None else rank)
        if rank >= size:
            raise ValueError(f"rank: wanted 0..{size - 1}, got {rank}")
        return Ranks(rank, size, None)
    if rank is not None:
        raise ValueError(f"rank: wanted None unless mesh is a number of ranks, got {rank!r}")
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "mesh: wanted an initialized torch.distributed (torchrun, init_process_group) "
            "or a number of ranks to plan for, got neither"
        )
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            example = f", such as mesh[{names[-1]!r}]" if names else ""
            raise ValueError(f"mesh: wanted one dimension{example}, got {mesh.ndim}: {list(mesh.shape)}")
        mesh = mesh.get_group()
    group = dist.group.WORLD if mesh is None else mesh
    if not isinstance(group, dist.ProcessGroup):
        wanted = "a DeviceMesh, a ProcessGroup, None or a number of ranks"
        raise TypeError(f"mesh: wanted {wanted}, got {type(mesh).__name__} {mesh!r}")
    mine = dist.get_rank(group)
    if mine < 0:
        raise ValueError("mesh: wanted a group that this process belongs to, got another")
    return Ranks(mine, dist.get_world_size(group), group)


def digest(bound: Bound) -> str:
    """Return a number for the content of a bound relation; rules of predicates are not read."""
    number = hashlib.sha256()
    for form in bound.forms:
        number.update(type(form).__name__.encode())
        rows = form.extent if isinstance(form, Predicate) else form
        for array in (rows.group, rows.ptr, *(getattr(rows, name) for name in rows.entries)):
            number.update(np.ascontiguousarray(array, np.int64).tobytes())
    return number.hexdigest()


def compare(ranks: Ranks, facts: Iterable[tuple[str, object]]) -> None:
    """Raise on every rank unless all have the same facts; name the first that differs from rank 0.

    Args:
        ranks: who takes part; all must.
        facts: names of what is compared, and texts or numbers.

    Raises:
        ValueError: naming the rank and the fact.
    """
    if ranks.size == 1 or ranks.group is None:
        return
    mine = [(name, str(value)) for name, value in facts]
    everyone: list[Any] = [None] * ranks.size
    dist.all_gather_object(everyone, mine, group=ranks.group)
    for rank, theirs in enumerate(everyone):
        for (name, first), (_, other) in zip(everyone[0], theirs, strict=False):
            if first != other:
                raise ValueError(
                    f"{name}: wanted the same on all ranks, got {first} on rank 0, {other} on rank {rank}"
                )

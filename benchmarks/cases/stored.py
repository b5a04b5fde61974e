"""Real graphs: three come with the package; Cora, CiteSeer and PubMed are read where a user has them.

A folder that is given is the only one searched. Otherwise the folder named by ATTNBIAS_GRAPHS is searched,
then the package's own. A folder holds ``cora.npz`` and the like, or the files that Planetoid published
(``ind.cora.graph``, ...), directly or as PyG keeps them (``Cora/raw/``).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import attnbias as ab

SHIPPED = ("airfoil", "minnesota", "mol1024")
PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
NAMES = (*PLANETOID, *SHIPPED)
VARIABLE = "ATTNBIAS_GRAPHS"
HERE = Path(__file__).parent

Ints = NDArray[np.int64]
Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class GraphData:
    """A graph: its edges, sources in row 0 and targets in row 1, and optional data."""

    name: str
    edge_index: Ints  # [2, E]
    num_nodes: int
    ptr: Ints | None = None  # [graphs + 1], the first node of each graph of a batch
    points: NDArray[np.float64] | None = None  # [N, d]

    @property
    def edges(self) -> int:
        return int(self.edge_index.shape[1])

    def relation(self) -> ab.Graph:
        """Make a new relation, so that no cached layout is used."""
        return ab.Graph(self.edge_index, num_nodes=self.num_nodes)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class NodeData:
    """Features and labels of a graph's nodes, in Planetoid's public split."""

    feature_ptr: Ints  # [N + 1]: features of node i are at feature_ptr[i] : feature_ptr[i + 1]
    feature_index: Ints
    feature_value: NDArray[np.float32]
    num_features: int
    label: Ints  # [N], -1 = none
    train: Ints  # node numbers
    val: Ints
    test: Ints


class MissingGraphError(FileNotFoundError):
    """No folder holds the graph."""


def load(name: str, folder: str | Path | None = None) -> GraphData:
    """Read a graph.

    Raises:
        MissingGraphError: if no folder has it; names the folders and what they may hold.
    """

    def read(path: Path) -> GraphData:
        with np.load(path) as file:
            ptr = file["ptr"].astype(np.int64) if "ptr" in file else None
            return GraphData(name, file["edge_index"].astype(np.int64), int(file["num_nodes"]), ptr)

    return _find(name, folder, f"{name}.npz", read, lambda raw: _planetoid_graph(name, raw))


def load_nodes(name: str, folder: str | Path | None = None) -> NodeData:
    """Read features, labels and split of Cora, CiteSeer or PubMed.

    Raises:
        MissingGraphError: if no folder has them.
    """

    def read(path: Path) -> NodeData:
        with np.load(path) as file:
            wide = {field: file[field].astype(np.int64) for field in file if field != "feature_value"}
        value = np.ones(len(wide["feature_index"]), np.float32)
        features = int(wide.pop("num_features"))
        return NodeData(feature_value=value, num_features=features, **wide)

    return _find(name, folder, f"{name}_nodes.npz", read, lambda raw: _planetoid_nodes(name, raw))


def folders(folder: str | Path | None = None) -> list[Path]:
    """Return the folders to search; a folder that is given is the only one."""
    if folder:
        return [Path(folder)]
    named = os.environ.get(VARIABLE)
    return [*([Path(named)] if named else []), HERE / "data"]


def _find(
    name: str,
    folder: str | Path | None,
    file: str,
    read: Callable[[Path], Found],
    read_raw: Callable[[Path], Found],
) -> Found:
    if name not in NAMES:
        raise ValueError(f"name: wanted one of {', '.join(NAMES)}, got {name!r}")
    looked = folders(folder)
    for place in looked:
        if (place / file).is_file():
            return read(place / file)
        for raw in _raw_folders(place, name):
            if (raw / f"ind.{name}.graph").is_file():
                return read_raw(raw)
    wanted = file if name in SHIPPED else f"{file} or Planetoid's files (ind.{name}.graph and the like)"
    raise MissingGraphError(
        f"{name}: no folder has {wanted}; searched {', '.join(map(str, looked))}. "
        f"Pass a folder that has it, or set {VARIABLE}."
    )


# -- Planetoid's files ------------------------------------------------------------------------------


def _raw_folders(folder: Path, name: str) -> Iterator[Path]:
    yield folder
    if name in PLANETOID:
        yield folder / "raw"
        yield folder / PLANETOID[name] / "raw"


class _ArraysOnly(pickle.Unpickler):
    """Read Planetoid's pickles, which could run any code: only array types are allowed."""

    KNOWN = ("numpy", "scipy.sparse")
    BUILTINS = ("collections.defaultdict", "builtins.list", "builtins.dict", "_codecs.encode")

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins"}.get(module, module)
        inside = any(module == known or module.startswith(f"{known}.") for known in self.KNOWN)
        if not inside and f"{module}.{name}" not in self.BUILTINS:
            raise pickle.UnpicklingError(f"{module}.{name}: wanted only arrays, lists and dicts in this file")
        return super().find_class(module, name)


def _unpickle(raw: Path, name: str, part: str) -> Any:
    with (raw / f"ind.{name}.{part}").open("rb") as file:
        return _ArraysOnly(file).load()


def _planetoid_graph(name: str, raw: Path) -> GraphData:
    """Read each pair once, without self-loops, as PyG does: 10,556 edges of Cora."""
    neighbours: dict[int, list[int]] = _unpickle(raw, name, "graph")
    nodes = len(neighbours)
    source = np.repeat(list(neighbours), [len(each) for each in neighbours.values()])
    target = np.concatenate([np.zeros(0, np.int64), *map(np.asarray, neighbours.values())]).astype(np.int64)
    codes = np.unique(target * nodes + source)
    target, source = np.divmod(codes, max(nodes, 1))
    apart = source != target
    return GraphData(name, np.stack((source, target))[:, apart], nodes)


def _planetoid_nodes(name: str, raw: Path) -> NodeData:
    """Read node data: first the rows of ``allx``, then those of ``tx`` at the places in ``test.index``.

    CiteSeer lacks some test nodes: they get no feature and the label -1.
    """
    from scipy.sparse import coo_matrix, csr_matrix

    known, unseen, labels, unseen_labels, training = (
        _unpickle(raw, name, part) for part in ("allx", "tx", "ally", "ty", "y")
    )
    place = np.loadtxt(raw / f"ind.{name}.test.index", np.int64, ndmin=1)
    first, nodes = known.shape[0], max(known.shape[0], int(place.max(initial=-1)) + 1)
    known, unseen = coo_matrix(known), coo_matrix(unseen)
    rows = np.concatenate((known.row, place[unseen.row]))
    columns = np.concatenate((known.col, unseen.col))
    values = np.concatenate((known.data, unseen.data)).astype(np.float32)
    features = csr_matrix((values, (rows, columns)), shape=(nodes, known.shape[1]))
    label = np.full(nodes, -1)
    for at, one_hot in ((slice(first), np.asarray(labels)), (place, np.asarray(unseen_labels))):
        label[at] = np.where(one_hot.any(1), one_hot.argmax(1), -1)
    trained = len(training)
    return NodeData(
        features.indptr.astype(np.int64),
        features.indices.astype(np.int64),
        features.data,
        known.shape[1],
        label,
        train=np.arange(trained),
        val=np.arange(trained, trained + 500),
        test=np.sort(place),
    )

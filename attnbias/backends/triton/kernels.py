"""What ``backend`` takes from the kernels in every call: an import statement there costs a microsecond."""

from ...kernels.edges.forward import edges_forward
from ...kernels.edges.launch import Additive, Score
from ...kernels.edges.rows import edges_backward
from ...kernels.tiles.backward_key import tiles_backward_key
from ...kernels.tiles.backward_query import tiles_backward_query
from ...kernels.tiles.extras import PLAIN
from ...kernels.tiles.forward import tiles_forward
from ...kernels.tiles.row_sums import row_sums

__all__ = [
    "PLAIN",
    "Additive",
    "Score",
    "edges_backward",
    "edges_forward",
    "row_sums",
    "tiles_backward_key",
    "tiles_backward_query",
    "tiles_forward",
]

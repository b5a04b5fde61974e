"""Import what ``backend`` takes from the kernels: an import statement in a call costs a microsecond."""

from ...kernels.edges.columns import edge_columns
from ...kernels.edges.forward import edge_forward, edges_forward
from ...kernels.edges.launch import Additive, Score, edge_merge
from ...kernels.edges.rows import edge_rows, edges_backward
from ...kernels.launch.launch import precision
from ...kernels.launch.passes import Passes, run_pass
from ...kernels.tiles.backward_key import backward_key_kernel, tiles_backward_key
from ...kernels.tiles.backward_query import backward_query_kernel, tiles_backward_query
from ...kernels.tiles.extras import PLAIN
from ...kernels.tiles.forward import forward_kernel, tiles_forward
from ...kernels.tiles.pieces import add_up_kernel, merge_kernel
from ...kernels.tiles.row_sums import delta_kernel, row_sums

FORWARD = forward_kernel, merge_kernel, edge_forward, edge_merge
BACKWARD = (
    *(delta_kernel, backward_query_kernel, backward_key_kernel, add_up_kernel),
    *(edge_rows, edge_columns, edge_merge),
)

__all__ = [
    "BACKWARD",
    "FORWARD",
    "PLAIN",
    "Additive",
    "Passes",
    "Score",
    "edges_backward",
    "edges_forward",
    "precision",
    "row_sums",
    "run_pass",
    "tiles_backward_key",
    "tiles_backward_query",
    "tiles_forward",
]

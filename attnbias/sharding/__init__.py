"""Relations over the ranks of torch.distributed.

``shard``     the public value and function; ``arguments`` checks what it is given
``split``     which rank holds which tokens; ``balance`` makes the one by counted work
``needs``     counted work, and the keys that each rank's queries need
``plan``      who sends what to whom, for all ranks; and for one, its lists
``exchange``  one all-to-all of keys and values, and of their gradients back; ``traced`` has it as an op
``attend``    a call of attention on a shard; ``heads`` does it by exchanging heads for tokens
``counts``    bytes and work by rank, beside other ways to exchange; ``report`` prints and draws them
``dtensor``   a call of attention on DTensors
``cache``     shards made once, for those who are given a relation and a mesh
``gather``    a tensor of all ranks
``graphs``    nodes to ranks by edges, and the rows of a rank's halo, for layers over graphs
``ranks``     meshes and groups, and whether all ranks hold the same relation

The plan is made on the host from the relation alone, and is exact: its cost goes by ranges and edges. Nothing
below this folder knows ranks. ``attention`` knows a shard by its method ``attend_sharded``, and hands calls
on DTensors to the function that is set here.
"""

from typing import Any

from ..attention import TAKERS
from .shard import Shard, shard

__all__ = ["Shard", "shard"]


def _take(*tensors: Any, **given: Any) -> Any:
    from .dtensor import attend_dtensors  # slow to import, and only those who have DTensors need it

    return attend_dtensors(*tensors, **given)


TAKERS["DTensor"] = _take

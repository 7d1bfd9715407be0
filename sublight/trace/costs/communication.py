"""Collectives in traces: the buffers that this rank hands in and gets back, and the size of its group."""

from __future__ import annotations

import re

from sublight.cost import communication, size_bytes
from sublight.cost.dtypes import name_dtype
from sublight.cost.tensor import Tensor
from sublight.trace.costs.shapes import Args, OpCost, Unknown, op_cost, tensors_text

NAME = re.compile(
    r"^record_param_comms$|^nccl:|^c10d::|^_c10d_functional::|^symm_mem::|^vllm::(all_reduce|all_gather|reduce_scatter)"
)
# as PyTorch names what its process groups run; unequal splits (all_to_allv) may leave a rank with little to send
NAMES = {
    **{"allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "_allgather_base": "all_gather"},
    **{"allgather": "all_gather", "all_gather": "all_gather", "allgather_into_tensor_coalesced": "all_gather"},
    **{"reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter"},
    **{"reduce_scatter_tensor_coalesced": "reduce_scatter", "all_to_all": "all_to_all", "send": "send", "recv": "recv"},
}


def collective(args: Args) -> OpCost:
    recorded = args.detail.collective
    dtype = name_dtype(str(recorded.get("dtype", "")))
    sent, received = recorded.get("in_elements"), recorded.get("out_elements")
    if dtype and isinstance(sent, int) and isinstance(received, int) and min(sent, received) >= 0:
        ranks = recorded.get("group_size")
        name = str(recorded.get("name") or args.name)
        cost = communication.collective(
            NAMES.get(name, name),
            size_bytes(sent, dtype),
            size_bytes(received, dtype),
            ranks if isinstance(ranks, int) else 0,
        )
        return op_cost(args, "communication", cost, dtype=dtype, shape=f"{name} of {sent}")
    buffers = [args.tensors(place) or _one(args.tensor(place)) for place in range(len(args))]
    filled = [group for group in buffers if group]
    if not filled:
        raise Unknown
    apart = len(filled) > 1 and any(word in args.name for word in ("gather", "scatter", "alltoall", "all_to_all"))
    out, given = filled[0], filled[1] if apart else filled[0]
    cost = communication.collective("", sum(t.real_bytes for t in given), sum(t.bytes for t in out), ranks=0)
    return op_cost(args, "communication", cost, dtype=given[0].dtype, shape=tensors_text(given))


def _one(tensor: Tensor | None) -> tuple[Tensor, ...]:
    return (tensor,) if tensor is not None and tensor.shape else ()

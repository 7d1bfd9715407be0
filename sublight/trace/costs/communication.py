"""Collectives: the bytes of the buffers that this rank hands in and gets back; what links carry is another matter."""

from __future__ import annotations

import re

from sublight.cost import ITEMSIZE, Cost
from sublight.cost.tensor import Tensor
from sublight.trace.costs.shapes import Args, OpCost, Unknown, tensors_text

NAME = re.compile(
    r"^record_param_comms$|^nccl:|^c10d::|^_c10d_functional::|^symm_mem::|^vllm::(all_reduce|all_gather|reduce_scatter)"
)
_DTYPES = {  # as the profiler spells them here
    **{"float": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64"},
    **{"long": "int64", "int": "int32", "short": "int16", "char": "int8", "byte": "uint8", "bool": "bool"},
    **{"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"},
}


def collective(args: Args) -> OpCost:
    told = args.detail.collective
    dtype = _DTYPES.get(str(told.get("dtype", "")).lower())
    sent, received = told.get("in_elements"), told.get("out_elements")
    if dtype and isinstance(sent, int) and isinstance(received, int) and min(sent, received) >= 0:
        item = ITEMSIZE[dtype]
        return _cost(args, dtype, sent * item, received * item, f"{told.get('name') or args.name} of {sent}")
    buffers = [args.tensors(place) or _one(args.tensor(place)) for place in range(len(args))]
    filled = [group for group in buffers if group]
    if not filled:
        raise Unknown
    apart = len(filled) > 1 and any(word in args.name for word in ("gather", "scatter", "alltoall", "all_to_all"))
    out, given = filled[0], filled[1] if apart else filled[0]
    dtype, text = given[0].dtype, tensors_text(given)
    return _cost(args, dtype, sum(t.real_bytes for t in given), sum(t.bytes for t in out), text)


def _one(tensor: Tensor | None) -> tuple[Tensor, ...]:
    return (tensor,) if tensor is not None and tensor.shape else ()


def _cost(args: Args, dtype: str, read: int, written: int, shape: str) -> OpCost:
    return OpCost(
        family="communication",
        cost=Cost(read_bytes=read, write_bytes=written),
        dtype=dtype,
        shape=shape,
        output_bytes=written,
        inplace=args.inplace,
    )

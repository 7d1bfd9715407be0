"""What the profiler left out of an op's arguments and other events of the same trace tell.

It writes no shapes of a list of more than 30 tensors, which is what an optimizer takes, and none of the indices of
`x[indices]`; before 2022 it wrote no strides of a convolution. But a kernel's grid tells how many elements it ran over,
and the gradient that autograd hands to an op's backward node has the shape of the op's result.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from sublight.trace.record import NONE, Detail, Ints, Kind, Trace

CHUNK = 65536  # elements that a block of PyTorch's multi_tensor_apply takes, of one tensor
# tensors that one launch takes at most, by how many lists there are, where it has 4 KB or 32 KB for its arguments
FEW_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
MANY_TENSORS = {1: 770, 2: 448, 3: 336, 4: 252, 5: 210}
FEW_BLOCKS = 320  # of such a launch, with 4 KB
_LISTS = re.compile(r"multi_tensor_apply_kernel<.*?TensorList\w*Metadata<(?:[^<>]*, )?(?:\(int\))?(\d)")
_INDEX = re.compile(r"index_elementwise_kernel<(?:\(int\))?(\d+), (?:\(int\))?(\d+)")
_GATHER = re.compile(r"vectorized_gather_kernel<")
_OVER_LISTS = re.compile(r"^aten::(_foreach_|_amp_foreach_|_fused_(adam|adamw|sgd|adagrad))")
_INDEXED = ("aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put")
_CONVOLUTIONS = re.compile(r"^aten::(cudnn_|miopen_|mkldnn_|_)?conv(olution|[123]d)")
_NODES = re.compile(r"^(Index|\w*Conv\w*)Backward\d*$")
NEAR = 8  # ops that may be open at once around a launch: few nest, and few threads launch


def complete(trace: Trace) -> Trace:
    """The same trace, with `Detail.out` and `Detail.elements` of ops that need them."""
    more: dict[int, dict[str, Any]] = defaultdict(dict)
    for row, shape in _results(trace):
        more[row]["out"] = shape
    for row, elements in _elements(trace).items():
        more[row]["elements"] = elements
    if not more:
        return trace
    details, detail = list(trace.details), trace.detail.copy()
    places: dict[tuple[int, str], int] = {}
    for row, fields in more.items():
        key = (int(trace.detail[row]), str(fields))
        if key not in places:
            places[key] = len(details)
            details.append(msgspec.structs.replace(trace.details[key[0]], **fields))
        detail[row] = places[key]
    return dataclasses.replace(trace, details=tuple(details), detail=detail)


def list_count(kernel: str) -> int | None:
    """How many lists of tensors a kernel of PyTorch's multi_tensor_apply goes over.

    >>> list_count("void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdam<float, 4>>(T)")
    4
    """
    match = _LISTS.search(kernel)
    return int(match[1]) if match else None


def least_elements(kernel: str, blocks: int, *, few: bool = False) -> int:
    """Elements of one of the tensors that a launch of so many blocks ran over at least; 0: nothing is known.

    `few`: a launch over lists is known to have 4 KB for its arguments, so it takes few tensors.

    >>> least_elements("void at::native::index_elementwise_kernel<128, 4, X>(long)", 3)
    1025
    """
    if blocks < 1:
        return 0
    if (lists := list_count(kernel)) is not None:
        tensors = FEW_TENSORS if few else MANY_TENSORS
        partial = min(blocks, tensors.get(lists, blocks))  # the last block of each tensor may have one element
        return (blocks - partial) * CHUNK + partial
    if match := _INDEX.search(kernel):
        return (blocks - 1) * int(match[1]) * int(match[2]) + 1
    return 0


def _elements(trace: Trace) -> dict[int, int]:
    """For each op over lists or indices that were not recorded the elements that its kernels ran over."""
    wanted = trace.rows_named(lambda name: bool(_OVER_LISTS.match(name)) or name in _INDEXED)
    wanted = wanted[[_lacks_shapes(trace.detail_of(row)) for row in wanted.tolist()]] if len(wanted) else wanted
    kernels = trace.rows_named(lambda name: any(word.search(name) for word in (_LISTS, _INDEX, _GATHER)))
    if not len(wanted) or not len(kernels):
        return {}
    launches: dict[int, list[tuple[str, int]]] = defaultdict(list)  # by op: kernels and their blocks
    for ops, row in zip(_ops_around(trace, wanted, kernels), kernels.tolist(), strict=True):
        grid = trace.detail_of(row).grid
        for op in ops:
            launches[op].append((trace.name_of(row), grid[0] if grid else 0))
    few = _takes_few(list(launches.values()))
    least = {op: sum(_of_launch(trace, op, *each, few=few) for each in mine) for op, mine in launches.items()}
    blocks = {op: sum(count for _, count in mine) for op, mine in launches.items()}
    for op, tensors in _tensor_counts(trace, wanted, blocks):
        least[op] = max(least[op], (blocks[op] - tensors) * CHUNK + tensors)
    return {op: elements for op, elements in least.items() if elements > 0}


def _takes_few(launches: list[list[tuple[str, int]]]) -> bool:
    """Whether this PyTorch's launches over lists are the small ones: none is larger, and one that was full, because
    its op went on with another, is as large as they get.
    """
    over_lists = [[blocks for kernel, blocks in mine if list_count(kernel)] for mine in launches]
    largest = max((blocks for mine in over_lists for blocks in mine), default=0)
    return largest == FEW_BLOCKS and any(len(mine) > 1 and FEW_BLOCKS in mine for mine in over_lists)


def _tensor_counts(trace: Trace, ops: Ints, blocks_of: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Fused optimizers' updates and how many parameters they have: the call before each adds 1 to as many step counts,
    tensors of one element with a block each.
    """
    before: dict[int, int] = {}  # by thread: the op over lists that ran last
    for op in ops.tolist():
        lane, name = int(trace.lane[op]), trace.name_of(op)
        last = before.get(lane, NONE)
        if name.startswith("aten::_fused_") and last in blocks_of and op in blocks_of and _counts_steps(trace, last):
            yield op, min(blocks_of[last], blocks_of[op])
        before[lane] = op


def _counts_steps(trace: Trace, op: int) -> bool:
    one = trace.detail_of(op).concrete[1:2]
    return trace.name_of(op) == "aten::_foreach_add_" and one in (("1",), ("1.",))


def _of_launch(trace: Trace, op: int, kernel: str, blocks: int, *, few: bool) -> int:
    if _GATHER.search(kernel):  # a block a row of the result
        dims = trace.detail_of(op).dims
        x = dims[0] if dims else ()
        rows = isinstance(x, tuple) and len(x) > 0 and all(type(size) is int and size >= 0 for size in x)
        return blocks * math.prod(x[1:]) if rows else 0
    return least_elements(kernel, blocks, few=few)


def _lacks_shapes(detail: Detail) -> bool:
    """Whether a list among the arguments has no shapes; `index` has them in its second argument, of no type."""
    lists = [at for at, kind in enumerate(detail.types) if kind == "TensorList"] or [1]
    return any(at < len(detail.dims) and detail.dims[at] == () for at in lists[:2])


def _ops_around(trace: Trace, ops: Ints, kernels: Ints) -> list[list[int]]:
    """For each kernel those of `ops` (in order of start) that its launch lies in."""
    calls = trace.of_kind(Kind.RUNTIME)
    by_correlation = dict(zip(trace.correlation[calls].tolist(), calls.tolist(), strict=True))
    by_correlation.pop(NONE, None)
    launches = [by_correlation.get(number, NONE) for number in trace.correlation[kernels].tolist()]
    last = np.searchsorted(trace.start_ns[ops], trace.start_ns[launches], side="right").tolist()
    around: list[list[int]] = []
    for launch, place in zip(launches, last, strict=True):
        near = ops[max(0, place - NEAR) : place].tolist() if launch != NONE else []
        inside = [
            op for op in near if trace.lane[op] == trace.lane[launch] and trace.end_ns[op] >= trace.end_ns[launch]
        ]
        around.append(inside)
    return around


def _results(trace: Trace) -> list[tuple[int, tuple[int, ...]]]:
    """Ops whose result's shape their arguments do not tell, and the shape, from their backward node."""
    wanted = trace.rows_named(lambda name: name == "aten::index" or bool(_CONVOLUTIONS.match(name)))
    wanted = wanted[trace.sequence[wanted] != NONE]
    lacking = [row for row in wanted.tolist() if not any(trace.detail_of(row).concrete)]
    gradients = _gradients(trace) if lacking else {}
    results = []
    for kind in ("Index", "Conv"):
        mine = [row for row in lacking if (trace.name_of(row) == "aten::index") == (kind == "Index")]
        for row in _last_of_each(trace, mine):
            shape = gradients.get((kind, int(trace.sequence[row])))
            if shape:
                results.append((row, shape))
    return results


def _gradients(trace: Trace) -> dict[tuple[str, int], tuple[int, ...]]:
    """The shape that a backward node was handed, by its kind and sequence number; () where two threads differ."""
    nodes = trace.rows_named(lambda name: bool(_NODES.match(name)))
    shapes: dict[tuple[str, int], tuple[int, ...]] = {}
    for row in nodes[(trace.sequence[nodes] != NONE) & (trace.kind[nodes] == Kind.OP)].tolist():
        dims = trace.detail_of(row).dims
        shape = dims[0] if dims and isinstance(dims[0], tuple) and all(type(size) is int for size in dims[0]) else ()
        key = ("Index" if trace.name_of(row).startswith("Index") else "Conv", int(trace.sequence[row]))
        shapes[key] = shape if shapes.get(key, shape) == shape else ()
    return shapes


def _last_of_each(trace: Trace, rows: list[int]) -> list[int]:
    """Of each sequence number the last op, with what it encloses: an op without a gradient leaves the number to the
    next one, so that the earlier ones are not the node's.
    """
    last: dict[int, int] = {}  # by number: the outermost op that started last
    for row in rows:
        number = int(trace.sequence[row])
        if number not in last or trace.end_ns[row] > trace.end_ns[last[number]]:
            last[number] = row
    return [row for row in rows if trace.start_ns[row] >= trace.start_ns[last[int(trace.sequence[row])]]]

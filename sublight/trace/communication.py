"""Which kernels talk to other devices, by their names: collectives of NCCL and its kin, and those of engines."""

from __future__ import annotations

import functools
import re

import numpy as np

from sublight.trace.record import Mask, Trace

_NAMES = re.compile(
    r"nccl|rccl|msccl|oneccl|nvshmem|rocshmem|symm_?mem|multimem"  # libraries, and what stands on them
    r"|deep_?ep::|(internode|intranode)(_ll)?::|notify_(dispatch|combine)"  # DeepEP: dispatch and combine of experts
    r"|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce|quick_?reduce|(one|two)_?shot"
    r"|userbuffers|lamport|moe_?a2a|pplx|send_?recv|(^|[_:])a2a_",
    re.IGNORECASE,
)


@functools.lru_cache(maxsize=16384)
def is_communication(kernel_name: str) -> bool:
    """What a function takes as its arguments says nothing of what it does.

    >>> is_communication("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)")
    True
    >>> is_communication("void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*, float*)")
    True
    >>> is_communication("void at::native::reduce_kernel<512, 1>(float)"), is_communication("gather_kernel(ncclComm)")
    (False, False)
    """
    return _NAMES.search(kernel_name.partition("(")[0] or kernel_name) is not None


def named(trace: Trace) -> Mask:
    """By the trace's names: which of them are kernels that communicate."""
    return np.fromiter((is_communication(name) for name in trace.names), dtype=bool, count=len(trace.names))

"""Collectives over the links between GPUs: the faster of a ring and a tree, bytes over a rate and a hop's latency.

Nothing here was measured: the rates are the vendors', the share of them that a collective reaches and a hop's latency
are assumptions, and every figure made of them is called analytic.
"""

from __future__ import annotations

import math

from sublight.cost.dtypes import size_bytes
from sublight.errors import BadInput
from sublight.predict.machine import Machine
from sublight.predict.operation import Operation

SHARE = 0.8  # of the vendor's rate
HOP_S = 3e-6  # between two GPUs of one machine, the launch of its part of the collective included
NODE_GPUS = 8  # of one machine; between machines the network carries


def seconds(op: Operation, machine: Machine) -> float:
    rate = machine.link_bytes_per_s
    if not rate:
        raise BadInput(f"no link of {machine.gpu.name} to other GPUs is known: use one GPU, or give nvlink_bytes_per_s")
    span = op.shape.get("span", op.shape["ranks"])
    if span > NODE_GPUS:
        if not machine.network_bytes_per_s:
            raise BadInput(f"{span} GPUs are more than one machine's {NODE_GPUS}: give --network, as in --network 50GB")
        rate = min(rate, machine.network_bytes_per_s)
    size = size_bytes(op.shape["numel"], op.dtype)
    return collective_s(op.op, size, op.shape["ranks"], rate)


def collective_s(op: str, size: int, ranks: int, rate: float) -> float:
    """`size`: bytes of the whole tensor.

    >>> collective_s("all_reduce", 8, 8, 450e9) < 20e-6, collective_s("all_reduce", 8, 1, 450e9)
    (True, 0.0)
    """
    if ranks < 2:
        return 0.0
    share = (ranks - 1) / ranks
    ring = 2 if op == "all_reduce" else 1  # passes: reduce and scatter, then gather
    by_ring = ring * (share * size / (SHARE * rate) + (ranks - 1) * HOP_S)
    if op == "send":
        return size / (SHARE * rate) + HOP_S
    if op == "all_to_all":
        return share * size / (SHARE * rate) + HOP_S
    if op != "all_reduce":
        return by_ring
    depth = math.ceil(math.log2(ranks))
    by_tree = 2 * (size / (SHARE * rate) + depth * HOP_S)
    return min(by_ring, by_tree)

"""Collectives: the bytes of the buffers that one rank hands in and gets back, and those that its links must carry.

Of `ranks` n, each holds or wants its share of what the others have: a rank cannot do with sending, or with getting,
less than the share that it lacks. A switch that adds on the way (NVLink SHARP) leaves an all-reduce at that; a ring
without one sends twice as much, which an ideal implementation need not.
"""

from __future__ import annotations

from collections.abc import Callable

from sublight.cost.record import Cost, Direction, Shape
from sublight.cost.tensor import dense


def all_reduce_bytes(sent: int, received: int, ranks: int) -> int:
    return sent * (ranks - 1) // ranks  # all but the part that is added up here


def all_gather_bytes(sent: int, received: int, ranks: int) -> int:
    return received * (ranks - 1) // ranks  # what the others had


def reduce_scatter_bytes(sent: int, received: int, ranks: int) -> int:
    return sent * (ranks - 1) // ranks  # what the others keep


def all_to_all_bytes(sent: int, received: int, ranks: int) -> int:
    return max(sent, received) * (ranks - 1) // ranks  # a rank's own part stays, if the parts are equal


def send_bytes(sent: int, received: int, ranks: int) -> int:
    return max(sent, received)


def unknown_bytes(sent: int, received: int, ranks: int) -> int:
    """A rank may be the root of a broadcast, a gather, a reduction, or far from it: nothing is certain."""
    return 0


LINK_BYTES: dict[str, Callable[[int, int, int], int]] = {
    "all_reduce": all_reduce_bytes,
    "all_gather": all_gather_bytes,
    "reduce_scatter": reduce_scatter_bytes,
    "all_to_all": all_to_all_bytes,
    "send": send_bytes,
    "recv": send_bytes,
}


def collective(name: str, sent: int, received: int, ranks: int) -> Cost:
    """Read what is handed in, write what comes back; `ranks` 0 or 1: nothing is known of the links, or none is used.

    >>> collective("all_reduce", 800, 800, ranks=8).link_bytes, collective("all_gather", 100, 800, ranks=8).link_bytes
    (700, 700)
    """
    carried = LINK_BYTES.get(name, unknown_bytes)(sent, received, ranks) if ranks > 1 else 0
    return Cost(read_bytes=sent, write_bytes=received, link_bytes=carried)


def all_reduce(shape: Shape, dtype: str, direction: Direction) -> Cost:
    size = dense(dtype, shape["numel"]).bytes
    return collective("all_reduce", size, size, shape["ranks"])


def all_gather(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """`numel` is of all ranks together, as of the next two."""
    size = dense(dtype, shape["numel"]).bytes
    return collective("all_gather", size // shape["ranks"], size, shape["ranks"])


def reduce_scatter(shape: Shape, dtype: str, direction: Direction) -> Cost:
    size = dense(dtype, shape["numel"]).bytes
    return collective("reduce_scatter", size, size // shape["ranks"], shape["ranks"])


def all_to_all(shape: Shape, dtype: str, direction: Direction) -> Cost:
    size = dense(dtype, shape["numel"]).bytes
    return collective("all_to_all", size, size, shape["ranks"])

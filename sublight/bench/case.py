"""What there is to measure: ops × shapes × data types × directions, and the providers of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sublight.cost import DTYPES, Cost, Direction, Shape
from sublight.errors import BadInput, nearest
from sublight.limits.run import Machine
from sublight.op import Op

DISPATCHED, UNDISPATCHED = "sublight", "launch"  # what a user's call gets; our kernels whether or not they win
ALWAYS = (DISPATCHED, "torch")
LADDER = "ladder"  # as a provider's name: every named step of ours
CPU_BYTES = 2**25  # the batch is cut to so many bytes on a CPU, where a GPU's sizes would take minutes
CPU_FLOPS = 1e10  # an op with more arithmetic in one entry of its batch gets a test shape there


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One table row before it is measured, less its provider."""

    op: Op
    shape: Shape
    dtype: str
    direction: Direction

    @property
    def cost(self) -> Cost:
        return self.op.cost(self.shape, self.dtype, self.direction)


def cases(
    ops: Sequence[Op],
    machine: Machine,
    shapes: Sequence[str],
    dtypes: Sequence[str],
    directions: Sequence[Direction],
    quick: bool,
) -> list[Case]:
    """The cases to measure. Unless given, the op's own shapes in bf16; on a CPU small ones in fp32."""
    wanted = []
    for op in ops:
        first = "bfloat16" if machine.kind == "cuda" else DTYPES[0]
        names = [op.parse_dtype(dtype) for dtype in dtypes] or [first if first in op.dtypes else next(iter(op.dtypes))]
        mine: Sequence[Shape] = [op.parse_shape(words) for words in shapes] or op.shapes
        if not shapes and machine.kind == "cpu":
            mine = _for_cpu(op, quick)
        elif not shapes and quick:
            mine = mine[::4]
        for shape in mine:
            for dtype in names:
                for direction in directions or op.directions:
                    case = Case(op=op.at(shape), shape=shape, dtype=dtype, direction=direction)
                    if direction == "fwd" or (op.launch_backward and case.cost.bytes):  # no bytes: the gradient is dy
                        wanted.append(case)
    return wanted


def _for_cpu(op: Op, quick: bool) -> list[Shape]:
    """The op's first shapes with a smaller batch, so that a CPU finishes in seconds; else its largest test shape."""
    dtype = next(iter(op.dtypes))
    if op.batch not in op.keys or op.cost({**op.shapes[0], op.batch: 1}, dtype, "fwd").total_flops > CPU_FLOPS:
        return [max(op.test_shapes, key=lambda shape: op.cost(shape, dtype, "fwd").bytes)]
    smaller: list[Shape] = []
    for shape in op.shapes[:1] if quick else op.shapes[1:6:2]:
        per_entry = op.cost(shape, dtype, "fwd").bytes / shape[op.batch]
        smaller.append({**shape, op.batch: max(1, min(shape[op.batch], int(CPU_BYTES / per_entry)))})
    return smaller


def known_providers(op: Op) -> tuple[str, ...]:
    """What can be timed: the call, the steps of our ladder, PyTorch, and whoever else the record names."""
    ladder = [name for name in op.providers if name != DISPATCHED]
    return tuple(dict.fromkeys((DISPATCHED, UNDISPATCHED, *ladder, "torch", "compile", *op.peers)))


def check_providers(ops: Sequence[Op], against: Sequence[str]) -> None:
    from sublight.ops import OPS

    known = list(dict.fromkeys(name for op in (*ops, *OPS) for name in known_providers(op)))
    for name in against:
        if name not in (*known, LADDER):
            raise BadInput(f"unknown provider {name!r}: did you mean {nearest(name, [*known, LADDER])}?")


def providers(op: Op, against: Sequence[str]) -> tuple[str, ...]:
    """The providers to time: the call and PyTorch always; others named in `against`, the whole ladder by `ladder`."""
    wanted = {*ALWAYS, *against, *(op.providers if LADDER in against else ())}
    # an unknown provider gets a row that says so
    missing = [name for name in against if name not in (*known_providers(op), LADDER)]
    return (*(name for name in known_providers(op) if name in wanted), *missing)

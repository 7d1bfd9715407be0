"""What an op is: one mathematical function, its reference, its kernels, its inputs, its cost, its shapes.

Everything that tests, times, draws or predicts an op reads this record; nothing about an op is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sublight import units
from sublight.correct import Call, Inputs
from sublight.cost import Cost, Direction, Shape, shape_text
from sublight.errors import BadInput
from sublight.timing import Thunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A Triton kernel of ours and the GPUs it is for; what it is compiled with is read off its launches."""

    jit: Any  # triton.JITFunction
    targets: tuple[int, ...] = (80, 90, 100, 120)
    spills: str = ""  # why a spill is accepted here; empty: a spill is an error
    narrow: str = ""  # why loads or stores below 4 bytes a lane are accepted here; empty: they are an error

    @property
    def name(self) -> str:
        return str(self.jit.__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which implementation a call gets, and why."""

    provider: Literal["sublight", "torch"]
    kernel: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # an op is itself: there is one of each
class Op:
    """One mathematical function and everything known of it."""

    name: str
    summary: str
    reference: Call  # PyTorch's own composition: the yardstick in its data type, the truth in float64
    call: Call  # what the user calls: dispatches to our kernel where it wins
    launch: Call  # our kernel, always, on whatever device Triton runs: values
    launch_backward: Call | None  # (*grads of the outputs, *inputs) -> a gradient for each of `wrt`, by our kernels
    choose: Callable[..., Choice]  # what `call` does with these arguments, and why
    inputs: Callable[[Shape, str, str, int], Inputs]  # (shape, dtype, device, seed)
    cost: Callable[[Shape, str, Direction], Cost]
    kernels: tuple[Kernel, ...]
    shapes: tuple[Shape, ...]  # what `bench` times unless told
    test_shapes: tuple[Shape, ...]  # cross every block boundary and take every branch
    peers: Mapping[str, Callable[..., Thunk]] = field(default_factory=dict)  # tensors in, their call out
    wrt: tuple[int, ...] | None = None  # the inputs that have a gradient; None: every one of floating point
    directions: tuple[Direction, ...] = ("fwd", "bwd")  # what `bench` times; backward only where there is one
    writes: tuple[int, ...] = ()  # the inputs that a call writes into: whoever checks the op hands it copies
    independent_rows: bool = True  # what a row becomes does not depend on where it stands (a random mask does)
    variants: tuple[Call, ...] = ()  # `launch` with options that take a kernel of their own: all compiled offline
    library_args: Call = lambda *inputs: inputs  # what torch.ops.sublight.<name> takes for these inputs
    judged: Callable[[Call], Call] = lambda call: call  # a call as its correctness is judged: of codes, their numbers

    @property
    def is_row_wise(self) -> bool:
        """Rows are independent, and whatever has as many rows as the shape says belongs to them."""
        return self.keys == ("rows", "cols") and self.independent_rows

    @property
    def keys(self) -> tuple[str, ...]:
        """The words that name this op's dimensions."""
        return tuple(self.shapes[0])

    def parse_shape(self, words: str) -> Shape:
        """`4096x1024` in the order of the op's keys, or `rows=4096,cols=1024` in any order."""
        try:
            if "=" in words:
                pairs = [part.split("=", 1) for part in words.split(",")]
                shape = {key.strip(): units.parse_quantity(value) for key, value in pairs}
                if len(shape) != len(pairs):
                    raise ValueError("a dimension is given twice")
            else:
                sizes = [units.parse_quantity(part) for part in words.lower().split("x")]
                shape = dict(zip(self.keys, sizes, strict=True))
        except ValueError:
            raise BadInput(f"shape {words!r} does not fit {self.name}: write {self._example()}") from None
        if set(shape) != set(self.keys) or min(shape.values()) < 1:
            raise BadInput(f"shape {words!r} does not fit {self.name}: write {self._example()}, each at least 1")
        return {key: shape[key] for key in self.keys}

    def _example(self) -> str:
        shape = self.shapes[0]
        named = ",".join(f"{key}={size}" for key, size in shape.items())
        return f"{shape_text(shape)} or {named}"

"""What an op is: one mathematical function, its reference, its kernels, its inputs, its cost, its shapes.

Everything that tests, times, draws or predicts an op reads this record; nothing about an op is written twice.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sublight import units

if TYPE_CHECKING:
    import torch

Direction = Literal["fwd", "bwd", "fwd+bwd"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")
Shape = Mapping[str, int]  # {"rows": 4096, "cols": 1024}
Inputs = tuple["torch.Tensor", ...]
Call = Callable[..., Any]  # tensors in, a tensor or a tuple of them out
Thunk = Callable[[], Any]  # a call with its tensors bound: what is timed
SPELLINGS = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
DTYPES = ("float32", "float16", "bfloat16")
MOST_NAMES = 8  # in one line of an error
ITEMSIZE = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1},
    **{"int64": 8, "int32": 4, "int8": 1},
}


class BadInput(ValueError):
    """What the user asked for cannot be done; the message says what was wrong and what to do, in one line."""


def nearest(word: str, known: list[str]) -> str:
    """The names that the user may have meant, best first; where none is near, the first few that there are.

    >>> nearest("sofmax", ["add", "softmax", "rms_norm"])
    'softmax'
    """
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return ", ".join(near or [*known[:MOST_NAMES], *(["…"] if len(known) > MOST_NAMES else [])])


def one_of(what: str, word: str, known: Sequence[str]) -> str:
    """The word, if it is known; else one line that says which are."""
    if word not in known:
        few = " or ".join(known) if len(known) < 3 else nearest(word, list(known))
        raise BadInput(f"unknown {what} {word!r}: use {few}")
    return word


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The work that an ideal implementation must do: each input read once, each output written once, one launch."""

    read_bytes: int
    write_bytes: int
    flops: Mapping[str, float] = field(default_factory=dict)  # by the limit that bounds them: matmul_bf16, vector_fp32
    launches: int = 1

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())


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


def shape_text(shape: Shape) -> str:
    """
    >>> shape_text({"rows": 4096, "cols": 1024})
    '4096x1024'
    """
    return "x".join(str(size) for size in shape.values())


def parse_dtype(words: str) -> str:
    """
    >>> parse_dtype("bf16"), parse_dtype("float32")
    ('bfloat16', 'float32')
    """
    name = SPELLINGS.get(words.lower(), words.lower())
    if name not in DTYPES:
        raise BadInput(f"unknown data type {words!r}: use one of {nearest(name, [*DTYPES, *SPELLINGS])}")
    return name

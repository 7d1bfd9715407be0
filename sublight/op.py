"""What an op is: one mathematical function, its reference, its kernels, its inputs, its cost, its shapes.

Everything that tests, times, draws or predicts an op reads this record; nothing about an op is written twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sublight.backend.launch import Step
from sublight.correct import Call, Inputs
from sublight.cost import DTYPES, Cost, Direction, Shape, parse_dtype, parse_shape
from sublight.errors import BadInput
from sublight.timing import Thunk

SAME_DTYPES = {name: (name,) for name in DTYPES}  # every operand has the requested data type


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
class Buffer:
    """A tensor that a call makes, on its arguments' device: an output, or what one launch hands to another."""

    shape: tuple[int, ...]
    dtype: Any  # torch.dtype
    is_zero: bool = False  # cleared before the first launch
    bits: Any = None  # kernels see the buffer as this torch.dtype of the same size
    strides: tuple[int, ...] = ()  # empty: contiguous

    def __post_init__(self) -> None:
        if self.is_zero and self.strides:
            raise ValueError("a buffer with strides of its own is not cleared: give it one or the other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one call runs, and why: the call, `why`, compiling ahead and the tests all read this, and nothing else.

    A plan is good for every call with arguments of the same kind (`ops/record/plans.py`): it holds all that does not
    change from one to the next. Arguments and buffers go by their names.
    """

    provider: str  # a key of Op.providers, or "torch"
    reason: str
    theirs: str = ""  # PyTorch's function where that is what runs
    copies: tuple[str, ...] = ()  # arguments that are made contiguous first, since the kernels cannot read their layout
    buffers: Mapping[str, Buffer] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()  # our launches, in their order
    outputs: tuple[str, ...] = ()  # the buffers that are handed out
    captured: Plan | None = None  # what runs instead while a CUDA graph is captured, where the host's time decided

    @property
    def kernel(self) -> str:
        """The names of what is launched."""
        return ", ".join(dict.fromkeys(step.name for step in self.steps)) or self.theirs

    @property
    def tile(self) -> Any:
        """The first launch's tile: how its programs divide the work, by the constants of its kernel."""
        return self.steps[0].tile if self.steps else None

    @property
    def grid(self) -> tuple[int, ...]:
        return self.steps[0].grid if self.steps else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One way of ours to compute an op, always taken when it is called, whether or not it wins."""

    launch: Call  # values, on whatever device Triton runs
    kernels: tuple[Kernel, ...]
    backward: Call | None = None  # (*grads of the outputs, *inputs) -> a gradient for each of `wrt`
    why_not: Callable[..., str] = lambda *inputs: ""  # why it does not take these inputs; empty: it does
    summary: str = ""  # what this step of a ladder changed, and why
    variants: tuple[Call, ...] = ()  # `launch` with each option that needs a kernel of its own, for compiling offline


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # compared by identity: there is one record of each op
class Op:
    """One mathematical function and everything known of it."""

    name: str
    summary: str
    reference: Call  # PyTorch's own composition: the yardstick in its data type, the truth in float64
    call: Call  # what the user calls: dispatches to our kernel where it wins
    plan: Callable[..., Plan]  # what `call` does with these arguments, and why: the only place that decides
    providers: Mapping[str, Provider]  # ours by name, the plainest first; an op with one calls it "sublight"
    inputs: Callable[[Shape, str, str, int], Inputs]  # (shape, dtype, device, seed)
    cost: Callable[[Shape, str, Direction], Cost]
    shapes: tuple[Shape, ...]  # what `bench` times by default
    test_shapes: tuple[Shape, ...]  # cross every block boundary and take every branch
    dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SAME_DTYPES)  # word -> each operand's type
    options: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shape keys that are no sizes
    call_options: Callable[[Shape], Mapping[str, Any]] = lambda shape: {}  # what a shape gives to calls by name
    peers: Mapping[str, Callable[..., Thunk]] = field(default_factory=dict)  # takes the inputs, gives the peer's call
    wrt: tuple[int, ...] | None = None  # the inputs that have a gradient; None: every one of floating point
    directions: tuple[Direction, ...] = ("fwd", "bwd")  # what `bench` times; backward only where there is one
    writes: tuple[int, ...] = ()  # the inputs that a call writes into: whoever checks the op hands it copies
    batch: str = "rows"  # the dimension whose entries do not depend on one another; "" where there is none
    library_args: Call = lambda *inputs: inputs  # what torch.ops.sublight.<name> takes for these inputs
    # turns a call into the one whose outputs are compared: codes are judged by the numbers that they stand for
    judged: Callable[[Call], Call] = lambda call: call

    def at(self, shape: Shape) -> Op:
        """The op as called at a shape: keys that are no tensor's size (causal) become arguments by name."""
        options = self.call_options(shape)
        if not options:
            return self

        def bound(call: Any) -> Any:
            return functools.partial(call, **options)

        providers = {
            name: replace(
                each,
                launch=bound(each.launch),
                backward=bound(each.backward) if each.backward else None,
                variants=tuple(map(bound, each.variants)),
            )
            for name, each in self.providers.items()
        }
        return replace(
            self,
            reference=bound(self.reference),
            call=bound(self.call),
            plan=bound(self.plan),
            library_args=bound(self.library_args),
            peers={name: bound(peer) for name, peer in self.peers.items()},
            providers=providers,
        )

    @property
    def best(self) -> Provider:
        """The last step of the ladder, which takes every input."""
        return list(self.providers.values())[-1]

    @property
    def launch(self) -> Call:
        return self.best.launch

    @property
    def launch_backward(self) -> Call | None:
        return self.best.backward

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of all providers, each once."""
        return tuple({kernel.name: kernel for each in self.providers.values() for kernel in each.kernels}.values())

    @property
    def keys(self) -> tuple[str, ...]:
        """The words that name this op's dimensions."""
        return tuple(key for key in self.shapes[0] if key not in self.options)

    def parse_shape(self, words: str) -> Shape:
        """`4096x1024` in the order of the op's keys, or `rows=4096,cols=1024` in any order, options among them."""
        return parse_shape(words, self.name, self.shapes[0], self.options)

    def parse_dtype(self, words: str) -> str:
        """One of the op's own words for its data types (`w4a16`), or a data type as people spell it."""
        if words in self.dtypes:
            return words
        name = parse_dtype(words, tuple(self.dtypes))
        if name not in self.dtypes:
            raise BadInput(f"{self.name} does not take {words}: use {', '.join(self.dtypes)}")
        return name

"""A ladder: one mathematical function in CUDA C++, a kernel a step, each step with what it changed and why."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sublight.correct import Call, Inputs
from sublight.cost import Cost, Shape
from sublight.errors import BadInput, one_of
from sublight.extensions import build
from sublight.extensions.driver import OnGpu
from sublight.extensions.played import OnCpu

if TYPE_CHECKING:
    import torch


class Runner(Protocol):
    """Where kernels run: a GPU through its driver, or the CPU, which plays them."""

    @property
    def multiprocessors(self) -> int: ...

    def resident(self, kernel: str, threads: int) -> int: ...

    def launch(
        self,
        kernel: str,
        grid: tuple[int, ...],
        threads: tuple[int, ...],
        *arguments: Any,
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of a ladder."""

    name: str
    kernels: tuple[str, ...]
    launch: Callable[..., Any]  # (runner, *inputs) -> outputs
    change: str  # what this step changed, and why
    source: str = ""  # a file of its own for instructions that only some GPUs have: it is not played on a CPU
    dtypes: tuple[str, ...] = ("float32",)
    why_not: Callable[..., str] = lambda *inputs: ""  # why it does not take these inputs; empty where it does
    yardstick: Call | None = (
        None  # PyTorch's function that adds in the same order, where the reference adds in a better
    )
    judged: Callable[[Any], Any] = lambda outputs: outputs  # outputs as their correctness is judged
    spills: str = ""  # why a spill is accepted here; empty: a spill is an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """One function, its steps from the plainest on, and everything needed to check and time them."""

    name: str
    source: str  # a file in kernels/
    summary: str
    reference: Call  # PyTorch's own: the yardstick in its data type, the truth in float64
    inputs: Callable[[Shape, str, str, int], Inputs]  # (shape, dtype, device, seed)
    cost: Callable[[Shape, str], Cost]
    shapes: Mapping[str, tuple[Shape, ...]]  # by data type: what is timed
    test_shapes: tuple[Shape, ...]  # cross every block boundary; small, since a CPU plays them
    rungs: tuple[Rung, ...]
    truth: Call | None = None  # for float64 inputs, which the reference in float64 cannot judge: exact, then rounded
    library: tuple[str, ...] = ()  # all kernels of its source, where several ladders share it
    draws: int = 1  # draws of inputs that errors are pooled over: a result of one number needs several

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels of the ladder's source, without those of steps that have a file of their own."""
        return tuple(dict.fromkeys(name for rung in self.rungs if not rung.source for name in rung.kernels))

    @property
    def spilling(self) -> frozenset[str]:
        """Kernels whose spills a step explains."""
        return frozenset(name for rung in self.rungs if rung.spills for name in rung.kernels)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(dtype for rung in self.rungs for dtype in rung.dtypes))

    def runner(self, x: torch.Tensor, *, reversed: bool = False, source: str = "") -> Runner:
        """The runner for x's device; its kernels are compiled at the first call."""
        if x.is_cuda:
            return on_gpu(source or self.source, x.get_device())
        return on_cpu(self.source, self.library or self.kernels, reversed)

    def rung(self, name: str) -> Rung:
        names = [rung.name for rung in self.rungs]
        return self.rungs[names.index(one_of(f"step of {self.name}", name, names))]

    def why_not(self, rung: Rung, *inputs: torch.Tensor) -> str:
        """Why this step does not take these inputs; empty where it does."""
        dtype = str(inputs[0].dtype).removeprefix("torch.")
        if dtype not in rung.dtypes:
            return f"takes {' or '.join(rung.dtypes)}, not {dtype}"
        if any(x.device != inputs[0].device for x in inputs) or inputs[0].device.type not in ("cuda", "cpu"):
            return "takes tensors of one GPU, or of the CPU"
        if not all(x.numel() for x in inputs):
            return "takes no empty tensor"
        if rung.source and (reason := _not_its_gpu(rung.source, inputs[0])):
            return reason
        return rung.why_not(*inputs)

    def call(self, rung: Rung, *, reversed: bool = False) -> Call:
        """A step as a function of its inputs alone; inputs that it does not take are refused."""

        def checked(*inputs: torch.Tensor) -> Any:
            if reason := self.why_not(rung, *inputs):
                raise BadInput(f"{self.name} by {rung.name}: {reason}")
            runner = self.runner(inputs[0], reversed=reversed, source=rung.source)
            return rung.launch(runner, *map(plain, inputs))

        return checked


def _not_its_gpu(source: str, x: torch.Tensor) -> str:
    import torch

    wanted = build.ONE_GPU[source]
    major, minor = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
    return (
        ""
        if 10 * major + minor == wanted
        else f"takes tensors of a GPU of sm_{wanted}, which alone has its instructions"
    )


@functools.cache
def on_gpu(source: str, index: int) -> OnGpu:
    import torch

    return OnGpu(source, torch.device("cuda", index))


@functools.cache
def on_cpu(source: str, kernels: tuple[str, ...], reversed: bool) -> OnCpu:
    return OnCpu(source, kernels, reversed=reversed)


def plain(x: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and at a multiple of 16 bytes, as accesses of 16 bytes need it."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def ceil_div(size: int, by: int) -> int:
    """
    >>> ceil_div(0, 32), ceil_div(33, 32)
    (0, 2)
    """
    return -(-size // by)

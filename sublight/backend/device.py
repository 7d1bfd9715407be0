"""The GPU that a launch is planned for, and whether kernels run on the CPU through Triton's interpreter instead."""

from __future__ import annotations

import functools
import os
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

PLAIN = 80  # kernels that need only this compute capability are for every GPU
INTERPRETER_MULTIPROCESSORS = 2  # few programs: the interpreter takes one after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a plan must know about the GPU that it is made for."""

    capability: int = 90  # an AMD GPU counts as 80: it gets the kernels that need no Hopper instruction
    multiprocessors: int = 132
    shared_bytes: int = 227 * 1024  # the most that one program may have
    backend: Literal["cuda", "hip"] = "cuda"

    def precision(self, is_ieee: bool) -> str:
        """`tl.dot`'s input_precision, which matters for fp32 alone: TF32 where allowed and there (gfx950 has none)."""
        return "ieee" if is_ieee or self.backend == "hip" else "tf32"

    def stages(self, most: int, stage_bytes: int) -> int:
        """Stages of a pipeline: as many as fit into shared memory, two at least.

        >>> Facts().stages(4, 49152), Facts(shared_bytes=64 * 1024).stages(4, 24576)
        (4, 2)
        """
        return min(most, max(2, self.shared_bytes // stage_bytes))


PRETEND: ContextVar[Facts | None] = ContextVar("PRETEND", default=None)  # a GPU to plan for that is not here


def is_interpreted() -> bool:
    """Kernels run on the CPU through Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def takes_ptx() -> bool:
    """Kernels may hold NVIDIA's assembly: not under the interpreter, nor for AMD. Decided when ops are imported."""
    if is_interpreted():
        return False
    if (pretended := PRETEND.get()) is not None:
        return pretended.backend == "cuda"
    import torch

    return torch.version.hip is None


@functools.cache
def _facts(index: int) -> Facts:
    import torch

    device = torch.cuda.get_device_properties(index)
    if torch.version.hip:  # torch reports gfx942 as capability 9.4, as if it had Hopper's instructions
        return Facts(
            capability=PLAIN,
            multiprocessors=device.multi_processor_count,
            shared_bytes=getattr(device, "shared_memory_per_block", 64 * 1024),
            backend="hip",
        )
    return Facts(
        capability=10 * device.major + device.minor,
        multiprocessors=device.multi_processor_count,
        shared_bytes=getattr(device, "shared_memory_per_block_optin", 99 * 1024),
    )


def facts(x: torch.Tensor) -> Facts:
    """Facts of the GPU that holds x; for a CPU tensor of the pretended GPU, or those for the interpreter."""
    if x.is_cuda:
        return _facts(x.get_device())
    return PRETEND.get() or Facts(multiprocessors=INTERPRETER_MULTIPROCESSORS if is_interpreted() else 132)


def facts_here() -> Facts:
    """Facts of the current or the pretended GPU, for callers without a real tensor, such as torch.compile's tracing."""
    import torch

    if (pretended := PRETEND.get()) is not None:
        return pretended
    return _facts(torch.cuda.current_device()) if torch.cuda.is_available() else Facts()


def why_not_here(x: torch.Tensor) -> str:
    """Why no kernel of ours runs on x's device; empty on a GPU, a pretended GPU and under the interpreter."""
    import torch

    if x.is_cuda and torch.version.hip:
        return "no kernel of ours has run on an AMD GPU yet: PyTorch's own does"
    if x.is_cuda or (not torch.compiler.is_compiling() and PRETEND.get() is not None):  # which it cannot read
        return ""
    kind = x.device.type
    if kind == "cpu" and is_interpreted():
        return "the interpreter's bf16 arithmetic is wrong" if x.dtype == torch.bfloat16 else ""
    return f"our kernels are for GPUs, this is on the {kind}"

"""All tensors of a timed run in one piece of memory that the grader owns and a child maps: on a GPU by `gpu_memory`,
on a CPU (for tests) as a file without a name. Either way the child gets a descriptor with its order.

Inputs of every set lie first, outputs of every set after them, so that one copy takes all results at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sublight.errors import BadInput
from sublight.learn.grade import gpu_memory
from sublight.learn.grade.buffers import POISON, Spec
from sublight.learn.grade.gpu_memory import GpuMemory, Way

WAY = "SUBLIGHT_LEARN_ARENA"  # descriptor or ipc, where a measurement wants one of them
ALIGNED_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where each tensor of each set lies; both sides compute it from the same specs."""

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    sets: int

    @classmethod
    def of(cls, inputs: Sequence[Any], outputs: Sequence[Any], sets: int) -> Plan:
        return cls(inputs=tuple(map(_spec, inputs)), outputs=tuple(map(_spec, outputs)), sets=sets)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        specs = {name: tuple(Spec.from_json(each) for each in data[name]) for name in ("inputs", "outputs")}
        return cls(**specs, sets=data["sets"])

    def to_json(self) -> dict[str, Any]:
        specs = {name: [each.to_json() for each in getattr(self, name)] for name in ("inputs", "outputs")}
        return {**specs, "sets": self.sets}

    @property
    def inputs_bytes(self) -> int:
        return self.sets * sum(map(_room, self.inputs))

    @property
    def outputs_bytes(self) -> int:
        return self.sets * sum(map(_room, self.outputs))

    def tensors(self, pages: Any) -> list[tuple[list[Any], list[Any]]]:
        """Inputs and outputs of each set, on one long tensor of bytes."""
        inputs = self._of(self.inputs, pages[: self.inputs_bytes])
        return list(zip(inputs, self.results(pages[self.inputs_bytes :]), strict=True))

    def results(self, pages: Any) -> list[list[Any]]:
        """The outputs of each set, on the bytes that hold outputs alone."""
        return self._of(self.outputs, pages)

    def _of(self, specs: tuple[Spec, ...], pages: Any) -> list[list[Any]]:
        import torch

        found, at = [], 0
        for _ in range(self.sets):
            tensors = []
            for spec in specs:
                flat = pages[at : at + _room(spec)].view(getattr(torch, spec.dtype))
                tensors.append(flat.as_strided(spec.shape, spec.strides, flat.storage_offset()))
                at += _room(spec)
            found.append(tensors)
        return found


def _spec(tensor: Any) -> Spec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Spec(file="", shape=tuple(tensor.shape), strides=tuple(tensor.stride()), dtype=dtype)


def _room(spec: Spec) -> int:
    import torch

    reach = sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True)) + 1
    size_bytes = reach * int(getattr(torch, spec.dtype).itemsize)
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


@dataclass(slots=True, kw_only=True)
class Arena:
    """Memory of the grader's."""

    pages: Any  # a tensor of bytes, as many as were asked for
    size_bytes: int  # of all that is mapped
    handle: str = ""  # what a child opens it with where there is no descriptor
    descriptor: int = -1
    memory: GpuMemory | None = None

    @classmethod
    def on_gpu(cls, size_bytes: int) -> Arena:
        memory = gpu_memory.make(size_bytes, _way())
        return cls(pages=memory.pages(size_bytes), size_bytes=memory.size_bytes, handle=memory.handle,
                   descriptor=memory.descriptor, memory=memory)  # fmt: skip

    @classmethod
    def on_cpu(cls, size_bytes: int) -> Arena:
        descriptor = os.memfd_create("arena")
        os.ftruncate(descriptor, size_bytes)
        return cls(pages=_of_file(descriptor, size_bytes), size_bytes=size_bytes, descriptor=descriptor)

    @property
    def order(self) -> dict[str, Any]:
        """What a child's order says of it."""
        return {"bytes": self.size_bytes, "handle": self.handle}

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What goes to the child beside its order."""
        return () if self.handle else (self.descriptor,)

    @property
    def method(self) -> str:
        """What is to be said of times that were taken in it."""
        return "" if not self.handle else " in memory by CUDA IPC, which may be slower than a kernel's own"

    def poison(self, begin: int = 0) -> None:
        self.pages[begin:].fill_(POISON)

    def sent(self) -> None:
        """The child has its descriptor: this process needs none."""
        if self.memory is not None:
            self.memory.close_descriptor()
        elif self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def close(self) -> None:
        self.sent()
        if self.memory is not None:
            self.memory.close()


def opened(order: dict[str, Any], descriptors: Sequence[int], device: str) -> Any:
    """A child's view of the grader's memory, as bytes."""
    descriptor = descriptors[0] if descriptors else -1
    if device == "cpu":
        pages = _of_file(descriptor, order["bytes"])
        os.close(descriptor)
        return pages
    memory = gpu_memory.opened(order["bytes"], descriptor=descriptor, handle=order["handle"])
    return memory.pages(order["bytes"])


def _way() -> Way:
    """By descriptors where the driver has them, unless the environment names one."""
    match os.environ.get(WAY, ""):
        case "":
            return gpu_memory.best_way()
        case "descriptor":
            return "descriptor"
        case "ipc":
            return "ipc"
        case other:
            raise BadInput(f"{WAY} is {other!r}: it is descriptor or ipc, or not set")


def _of_file(descriptor: int, size_bytes: int) -> Any:
    import mmap

    import torch

    return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)

"""CUDA graphs on the CPU, for tests: a capture records operations without effect, a replay runs them in place.

As with the real thing Python runs once, numbers are those it had then, tensors are addresses. What a capture made is
poisoned before each replay: whoever reads what an earlier one left behind reads NaN.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sublight.backend import private
from sublight.fix.graph.key import tensors_in
from sublight.fix.graph.refuse import storage, written_by

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class CaptureFailed(RuntimeError):
    """What CUDA says where a call cannot be captured."""


class Tape(private.TorchDispatchMode):
    """Records one call, and takes back what it did."""

    def __init__(self, has_handle: bool = True) -> None:
        super().__init__()
        self.has_handle = has_handle
        self.steps: list[tuple[Any, Any, Any, list[tuple[int, torch.Tensor]]]] = []
        self.made: dict[int, torch.Tensor] = {}
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports torch._dynamo with the first operation, which takes seconds

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            raise CaptureFailed("operation not permitted when stream is capturing")
        if not self.has_handle and func.overloadpacket.__name__ in PRODUCTS:
            raise CaptureFailed("CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
        for x in written_by(func, args, kwargs):
            if storage(x) not in self.made and storage(x) not in self.before:
                whole = _whole(x)
                self.before[storage(x)] = (whole, whole.clone())
        out = func(*args, **kwargs)
        given = {storage(x) for x in tensors_in((args, kwargs))}
        fresh = [(i, x) for i, x in enumerate(tensors_in(out)) if storage(x) not in given]
        for _, x in fresh:
            self.made.setdefault(storage(x), x)
        self.steps.append((func, args, kwargs, fresh))
        return out

    def take_back(self) -> None:
        for whole, was in self.before.values():
            whole.copy_(was)
        self.before.clear()


def _whole(x: torch.Tensor) -> torch.Tensor:
    """Everything in a tensor's memory, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


class FakeCaptured:
    driver_bytes = 0

    def __init__(self, tape: Tape, outputs: Any) -> None:
        self._tape, self.outputs = tape, outputs
        self.pool_bytes = sum(x.untyped_storage().nbytes() for x in tape.made.values())
        self.is_reset = False

    def poison(self) -> None:
        for x in self._tape.made.values():
            _whole(x).fill_(0xFF)  # NaN in every floating-point type, -1 in whole numbers

    @torch.no_grad()
    def replay(self) -> None:
        assert not self.is_reset, "a graph was replayed that was let go"
        self.poison()
        for func, args, kwargs, fresh in self._tape.steps:
            new = tensors_in(func(*args, **kwargs))
            for i, old in fresh:
                old.detach().copy_(new[i])

    def reset(self) -> None:
        self.poison()
        self.is_reset, self.outputs = True, None


class Fake:
    """Stands in for Cuda where there is none; counts what it is asked."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0
        self._lock = threading.RLock()
        self._capturing = threading.local()
        self._handle = threading.local()  # of cuBLAS, which no thread can make while it captures

    def is_capturing(self) -> bool:
        return getattr(self._capturing, "now", False)

    def new_pool(self) -> object:
        return object()

    def exclusive(self) -> contextlib.AbstractContextManager[Any]:
        return self._lock

    def side(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def heard(self, found: Callable[[str, str], None]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def prepare(self, device: torch.device) -> None:
        self._handle.is_made = True

    def capture(
        self, call: Callable[[], Any], pool: Any, device: torch.device, generators: Sequence[torch.Generator]
    ) -> FakeCaptured:
        tape, random = Tape(getattr(self._handle, "is_made", False)), torch.get_rng_state()
        with self._now_capturing():
            try:
                with tape:
                    outputs = call()
            finally:
                with torch.no_grad():
                    tape.take_back()
                torch.set_rng_state(random)
        self.captures += 1
        captured = FakeCaptured(tape, outputs)
        captured.poison()
        return captured

    @contextlib.contextmanager
    def _now_capturing(self) -> Iterator[None]:
        self._capturing.now = True
        try:
            yield
        finally:
            self._capturing.now = False

    def enter(self, pool: Any, device: torch.device) -> None:
        self.replays += 1

    def hand_over(self, tensors: list[torch.Tensor]) -> None:
        return

    def synchronize(self, device: torch.device) -> None:
        return

    def mark(self) -> float:
        return time.perf_counter()

    def between_s(self, start: float, end: float) -> float:
        return end - start

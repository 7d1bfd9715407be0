"""A user's script where there is no GPU: Triton finds the one that is pretended, and torch's "cuda" is the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sublight.backend import private


@contextlib.contextmanager
def without_gpu(capability: int) -> Iterator[None]:
    """Triton's driver for a GPU that is not here, and a torch whose "cuda" is the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    GPUTarget = private.GPUTarget
    driver = private.driver

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            return torch.cuda

    def here(value: Any) -> Any:
        is_name = isinstance(value, str) and value.split(":")[0] == "cuda"
        return "cpu" if is_name or (isinstance(value, torch.device) and value.type == "cuda") else value

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.cuda:
                return args[0]
            moved = {name: here(value) for name, value in (kwargs or {}).items()}
            return function(*map(here, args), **moved)

    before = driver._active
    driver.set_active(Driver())  # type: ignore[arg-type]
    try:
        with OnCpu():
            yield
    finally:
        driver._active = before

"""The device and the profiler, as a capture may touch them: it never wakes CUDA, and never waits where that breaks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from sublight.backend import private


def cuda_ready() -> bool:
    """Whether the script uses CUDA; never the first to wake it."""
    import torch

    return bool(torch.cuda.is_initialized())


def cuda_available() -> bool:
    """Whether the script could use CUDA; to ask fixes which devices it sees."""
    import torch

    return torch.backends.cuda.is_built() and torch.cuda.is_available()


def has_gpu() -> bool:
    """Whether this machine may have one that the script could use; wakes nothing."""
    import torch

    files = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # CUDA's, ROCm's, and that of Windows' Linux
    return torch.backends.cuda.is_built() and (sys.platform != "linux" or any(map(os.path.exists, files)))


def in_graph_capture() -> bool:
    """Whether a CUDA graph is being captured here: a wait for the device would break it."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def synchronize() -> None:
    """Wait for the device, where there is one in use."""
    if cuda_ready():
        import torch

        torch.cuda.synchronize()


def mark() -> Any:
    """A moment on the device's own clock; `elapsed_time` between two of them is in milliseconds."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def open_range(name: str) -> Any:
    """A range of the profiler that its `__exit__` closes, at another boundary than this one."""
    from torch.profiler import record_function

    opened = record_function(name)
    opened.__enter__()
    return opened


def when_cuda_starts(call: Callable[[], None]) -> None:
    """torch runs what is queued here when the script first uses CUDA; where it already does, nothing happens."""
    import torch

    queue = private.loaded("lazy_call")
    if queue is None or not torch.backends.cuda.is_built() or cuda_ready():
        return

    def quietly() -> None:
        with contextlib.suppress(Exception):  # the script's first CUDA call must not fail because of us
            call()

    queue(quietly)

"""How PyTorch's profiler is set up; every command does so, and loads no more than this."""

import os

_SETTINGS = {  # the profiler's own lines do not belong in the script's output
    "KINETO_LOG_LEVEL": "99",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # else CUPTI stays loaded after the first profile, and every launch of the steps that are timed costs half as much
    # again: 8.9 to 14 ms for a step of 6.9 ms on an H200
    "TEARDOWN_CUPTI": "1",
}


def set_up_profiler() -> None:
    """Before torch loads, for all of it to count; what the user has set stays."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)

"""One question to NVML: its answer, or in words why there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sublight.health.record import Unavailable

_T = TypeVar("_T")
NOT_SUPPORTED, LOST, RESET, MISMATCH = 3, 15, 16, 18  # NVML's numbers
REASONS = {
    NOT_SUPPORTED: "not supported by this GPU or driver",
    4: "needs root",
    9: "NVIDIA's kernel module is not loaded",
    12: "no NVIDIA driver here (libnvidia-ml is missing)",
    13: "the driver is too old for it",
    LOST: "the GPU is lost",
    RESET: "the GPU needs a reset",
    MISMATCH: "the driver's library and its kernel module are of different versions",
}
GONE = (REASONS[LOST], REASONS[RESET])


def ask(nvml: Any, question: Callable[[Any], _T]) -> _T | Unavailable:
    """The answer, or why there is none."""
    try:
        return question(nvml)
    except nvml.NVMLError as error:
        number = getattr(error, "value", None)
        return Unavailable(REASONS.get(number, f"NVML: {error}") if number else str(error))
    except AttributeError as error:
        if not (error.name or "").lower().startswith(("nvml", "c_nvml")):
            raise
        return Unavailable("this nvidia-ml-py is too old for it")

"""One question to NVML: its answer, or in words why there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sublight.health.record import Unavailable

_T = TypeVar("_T")
NOT_SUPPORTED, NEEDS_ROOT, LOST, RESET, MISMATCH = 3, 4, 15, 16, 18  # NVML's numbers
REASONS = {
    NOT_SUPPORTED: "not supported by this GPU or driver",
    NEEDS_ROOT: "needs root",
    9: "NVIDIA's kernel module is not loaded",
    12: "no NVIDIA driver here (libnvidia-ml is missing)",
    13: "the driver is too old for it",
    LOST: "the GPU is lost",
    RESET: "the GPU needs a reset",
    MISMATCH: "the driver's library and its kernel module are of different versions",
}
GONE = (REASONS[LOST], REASONS[RESET])
UNNAMED = "NVML: "  # before NVML's own words


def is_failing(reason: str) -> bool:
    """Whether a driver that is there gives no answer; one that is not there, or not loaded, does not fail."""
    return reason in (*GONE, REASONS[NEEDS_ROOT], REASONS[MISMATCH]) or reason.startswith(UNNAMED)


def ask(nvml: Any, question: Callable[[Any], _T]) -> _T | Unavailable:
    """The answer, or why there is none."""
    try:
        return question(nvml)
    except nvml.NVMLError as error:
        number = getattr(error, "value", None)
        return Unavailable(REASONS.get(number, f"{UNNAMED}{error}") if number else str(error))
    except AttributeError as error:
        if not (error.name or "").lower().startswith(("nvml", "c_nvml")):
            raise
        return Unavailable("this nvidia-ml-py is too old for it")

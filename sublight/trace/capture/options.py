"""How a block or a script is captured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """How many steps each phase takes."""

    warmup: int = 3
    timed: int = 5
    profiled: int = 3
    stacks: bool = True  # source lines and samples of Python's stacks
    time_limit_s: float = 60.0  # of the search for steps

"""Which names of a trace are kernels that talk to other devices."""

from __future__ import annotations

import numpy as np

from sublight.trace.costs.kernels import is_communication
from sublight.trace.record import Mask, Trace


def named(trace: Trace) -> Mask:
    """Whether each of a trace's names is that of a kernel that communicates."""
    return np.fromiter((is_communication(name) for name in trace.names), dtype=bool, count=len(trace.names))

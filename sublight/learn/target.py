"""The GPU that a submission is compiled for: the one that is named, this machine's, or one whose limits are known."""

from __future__ import annotations

from sublight.gpus import Gpu, detect, find

DEFAULT = "h200"  # its limits were measured


def target(name: str) -> Gpu:
    from sublight.backend.record import compilable

    found = find(name) if name else detect()
    if found is None or (not name and found.compute_capability is None):
        return find(DEFAULT)
    compilable(found)
    return found

"""The GPU that a submission is compiled for: the one that is named, this machine's, or one whose limits are known."""

from __future__ import annotations

from sublight.gpus import Gpu, detect, find

DEFAULT = "h200"  # its limits were measured


def target(name: str) -> Gpu:
    from sublight.backend.record import compilable

    gpu = find(name) if name else detect()
    if gpu is None or (not name and gpu.compute_capability is None):
        return find(DEFAULT)
    compilable(gpu)
    return gpu

"""One colour a cause: each finding has the part of the step that it is about, and with it that part's colour."""

from __future__ import annotations

from sublight.diagnose.record import BREAKDOWN

CAUSES = {
    "launch-bound": "launch",
    "host-sync": "sync",
    "data-loading": "data",
    "host-bound": "python",
    "recompilation": "python",
    "graph-break": "python",
    "pageable-copy": "copy",
    "exposed-copy": "copy",
    "allocator-thrash": "allocator",
    "exposed-communication": "communication",
    "rank-imbalance": "communication",
    "start-up": "start_up",
    "worker-restart": "data",
    "anomaly-mode": "launch",
    "repeated-line": "launch",
    "dense-embedding": "above_floor",
    "device-idle": "other",
    "unfused-pointwise": "fusable",
    "unfused-attention": "fusable",
    "unfused-norm": "fusable",
    "unfused-optimizer": "fusable",
    "growing-cat": "above_floor",
    "needless-autograd": "launch",
    "float64-by-accident": "above_floor",
    "redundant-cast-or-copy": "above_floor",
    "slow-kernel": "above_floor",
    "weight-bound": "above_floor",
    "small-grid": "above_floor",
    "no-tensor-cores": "above_floor",
    "fp32-where-bf16-serves": "above_floor",
}
_WORDS = (  # for findings that are not listed: the first word that a finding's name contains
    ("data", "data"), ("loader", "data"), ("worker", "data"), ("copy", "copy"), ("sync", "sync"), ("launch", "launch"),
    ("rank", "communication"), ("communication", "communication"), ("allocator", "allocator"), ("memory", "allocator"),
    ("repeat", "launch"), ("loop", "launch"), ("python", "python"), ("host", "python"), ("compil", "python"),
    ("anomaly", "launch"), ("fus", "fusable"), ("unrolled", "launch"),
)  # fmt: skip


def cause(finding: str) -> str:
    """A key of BREAKDOWN.

    >>> cause("host-sync"), cause("repeated-line"), cause("something new")
    ('sync', 'launch', 'above_floor')
    """
    name = CAUSES.get(finding) or next((part for word, part in _WORDS if word in finding), "above_floor")
    return name if name in BREAKDOWN else "other"

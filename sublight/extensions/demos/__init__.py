"""Demonstrations: questions about the GPU, each answered by a run with figures (`sublight demo NAME`)."""

from sublight.extensions.demos.bank_conflicts import BANK_CONFLICTS
from sublight.extensions.demos.barriers import BARRIERS
from sublight.extensions.demos.blocks import BLOCKS
from sublight.extensions.demos.cluster import CLUSTER
from sublight.extensions.demos.demo import Demo
from sublight.extensions.demos.graphs import GRAPHS
from sublight.extensions.demos.host_memory import HOST_MEMORY
from sublight.extensions.demos.jit import JIT
from sublight.extensions.demos.l2_window import L2_WINDOW
from sublight.extensions.demos.memories import MEMORIES
from sublight.extensions.demos.nvtx import NVTX
from sublight.extensions.demos.occupancy import OCCUPANCY
from sublight.extensions.demos.overlap import OVERLAP
from sublight.extensions.demos.waiting import WAITING

DEMOS: tuple[Demo, ...] = (
    MEMORIES,
    BANK_CONFLICTS,
    CLUSTER,
    L2_WINDOW,
    HOST_MEMORY,
    BLOCKS,
    OCCUPANCY,
    BARRIERS,
    OVERLAP,
    WAITING,
    JIT,
    GRAPHS,
    NVTX,
)

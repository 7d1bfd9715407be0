"""Clocks that a board's power limit lowers: what runs on tensor cores for longer than a burst.

Tables of products come from bursts of some 60 ms, at the highest clock. Training keeps tensor cores busy for as long as
it lasts: of the ops in benchmarks/h200.json that products bound and that ran into the power limit, the median clock was
1740 of 1980 MHz. That share counts for compute-bound ops of a training step, on the H200 and on GPUs of its
architecture; of others nothing is known.
"""

from __future__ import annotations

from sublight.predict.machine import Machine

SUSTAINED = {"Hopper": 1740 / 1980}  # of the highest clock, by architecture


def slower(machine: Machine) -> float:
    """The factor by which a long step's compute-bound ops take longer than in a burst."""
    return 1 / SUSTAINED.get(machine.gpu.architecture or "", 1.0)

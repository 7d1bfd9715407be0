"""Waves: a grid runs as many blocks at a time as fit on the GPU; the last wave, the tail, may leave most of it idle."""

from __future__ import annotations

from dataclasses import dataclass

from sublight.errors import BadInput
from sublight.gpus import Gpu
from sublight.xray.occupancy.blocks import Occupancy


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """How a grid fills a GPU, every block taken to last equally long."""

    blocks: int
    sms: int
    blocks_per_wave: int
    full_waves: int
    tail_blocks: int  # 0: the last wave is full

    @property
    def rounds(self) -> int:
        """Waves that the clock sees: the tail lasts as long as a full one."""
        return self.full_waves + (self.tail_blocks > 0)

    @property
    def per_sm(self) -> float:
        """Waves as a fraction, as Nsight Compute prints them."""
        return self.blocks / self.blocks_per_wave

    @property
    def wasted(self) -> float:
        """Of all the room for blocks over the whole run, what stays empty in the tail.

        It is the loss where blocks do not slow one another; where the SM itself is the limit, blocks alone on it in the
        tail run faster, and the loss lies between this and `idle_sms`.
        """
        return 1 - self.blocks / (self.rounds * self.blocks_per_wave)

    @property
    def idle_sms(self) -> float:
        """Of all SM time, what passes on SMs without any block in the tail: blocks are dealt out one an SM first."""
        idle = max(0, self.sms - self.tail_blocks) if self.tail_blocks else 0
        return idle / (self.sms * self.rounds)

    @property
    def sentence(self) -> str:
        """For the reader, in one line."""
        waves = f"wave{'s' * (self.full_waves != 1)} of {self.blocks_per_wave}"
        if not self.tail_blocks:
            return f"{self.blocks} blocks fill {self.full_waves} {waves}: no tail"
        if not self.full_waves:
            blocks = "1 block is" if self.blocks == 1 else f"{self.blocks} blocks are"
            idle = max(0, self.sms - self.blocks)
            used = f"{idle} of {self.sms} SMs stay idle" if idle else f"each of the {self.sms} SMs has one at least"
            return f"{blocks} less than one wave of {self.blocks_per_wave}: {used}"
        empty = f"{100 * self.wasted:.0f} % of the room stays empty"
        return f"{self.blocks} blocks: {self.full_waves} full {waves} and a tail of {self.tail_blocks}; {empty}"


def waves(grid_blocks: int, occupancy: Occupancy, gpu: Gpu) -> Waves:
    """Full waves and the tail of a grid.

    >>> from sublight.gpus import find
    >>> from sublight.xray.occupancy.blocks import occupancy
    >>> from sublight.xray.record import Resources
    >>> kernel = Resources(registers=128, spill_bytes=0, stack_bytes=0, static_shared_bytes=0,
    ...                    dynamic_shared_bytes=200_000, barriers=1, threads=256)
    >>> one_more = waves(133, occupancy(kernel, find("h200")), find("h200"))
    >>> one_more.sentence
    '133 blocks: 1 full wave of 132 and a tail of 1; 50 % of the room stays empty'
    """
    if grid_blocks < 1:
        raise BadInput(f"a grid of {grid_blocks} blocks: give at least 1")
    if not gpu.sms:
        raise BadInput(f"the number of SMs of {gpu.name} is not known: name a GPU of `sublight gpus`")
    if not occupancy.blocks_per_sm:
        raise BadInput(f"no block fits on an SM of {gpu.name}, so there are no waves: {occupancy.reason}")
    per_wave = occupancy.blocks_per_sm * gpu.sms
    full, tail = divmod(grid_blocks, per_wave)
    return Waves(blocks=grid_blocks, sms=gpu.sms, blocks_per_wave=per_wave, full_waves=full, tail_blocks=tail)

"""Waves and tails, by hand and as Nsight Compute printed them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublight.errors import BadInput
from sublight.gpus import find
from sublight.xray.occupancy.blocks import Occupancy, occupancy
from sublight.xray.occupancy.waves import waves
from sublight.xray.record import Resources

H200, L4 = find("h200"), find("l4")


def alive(registers: int, threads: int, shared_bytes: int = 0, gpu: str = "h200") -> Occupancy:
    resources = Resources(
        registers=registers,
        spill_bytes=0,
        stack_bytes=0,
        static_shared_bytes=shared_bytes,
        dynamic_shared_bytes=0,
        barriers=1,
        threads=threads,
    )
    return occupancy(resources, find(gpu))


def test_one_block_too_many_costs_a_wave() -> None:
    one = alive(128, 512)
    assert one.blocks_per_sm == 1
    found = waves(133, one, H200)
    assert (found.full_waves, found.tail_blocks, found.rounds) == (1, 1, 2)
    assert found.wasted == found.idle_sms == 131 / 264
    assert waves(132, one, H200).wasted == 0
    assert waves(132, one, H200).rounds == 1


def test_a_tail_of_one_block_an_sm_idles_no_sm() -> None:
    two = alive(64, 512)
    assert two.blocks_per_sm == 2
    found = waves(264 + 132, two, H200)
    assert (found.full_waves, found.tail_blocks) == (1, 132)
    assert found.wasted == 0.25
    assert found.idle_sms == 0


def test_a_grid_that_fills_no_wave() -> None:
    found = waves(33, alive(128, 512), H200)
    assert (found.full_waves, found.tail_blocks, found.rounds) == (0, 33, 1)
    assert found.wasted == found.idle_sms == 0.75
    assert found.sentence == "33 blocks are less than one wave of 132: 99 of 132 SMs stay idle"


def test_room_and_blocks_add_up() -> None:
    for blocks in range(1, 1500, 7):
        found = waves(blocks, alive(64, 512), H200)
        assert found.full_waves * found.blocks_per_wave + found.tail_blocks == blocks
        assert 0 <= found.idle_sms <= found.wasted < 1


# Nsight Compute's "Waves Per SM" in published reports: the H100s and the card with 58 SMs of occupancy_test.py
@pytest.mark.parametrize(
    ("gpu", "blocks", "threads", "registers", "shared_bytes", "printed"),
    [
        ("h100", 16_384, 1024, 31, 12_288, "62.06"),
        ("h100", 3225, 256, 16, 0, "3.05"),
        ("h100", 3225, 256, 67, 0, "8.14"),
        ("l4", 128, 512, 54, 29_824, "1.10"),
        ("l4", 4096, 256, 40, 640, "11.77"),
        ("l4", 512, 256, 48, 12_288, "1.77"),
        ("l4", 512, 256, 54, 16_384, "2.21"),
        ("l4", 512, 256, 39, 8192, "1.47"),
        ("l4", 4096, 256, 72, 33_024, "23.54"),
        ("rtx5090", 16_384, 256, 40, 0, "16.06"),
    ],
)
def test_waves_as_published(
    gpu: str, blocks: int, threads: int, registers: int, shared_bytes: int, printed: str
) -> None:
    found = waves(blocks, alive(registers, threads, shared_bytes, gpu), find(gpu))
    assert f"{found.per_sm:.2f}" == printed


def test_bad_input() -> None:
    with pytest.raises(BadInput, match="at least 1"):
        waves(0, alive(32, 128), H200)
    with pytest.raises(BadInput, match=r"no block fits.*256 registers"):
        waves(1, alive(256, 128), H200)
    with pytest.raises(BadInput, match="number of SMs"):
        waves(1, alive(32, 128), replace(H200, sms=None))


def test_sentences() -> None:
    assert waves(264, alive(128, 512), H200).sentence == "264 blocks fill 2 waves of 132: no tail"
    assert waves(265, alive(128, 512), H200).sentence == (
        "265 blocks: 2 full waves of 132 and a tail of 1; 33 % of the room stays empty"
    )

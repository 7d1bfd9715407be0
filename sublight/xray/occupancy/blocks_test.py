"""Occupancy is exact: by NVIDIA's own header, by filling SMs warp by warp, and by cases that others published."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sublight.errors import BadInput
from sublight.gpus import Gpu, all_gpus, find
from sublight.xray.occupancy.blocks import occupancy, table, what_if
from sublight.xray.occupancy.sm import SMS
from sublight.xray.record import Resources

H200 = find("h200")


def card(capability: int) -> Gpu:
    return Gpu(key="card", name="card", compute_capability=divmod(capability, 10), sms=100)


def kernel(registers: int, threads: int, shared_bytes: int = 0, barriers: int = 1, static_bytes: int = 0) -> Resources:
    return Resources(
        registers=registers,
        spill_bytes=0,
        stack_bytes=0,
        static_shared_bytes=static_bytes,
        dynamic_shared_bytes=shared_bytes,
        barriers=barriers,
        threads=threads,
    )


def some(capability: int, count: int) -> Iterator[Resources]:
    """Kernels of all kinds, among them those at the edges."""
    dice = random.Random(capability)
    sm = SMS[capability]
    edges = [sm.shared_bytes // n // 128 * 128 - sm.reserved_bytes + d for n in (1, 2, 3, 7) for d in (-1, 0, 1)]
    for _ in range(count):
        shared = dice.choice([0, 1, dice.randrange(4096), dice.randrange(sm.shared_bytes), dice.choice(edges)])
        yield kernel(
            dice.randrange(1, 256),
            dice.choice([dice.randrange(1, 1025), 32 * dice.randrange(1, 33), 2 ** dice.randrange(5, 11)]),
            dice.choice([0, shared]),
            dice.choice([0, 1, 1, dice.randrange(17)]),
            dice.choice([0, dice.randrange(1025)]),
        )


def built_up(resources: Resources, capability: int) -> int:
    """Blocks put on an SM one by one, each warp's registers into the emptiest partition, until one does not fit."""
    sm, warps = SMS[capability], (resources.threads + 31) // 32
    eighths = (resources.registers + 7) // 8  # portions of 8 registers a thread, 256 a warp
    if (warps + 3) // 4 * eighths > 64:  # a partition of four has 64 portions, and the fullest decides on a launch
        return 0
    reserved = 1024 if capability >= 80 else 0
    unit = 128 if capability >= 80 else 256
    portions = (resources.static_shared_bytes + resources.dynamic_shared_bytes + reserved + unit - 1) // unit
    if portions * unit > sm.shared_bytes_per_block + reserved:
        return 0
    room = [256 // sm.partitions] * sm.partitions
    slots, memory, barriers, blocks = sm.warps, sm.shared_bytes // unit, sm.barriers or 10**9, 0
    while blocks < sm.blocks:
        for _ in range(warps):
            fullest = room.index(max(room))
            room[fullest] -= eighths
        slots, memory, barriers = slots - warps, memory - portions, barriers - resources.barriers
        if min(*room, slots, memory, barriers) < 0:
            break
        blocks += 1
    return blocks


@pytest.mark.parametrize("capability", SMS)
def test_equals_blocks_put_on_an_sm_one_by_one(capability: int) -> None:
    for resources in some(capability, 400):
        assert occupancy(resources, card(capability)).blocks_per_sm == built_up(resources, capability), resources


HEADER = """
#include <cuda_occupancy.h>
#include <stdio.h>
int main(void) {
  int v[11];
  for (;;) {
    for (int i = 0; i < 11; i++) if (scanf("%d", v + i) != 1) return 0;
    struct cudaOccDeviceProp sm = {v[0], v[1], 1024, v[2], 65536, 65536, 32, 49152, v[3], 100, v[4], v[5]};
    struct cudaOccFuncAttributes f = {1024, v[6], v[7], PARTITIONED_GC_OFF, FUNC_SHMEM_LIMIT_OPTIN, v[8], v[9], 0};
    struct cudaOccDeviceState state = {CACHE_PREFER_NONE, SHAREDMEM_CARVEOUT_DEFAULT};
    struct cudaOccResult r;
    int error = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &sm, &f, &state, v[10], v[8]);
    printf("%d %d %d %d %d %d %d\\n", error, r.activeBlocksPerMultiprocessor, r.blockLimitRegs, r.blockLimitSharedMem,
           r.blockLimitWarps, r.blockLimitBlocks, r.blockLimitBarriers);
  }
}
"""
ORDER = ("registers", "shared memory", "threads", "blocks", "barriers")
UNLIMITED = 2**31 - 1


def header_folder() -> Path | None:
    """Where cuda_occupancy.h is: in Triton's wheel, or in the toolkit."""
    triton = importlib.util.find_spec("triton")
    folders = (
        [Path(each) / "backends/nvidia/include" for each in (triton.submodule_search_locations or ())] if triton else []
    )
    folders.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include")
    return next((folder for folder in folders if (folder / "cuda_occupancy.h").is_file()), None)


def test_equals_the_calculator_that_nvidia_ships_as_a_header(tmp_path: Path) -> None:
    folder, compiler = header_folder(), shutil.which("cc")
    if folder is None or compiler is None:
        pytest.skip("needs cuda_occupancy.h and a C compiler")
    (tmp_path / "ask.c").write_text(HEADER, encoding="utf-8")
    subprocess.run([compiler, "-I", folder, "-o", tmp_path / "ask", tmp_path / "ask.c"], check=True)
    asked = [(capability, resources) for capability in SMS for resources in some(capability, 1500)]
    lines = []
    for capability, r in asked:
        sm = SMS[capability]
        machine = (
            *divmod(capability, 10),
            32 * sm.warps,
            sm.shared_bytes,
            sm.shared_bytes_per_block,
            sm.reserved_bytes,
        )
        took = (r.registers, r.static_shared_bytes, r.dynamic_shared_bytes, r.barriers, r.threads)
        lines.append(" ".join(map(str, (*machine, *took))))
    result = subprocess.run([tmp_path / "ask"], input="\n".join(lines), capture_output=True, text=True, check=True)
    answers = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert len(answers) == len(asked)
    fitting = 0
    for (capability, resources), (error, blocks, *limits) in zip(asked, answers, strict=True):
        found = occupancy(resources, card(capability))
        if error:  # the header refuses what is above the SM's shared memory
            assert resources.shared_bytes > SMS[capability].shared_bytes_per_block
            assert found.blocks_per_sm == 0
            continue
        assert found.blocks_per_sm == blocks, (capability, resources)
        assert [found.limits.get(name, UNLIMITED) for name in ORDER] == limits, (capability, resources)
        fitting += blocks > 0
    assert fitting > 0.6 * len(asked)


# threads, registers, shared bytes -> blocks, and what was printed of registers, threads, blocks
PUBLISHED = {
    # CUDA C++ Best Practices Guide, "Calculating Occupancy": compute capability 7.0, 37 registers, 75 % and 63 %
    "best practices, 128 threads": (70, 128, 37, 0, 12, {}),
    "best practices, 320 threads": (70, 320, 37, 0, 4, {}),
    # CUDA C++ Programming Guide, "Multiprocessor Level": 64 registers fill the SM twice; one more, and once
    "programming guide, 64 registers": (61, 512, 64, 0, 2, {}),
    "programming guide, 65 registers": (61, 512, 65, 0, 1, {}),
    # Nsight Compute reports that people published on GitHub. README of ashvardanian/ScalingElections, H100:
    "schulze voting": (90, 1024, 31, 12_288, 2, {"registers": 2, "threads": 2, "blocks": 32}),
    # a ray tracer on an H100 SXM (CUDA_Project, init_rng_kernel and render_kernel)
    "ray tracer, random numbers": (90, 256, 16, 0, 8, {"registers": 16, "threads": 8, "blocks": 32}),
    "ray tracer": (90, 256, 67, 0, 3, {"registers": 3, "threads": 8, "blocks": 32}),
    # sgemm on an RTX 5090 (sgemm_naive and sgemm_shared<16>)
    "sgemm": (120, 256, 40, 0, 6, {"registers": 6, "threads": 6, "blocks": 24}),
    "sgemm, tiled": (120, 256, 37, 2048, 6, {"registers": 6, "threads": 6, "blocks": 24}),
    # flash attention and a scan on a card with 58 SMs of 8.9, all of the shared memory in use
    "attention": (89, 512, 54, 29_824, 2, {"registers": 2, "threads": 3, "blocks": 24}),
    "attention on tensor cores": (89, 128, 80, 43_776, 2, {"registers": 6, "shared memory": 2, "threads": 12}),
    "33 kB": (89, 256, 72, 33_024, 3, {"registers": 3, "shared memory": 3, "threads": 6, "blocks": 24}),
    # llm.c's softmax_forward_kernel1 on a card of 8.6
    "softmax": (86, 512, 39, 0, 3, {"registers": 3, "threads": 3, "blocks": 16}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_case(name: str) -> None:
    capability, threads, registers, shared, blocks, limits = PUBLISHED[name]
    found = occupancy(kernel(registers, threads, shared), card(capability))
    assert found.blocks_per_sm == blocks
    assert limits.items() <= found.limits.items()


def test_fractions_of_the_best_practices_guide() -> None:
    assert occupancy(kernel(37, 128), card(70)).fraction == 0.75
    assert occupancy(kernel(37, 320), card(70)).fraction == 0.625


def test_every_resource_that_stops_the_next_block_is_named() -> None:
    assert occupancy(kernel(32, 1024), H200).limited_by == ("registers", "threads")
    assert occupancy(kernel(16, 32), H200).limited_by == ("blocks",)
    assert occupancy(kernel(16, 128, 57 * 1024 - 1024), H200).limited_by == ("shared memory",)
    assert occupancy(kernel(16, 128, barriers=16), H200).limited_by == ("barriers",)  # 64 of them on an SM
    assert occupancy(kernel(16, 128, barriers=16), find("a100")).limited_by == ("threads",)


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        (kernel(32, 1025), "1025 threads: a block has at most 1024"),
        (kernel(128, 544), "544 threads of 128 registers take 81920: an SM has 65536"),
        (kernel(256, 32), "256 registers a thread: at most 255"),
        (kernel(32, 128, 232_449), "232449 bytes of shared memory: a block has at most 232448"),
        (kernel(32, 32, barriers=65), "65 barriers: an SM has 64"),
    ],
)
def test_a_block_that_does_not_fit_says_why(resources: Resources, reason: str) -> None:
    found = occupancy(resources, H200)
    assert (found.blocks_per_sm, found.warps_per_sm, found.reason) == (0, 0, reason)
    assert occupancy(kernel(120, 512, 232_448), H200).reason == ""


def test_the_split_leaves_the_rest_to_the_l1() -> None:
    found = occupancy(kernel(32, 1024, 30_000), H200)  # 2 blocks of 31 KB
    assert (found.blocks_per_sm, found.carveout_bytes, found.l1_bytes) == (2, 64 * 1024, 192 * 1024)
    exact = occupancy(kernel(32, 1024, 31 * 1024), H200)  # 2 blocks of 32 KiB, the driver's 1 KiB among them
    assert (exact.blocks_per_sm, exact.carveout_bytes) == (2, 64 * 1024)
    assert occupancy(kernel(32, 1024, 1), find("p4")).l1_bytes is None


# Warps, blocks, KiB of shared memory an SM and a block: CCCL 3, cuda/__device/arch_traits.h
TRAITS = {
    60: (64, 32, 64, 48),
    61: (64, 32, 96, 48),
    70: (64, 32, 96, 96),
    75: (32, 16, 64, 64),
    80: (64, 32, 164, 163),
    86: (48, 16, 100, 99),
    87: (48, 16, 164, 163),
    89: (48, 24, 100, 99),
    90: (64, 32, 228, 227),
    100: (64, 32, 228, 227),
    103: (64, 32, 228, 227),
    110: (48, 24, 228, 227),
    120: (48, 24, 100, 99),
    121: (48, 24, 100, 99),
}


def test_the_sms_are_nvidias() -> None:
    found = {
        capability: (sm.warps, sm.blocks, sm.shared_bytes // 1024, sm.shared_bytes_per_block // 1024)
        for capability, sm in SMS.items()
    }
    assert found == TRAITS
    assert all(not sm.carveouts or max(sm.carveouts) == sm.shared_bytes for sm in SMS.values())


@pytest.mark.parametrize("gpu", [gpu for gpu in all_gpus() if gpu.compute_capability], ids=lambda gpu: gpu.key)
def test_the_sm_is_the_one_of_the_table_of_gpus(gpu: Gpu) -> None:
    assert gpu.compute_capability is not None
    sm = SMS[10 * gpu.compute_capability[0] + gpu.compute_capability[1]]
    assert sm.shared_bytes == gpu.shared_bytes_per_sm
    assert gpu.register_bytes_per_sm == 4 * 65536
    assert occupancy(kernel(32, 256), gpu).blocks_per_sm > 0


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(BadInput, match="only the launch says"):
        occupancy(replace(kernel(32, 1), threads=None), H200)
    with pytest.raises(BadInput, match="NVIDIA's GPUs alone"):
        occupancy(kernel(32, 128), find("mi300x"))
    with pytest.raises(BadInput, match="sm_990"):
        occupancy(kernel(32, 128), card(990))
    with pytest.raises(BadInput, match="at least 1"):
        occupancy(kernel(32, 0), H200)


@pytest.mark.parametrize("capability", SMS)
def test_what_if_gives_the_largest_block_that_brings_more(capability: int) -> None:
    gpu, stepped = card(capability), 0
    for resources in some(capability, 60):
        found = what_if(resources, gpu)
        now = found.now.blocks_per_sm

        def blocks(registers: int, shared: int, like: Resources = resources) -> int:
            changed = replace(like, registers=registers, static_shared_bytes=0, dynamic_shared_bytes=shared)
            return occupancy(changed, gpu).blocks_per_sm

        if now:
            more, bytes_more = found.spare_registers, found.spare_shared_bytes
            assert blocks(resources.registers + more, resources.shared_bytes + bytes_more) == now
            assert blocks(resources.registers + more + 1, resources.shared_bytes) < now
            assert blocks(resources.registers, resources.shared_bytes + bytes_more + 1) < now
        if found.next is None:
            assert blocks(1, 0) == now
            assert "bring nothing" in found.sentence
            continue
        stepped += 1
        registers, shared = found.next.registers, found.next.shared_bytes
        assert found.next.occupancy.blocks_per_sm == blocks(registers, shared) > now
        assert found.next.registers_fewer or found.next.shared_bytes_fewer
        if found.next.registers_fewer:
            assert blocks(registers + 1, shared) <= now
        if found.next.shared_bytes_fewer:
            assert blocks(registers, shared + 1) <= now
    assert stepped > 10


def test_what_if_in_words() -> None:
    assert what_if(kernel(65, 512), H200).sentence == (
        "with 1 register fewer a thread (64), 2 blocks an SM instead of 1: 25 % -> 50 %"
    )
    assert what_if(kernel(66, 512), H200).sentence.endswith("25 % -> 50 %; 1 fewer brings nothing")
    assert what_if(kernel(32, 128, 120_000), H200).sentence == (
        "with 4288 bytes of shared memory fewer (115712), 2 blocks an SM instead of 1: 6 % -> 12 %"
    )
    both = what_if(kernel(200, 256, 200_000), H200)
    assert "72 registers fewer a thread (128) and 84288 bytes of shared memory fewer (115712)" in both.sentence
    assert what_if(kernel(32, 1024), H200).sentence == (
        "fewer registers or less shared memory bring nothing: threads limit to 2 blocks an SM"
    )


def test_table_marks_the_best_and_the_compiled_size() -> None:
    rows = table(kernel(40, 192), H200)
    assert [row.threads for row in rows] == [32, 64, 128, 192, 256, 512, 1024]
    assert [row.occupancy.warps_per_sm for row in rows] == [32, 48, 48, 48, 48, 48, 32]
    assert [row.threads for row in rows if row.is_best] == [64, 128, 192, 256, 512]
    assert [row.num_warps for row in rows if row.is_compiled] == [6]
    assert len(table(kernel(40, 192), H200, threads=range(32, 1025, 32))) == 32
    assert not any(row.is_best for row in table(kernel(256, 32), H200))

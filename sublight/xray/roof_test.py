"""No bound lies above what an H200 measured, and together they explain most of it; each bound's arithmetic.

The measured medians are those of benchmarks/h200.json. What compiles runs in a process of its own: where there is no
GPU, this one has Triton's interpreter, which does not.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.gpus import find
from sublight.xray.occupancy.blocks import occupancy
from sublight.xray.occupancy.in_flight import bytes_in_flight
from sublight.xray.occupancy.waves import waves
from sublight.xray.ptx.accesses import Followed
from sublight.xray.ptx.moved import Moved
from sublight.xray.record import Access, AccessKind, Code, Resources, Space
from sublight.xray.roof import Bound, Roof, roof_of
from sublight.xray.sass.turns import Turns

ROOT = Path(__file__).parents[2]
H200 = find("h200")
CLOCK = 1.98e9
CLOSE = 1.05  # the medians themselves vary by a few per cent from run to run

# ------------------------------------------------------------------------------------------------ against an H200

ROWS = (  # op, shape; each has what once made a bound too high
    ("softmax", (16384, 8192)),
    ("layer_norm", (174762, 768)),  # weights as large as a row: the L1 has them
    ("gelu", (32768, 4096)),  # its code twice, with and without a mask
    ("embedding", (65536, 768, 50257)),  # a gather of frequent rows
    ("reduce_argmax", (174762, 768, 1)),  # issue explains it, twice its floor
    ("rope", (16, 2048, 28, 4, 128)),  # q and k in one grid
    ("swiglu", (32768, 4096)),  # two thirds are read: faster than a copy
    ("quantize_int8", (52428, 2560)),  # a branch depends on the values
)
ASKED = """\
import json, sys
from sublight.gpus import find as gpu_of
from sublight.ops import find
from sublight.xray import build
from sublight.xray.examine import examine
from sublight.xray.inputs.op import launches_at

gpu, found = gpu_of("h200"), []
for name, shape, dtype in json.loads(sys.argv[1]):
    pages = [examine(build.code_of(launch, gpu)) for launch in launches_at(find(name), gpu, shape, dtype)]
    found.append([{bound.name: bound.seconds for bound in page.roof.bounds} for page in pages])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def measured() -> list[tuple[str, float, dict[str, float]]]:
    """Op, median and every bound: of several launches, their sum."""
    benched = json.loads((ROOT / "benchmarks" / "h200.json").read_text())["rows"]
    chosen = []
    for op, sizes in ROWS:
        rows = [
            row
            for row in benched
            if row["ours"] and (row["op"], row["direction"], tuple(row["shape"].values())) == (op, "fwd", sizes)
        ]
        assert len(rows) == 1, f"{op} {sizes} is not in benchmarks/h200.json"
        chosen += rows
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = json.dumps([(row["op"], row["shape"], row["dtype"]) for row in chosen])
    words = [sys.executable, "-c", ASKED, asked]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return [
        (row["op"], row["median_s"], {name: sum(page[name] for page in pages) for name in pages[0]})
        for row, pages in zip(chosen, found, strict=True)
    ]


def test_no_bound_is_above_what_was_measured(measured: list[tuple[str, float, dict[str, float]]]) -> None:
    shares = {(op, name): seconds / median for op, median, bounds in measured for name, seconds in bounds.items()}
    assert len(shares) == 5 * len(ROWS), "all are known"
    assert {row: share for row, share in shares.items() if share > CLOSE} == {}


def test_the_highest_bound_explains_most(measured: list[tuple[str, float, dict[str, float]]]) -> None:
    explained = {op: max(bounds.values()) / median for op, median, bounds in measured}
    assert statistics.median(explained.values()) > 0.9 and min(explained.values()) > 0.65, explained
    highest = {op: max(bounds, key=lambda name: bounds[name]) for op, _, bounds in measured}
    assert highest["softmax"] == "floor" and highest["reduce_argmax"] == "issue" and highest["embedding"] != "floor"


# ------------------------------------------------------------------------------------------------ arithmetic

USED = Resources(
    registers=32, spill_bytes=0, stack_bytes=0, static_shared_bytes=0, dynamic_shared_bytes=0, barriers=0, threads=128
)
MIB = 2**20


class Tensor:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def access(space: Space, kind: AccessKind, **counts: Any) -> Access:
    return Access(place=None, space=space, kind=kind, bytes_per_thread=16, requests=1, **counts)


def roof(
    grid: int,
    *,
    tensors: dict[str, int],
    read: dict[str, int],
    written: dict[str, int],
    indirect: dict[str, int] | None = None,
    accesses: tuple[Access, ...] = (),
    clocks: float = 100.0,
    gpu: str = "h200",
    problem: str = "",
    measured_s: float | None = None,
    ahead: int = 16,
    threads: int = 128,
) -> Roof:
    """Of a launch of which two blocks were followed."""
    chip = find(gpu)
    found = occupancy(replace(USED, threads=threads), chip)
    moved = Moved(read_bytes=read, written_bytes=written, indirect_bytes=indirect or {})
    code = Code(
        name="k", symbol="k", gpu=chip, resources=USED, sass="", grid=(grid,),
        arguments={name: Tensor(size) for name, size in tensors.items()},
    )  # fmt: skip
    return roof_of(
        code,
        turns=Turns(clocks=clocks, limit="issue", loops=()),
        accesses=accesses,
        followed=Followed(entry=None, blocks=2, moved=moved, problem=problem),
        occupancy=found,
        waves=waves(grid, found, chip),
        in_flight=bytes_in_flight(found, chip, bytes_per_thread=ahead),
        measured_s=measured_s,
    )


def of(found: Roof, name: str) -> Bound:
    return next(bound for bound in found.bounds if bound.name == name)


def seconds(found: Roof, name: str) -> float:
    result = of(found, name).seconds
    assert result is not None, of(found, name).detail
    return result


ROW = {"tensors": {"x": 8 * MIB, "y": 8 * MIB}, "read": {"x": 2 * 8192}, "written": {"y": 2 * 8192}}  # of 1024 blocks


def test_the_floor_is_every_tensor_once_at_what_such_a_mix_reaches() -> None:
    assert seconds(roof(1024, **ROW), "floor") == pytest.approx(16 * MIB / 4.25e12)  # type: ignore[arg-type]
    reads: dict[str, Any] = {"tensors": {"x": 8 * MIB}, "read": {"x": 2 * 8192}, "written": {}}
    assert seconds(roof(1024, **reads), "floor") == pytest.approx(8 * MIB / 4.5e12), "reads alone are faster"
    peak = 2_039e9
    assert seconds(roof(1024, gpu="a100", **reads), "floor") == pytest.approx(8 * MIB / peak, rel=0.03)


def test_weights_count_once_and_parts_as_far_as_blocks_go() -> None:
    weights: dict[str, Any] = {
        "tensors": {"w": 8192, "y": 8 * MIB},
        "read": {"w": 2 * 8192},
        "written": {"y": 2 * 8192},
    }
    moved = seconds(roof(1024, **weights), "floor") * 4.64e12
    assert moved == pytest.approx(8 * MIB + 8192, rel=0.01)
    part: dict[str, Any] = {"tensors": {"x": 80 * MIB}, "read": {"x": 2 * 8192}, "written": {}}
    assert seconds(roof(1024, **part), "floor") == pytest.approx(8 * MIB / 4.5e12), "a tenth of it"


def test_of_a_gather_only_what_was_followed_counts() -> None:
    gather: dict[str, Any] = {
        "tensors": {"w": 8 * MIB},
        "read": {"w": 2 * 8192},
        "written": {},
        "indirect": {"w": 2 * 8192},
    }
    found = of(roof(1024, **gather), "floor")
    both = gather | {"read": {"w": 4 * 8192}}  # a row directly, and one element elsewhere
    assert seconds(roof(1024, **both), "floor") == pytest.approx(8 * MIB / 4.5e12)
    assert found.seconds == pytest.approx(2 * 8192 / 4.5e12) and "of w data say what is read" in found.detail


def test_what_is_written_behind_addresses_counts() -> None:
    found = of(roof(1024, tensors={}, read={"": 64}, written={"": 2 * 8192}), "floor")
    assert found.seconds == pytest.approx(8 * MIB / 4.64e12) and "behind addresses in a table" in found.detail


def test_pointers_without_tensors_have_no_floor() -> None:
    """As --sig gives them: that the kernel moves something is known, how much in all is not."""
    found = of(roof(1024, tensors={}, read={"x": 2 * 8192}, written={}), "floor")
    assert found.seconds is None and "how large its tensors are is not known" in found.detail
    assert "nothing is known to move" in of(roof(1024, tensors={}, read={}, written={}), "floor").detail


def test_transactions_go_through_the_l2_unless_the_l1_has_them() -> None:
    assert seconds(roof(1024, **ROW), "transactions") == pytest.approx(16 * MIB / 7.8e12)  # type: ignore[arg-type]
    weights: dict[str, Any] = {"tensors": {"w": 8192}, "read": {"w": 2 * 8192}, "written": {}}
    assert seconds(roof(4096, **weights), "transactions") == pytest.approx(132 * 8192 / 7.8e12), "once an SM"
    again = (access("global", "load", sectors=2 * 8192),)  # the same bytes 32 times
    found = of(roof(4096, accesses=again, **weights), "transactions")
    assert found.seconds == pytest.approx(4096 * 8192 * 32 / (128 * 132 * CLOCK)) and "through the L1" in found.detail


def test_shared_memory_is_that_of_the_busiest_sm() -> None:
    passes = (access("shared", "load", wavefronts=64, ideal_wavefronts=2),)
    found = of(roof(133, accesses=passes, **ROW), "shared memory")  # type: ignore[arg-type]
    assert found.seconds == pytest.approx(2 * 32 / CLOCK), "two blocks on one SM"
    assert found.detail == "64 passes on an SM, one a clock; 62 of them are bank conflicts and cost 31.3 ns"
    assert of(roof(133, **ROW), "shared memory").detail == "none is used"  # type: ignore[arg-type]


def test_issue_is_that_of_the_busiest_sm() -> None:
    assert seconds(roof(1, **ROW), "issue") == pytest.approx(100 / CLOCK), "four warps, four schedulers"  # type: ignore[arg-type]
    assert seconds(roof(132, **ROW), "issue") == pytest.approx(100 / CLOCK)  # type: ignore[arg-type]
    assert seconds(roof(133, **ROW), "issue") == pytest.approx(200 / CLOCK)  # type: ignore[arg-type]
    assert seconds(roof(133, threads=256, **ROW), "issue") == pytest.approx(400 / CLOCK), "two blocks of two each"  # type: ignore[arg-type]
    assert "1 warp to each of the 4 schedulers" in of(roof(1, **ROW), "issue").detail  # type: ignore[arg-type]


def test_latency_is_a_wave_at_a_time_and_little_s_law() -> None:
    answer_s = 678.6 / 1980e6
    assert seconds(roof(1, **ROW), "latency") == pytest.approx(8192 * answer_s / (4 * 32 * 16)), "one block, four warps"  # type: ignore[arg-type]
    assert of(roof(1, **ROW), "latency").detail.endswith("with 2,112 blocks at a time; here are 1")  # type: ignore[arg-type]
    few: dict[str, Any] = {"tensors": {"x": 8 * MIB}, "read": {"x": 2 * 8192}, "written": {}, "ahead": 1}
    assert seconds(roof(1024, **few), "latency") == pytest.approx(8 * MIB * answer_s / (4 * 32 * 1024))
    assert of(roof(1024, **few), "latency").detail.startswith("64 warps x 32 x 1 B")
    assert of(roof(4000, **ROW), "latency").detail.startswith("2 waves of blocks")  # type: ignore[arg-type]


def test_what_could_not_be_followed_says_why() -> None:
    found = roof(1024, problem="only the binary is at hand", **ROW)  # type: ignore[arg-type]
    for name in ("floor", "transactions", "shared memory", "latency"):
        result = of(found, name)
        assert result.seconds is None and result.detail == "only the binary is at hand"
    assert found.highest is not None and found.highest.name == "issue"
    tma = (replace(access("global", "bulk copy"), unknown="TMA moves whole tiles"),)
    result = of(roof(1024, accesses=tma, **ROW), "transactions")  # type: ignore[arg-type]
    assert result.seconds is None and result.detail == "TMA moves whole tiles"


ALONE = "nothing but device memory holds it back"
UNKNOWN = "how long device memory takes is not known; of the rest, "


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"floor": 2e-6, "issue": 1e-6}, f"{ALONE}: 2.00 µs at best"),
        ({"floor": 1e-6, "issue": 2e-6}, "issuing its instructions holds it back: 2.00 µs at best, 2 times its floor"),
        ({"transactions": 3e-6}, f"{UNKNOWN}its memory transactions hold it back: 3.00 µs at best"),
        ({"floor": 1e-6, "issue": 1.04e-6}, "device memory and issue hold it back equally: 1.04 µs at best"),
        ({"latency": 1e-6}, f"{UNKNOWN}waiting for memory holds it back: 1.00 µs at best"),
        ({"floor": 1e-6, "measured": 4e-6}, f"{ALONE}: 1.00 µs at best; measured 4.00 µs, of which that explains 25 %"),
        ({"floor": 1e-9, "latency": 3e-7}, "waiting for memory holds it back: 300 ns at best, 300 times its floor"),
        (
            {"floor": 1e-6, "latency": None, "issue": 5e-7},
            "device memory holds it back, as far as is known: 1.00 µs at best",
        ),
        ({}, ""),
    ],
)
def test_sentences(times: dict[Any, float | None], words: str) -> None:
    assert Roof(bounds=tuple(Bound(name=name, seconds=s, detail="") for name, s in times.items())).sentence == words

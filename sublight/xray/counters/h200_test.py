"""Predictions against what an H200 counted, launch by launch, and against its driver; no GPU is needed.

`h200_counts.json.gz` holds the PTX of 54 launches (ours, tutorials', CUDA C++ with known behaviour), their arguments,
the counters of ncu and the answers of the driver; its `about` says of which versions. `h200.ncu-rep.gz` is a report of
three of them as ncu wrote it, without the parts that nobody here reads.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublight.gpus import find
from sublight.xray import binary
from sublight.xray.counters import ncu_csv, ncu_report
from sublight.xray.counters.measure import CLOSE, compare
from sublight.xray.counters.record import Counters, counters
from sublight.xray.occupancy.blocks import occupancy
from sublight.xray.ptx import start
from sublight.xray.ptx.accesses import accesses
from sublight.xray.record import Access, AccessKind, Code, Resources, Space

HERE = Path(__file__).parent
MERGED = ("t_cumsum", "shared load", "wavefronts per request")  # the assembler makes one load of two: 2 instead of 1.33
LABELS = (
    "add 262144", "softmax 512x1024", "softmax backward", "softmax 64x1601", "rms_norm 512x2048", "rms_norm backward",
    "layer_norm 512x1024", "rope 2x128x8x2x128", "qk_norm_rope 2x128x8x2x128", "cross_entropy 64x32000",
    "transpose 1x512x384", "permute 2x128x16x64x1324", "swiglu 256x1600", "gelu 256x1024", "adamw 1x262144",
    "embedding 256x512x1000", "cumsum 64x2048", "reduce_sum 512x768x1", "quantize_fp8 256x1024",
    "online_softmax 64x4096", "t_vector_add", "t_vector_add tail", "t_softmax 1000", "t_layer_norm",
    "t_matmul 128 stages 3", "t_matmul 32 warps 1", "t_matmul b transposed", "t_stride2", "t_misaligned",
    "t_transposed_store", "t_trans 64", "t_trans 32 bf16", "t_gather", "t_column_sum", "t_atomic", "t_cumsum",
    "cu_copy4", "cu_copy1", "cu_stride2", "cu_misaligned", "cu_broadcast", "cu_red", "cu_atom", "cu_transposed_store",
    "cu_tile33", "cu_conflict32", "cu_conflict2", "cu_conflict32_store", "cu_shared4", "cu_async", "cu_spill",
    "cu_dynamic",
)  # fmt: skip
WHOLE = (  # all of their blocks are followed
    "t_vector_add tail", "t_softmax 1000", "t_misaligned", "t_trans 32 bf16", "t_column_sum", "t_atomic",
    "softmax 64x1601", "rms_norm backward", "reduce_sum 512x768x1", "cu_stride2", "cu_broadcast", "cu_atom", "cu_red",
    "cu_transposed_store", "cu_tile33", "cu_conflict32", "cu_conflict2", "cu_conflict32_store", "cu_shared4",
    "cu_async", "cu_spill", "cu_dynamic",
)  # fmt: skip
_L1, _BY_ADDRESS = (
    "l1tex__t_{}_pipe_lsu_mem_global_op_{}.sum",
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{}.sum",
)
_Sum = tuple[Space, tuple[AccessKind, ...], str, tuple[str, ...]]
SUMS: tuple[_Sum, ...] = (
    *(
        ("global", kinds, what, tuple(_L1.format(what, word) for word in words))
        for what in ("requests", "sectors")
        for kinds, words in (
            (("load", "async copy"), ("ld",)), (("store",), ("st",)), (("atomic",), ("atom", "red")),
        )
    ),
    *(
        ("shared", kinds, "all_wavefronts", (_BY_ADDRESS.format(word),))
        for kinds, word in (
            (("load",), "ld"), (("store", "matrix store"), "st"), (("matrix load",), "ldsm"),
            (("async copy",), "ldgsts"),
        )
    ),
    ("shared", ("load",), "requests", ("smsp__sass_inst_executed_op_shared_ld.sum",)),
    ("shared", ("store",), "requests", ("smsp__sass_inst_executed_op_shared_st.sum",)),
)  # fmt: skip


@functools.cache
def stored() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(gzip.decompress((HERE / "h200_counts.json.gz").read_bytes()))
    return told


def launches(label: str) -> list[dict[str, Any]]:
    return [row for row in stored()["launches"] if row["label"] == label and "counted" in row]


def code_of(row: dict[str, Any]) -> Code:
    values = {
        name: np.frombuffer(base64.b64decode(value[1]), value[0]) if isinstance(value, list) else value
        for name, _, value in row["arguments"]
    }
    return Code(
        name=row["kernel"],
        symbol=row["kernel"],
        gpu=find("h200"),
        resources=resources(row),
        sass="",
        ptx=stored()["ptx"][row["code"]],
        signature={name: kind for name, kind, _ in row["arguments"]},
        arguments={name: value for name, value in values.items() if value is not None},
        options={"block": tuple(row["block"])},
        grid=tuple(row["grid"]),
    )


def resources(row: dict[str, Any], sass: str = "") -> Resources:
    return binary.resources(
        row["used"],
        sass,
        dynamic_shared_bytes=row["dynamic_shared_bytes"],
        threads=math.prod(row["block"]),
        capability=90,
    )


def counted(row: dict[str, Any]) -> Counters:
    known = zip(stored()["metrics"], row["counted"], strict=True)
    return counters(row["kernel"], {name: (float(value), "") for name, value in known if value is not None})


# ------------------------------------------------------------------------------------------------ ncu


def test_every_launch_is_listed() -> None:
    assert set(LABELS) == {row["label"] for row in stored()["launches"]}
    assert sum("counted" in row for row in stored()["launches"]) == 54


def evenly(grid: tuple[int, int, int], count: int) -> tuple[tuple[int, int, int], ...]:
    """The blocks whose part of t_gather's index is stored: of 64, every ninth."""
    return tuple((round(at * (grid[0] - 1) / (count - 1)), 0, 0) for at in range(count))


@pytest.mark.parametrize("label", LABELS)
def test_what_a_page_shows_is_what_was_counted(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios, from the blocks that are followed by default."""
    if label == "t_gather":
        monkeypatch.setattr(start, "chosen_blocks", evenly)
    for row in launches(label):
        found = accesses(code_of(row))
        assert not [access.unknown for access in found if access.unknown]
        compared = compare(found, counted(row))
        assert compared
        wrong = [one for one in compared if not one.is_close and (label, one.what, one.unit) != MERGED]
        assert wrong == [], row["kernel"]


def test_a_load_that_the_assembler_merges_is_still_told_apart() -> None:
    """Should this be mended, the exception above has to go."""
    (row,) = launches(MERGED[0])
    (found,) = [one for one in compare(accesses(code_of(row)), counted(row)) if (one.what, one.unit) == MERGED[1:]]
    assert found.predicted == pytest.approx(4 / 3) and found.counted == 2


@pytest.mark.parametrize("label", WHOLE)
def test_whole_launches_to_the_last_sector(label: str) -> None:
    for row in launches(label):
        found = accesses(code_of(row), blocks=10**6)
        theirs = dict(zip(stored()["metrics"], row["counted"], strict=True))
        for space, kinds, what, names in SUMS:
            assert _total(found, space, kinds, what) == sum(theirs[name] for name in names), (row["kernel"], names)


def _total(found: tuple[Access, ...], space: Space, kinds: tuple[AccessKind, ...], what: str) -> int:
    return sum(getattr(access, what) for access in found if access.space == space and access.kind in kinds)


def test_all_of_shared_memory_with_what_tensor_cores_read() -> None:
    (row,) = launches("t_matmul 128 stages 3")
    found = accesses(code_of(row))  # 8 of 16 blocks, all alike
    theirs = dict(zip(stored()["metrics"], row["counted"], strict=True))
    shared = [access for access in found if access.space == "shared"]
    assert 2 * sum(access.all_wavefronts for access in shared) == theirs["memory_l1_wavefronts_shared"]
    assert 2 * sum(access.ideal_wavefronts for access in shared) == theirs["memory_l1_wavefronts_shared_ideal"]


def test_copies_of_half_lines_take_twice_the_passes() -> None:
    (row,) = launches("t_matmul 32 warps 1")
    copies = [access for access in accesses(code_of(row)) if (access.space, access.kind) == ("shared", "async copy")]
    assert all(access.bank_conflict == 1 for access in copies)
    assert {access.split_wavefronts / access.wavefronts for access in copies} <= {0, 15 / 16, 1}
    assert sum(access.split_wavefronts for access in copies) > 0.9 * sum(access.wavefronts for access in copies)


# ------------------------------------------------------------------------------------------------ the driver


def test_registers_spills_and_shared_memory_are_the_driver_s() -> None:
    for row in stored()["launches"]:
        told, used = row["driver"], resources(row)
        assert used.registers == told["registers"], row["kernel"]
        assert used.stack_bytes == told["local_bytes"], row["kernel"]
        assert used.static_shared_bytes == told["static_shared_bytes"], row["kernel"]


@pytest.mark.parametrize("name", ["cuda", "_ring_backward_kernel"])
def test_a_cubin_is_read_as_the_driver_reads_it(name: str) -> None:
    pytest.importorskip("triton")
    cubin = zlib.decompress(base64.b64decode(stored()["cubins"][name]))
    used = binary.usage(cubin)
    rows = [
        row for row in stored()["launches"] if row["kernel"] in used and (name != "cuda" or row["code"][:3] == "cu_")
    ]
    assert len(rows) == len(used) == (16 if name == "cuda" else 1)
    for row in rows:
        assert {key: used[row["kernel"]][key] for key in row["used"]} == row["used"]
    spilled = {row["kernel"]: row["driver"]["local_bytes"] for row in rows if row["driver"]["local_bytes"]}
    assert spilled == ({"cu_spill": 368} if name == "cuda" else {"_ring_backward_kernel": 8})


def test_occupancy_is_the_driver_s() -> None:
    h200, asked = find("h200"), 0
    for row in stored()["launches"]:
        used = resources(row)
        assert occupancy(used, h200).blocks_per_sm == row["driver"]["blocks_per_sm"], row["kernel"]
        for threads, dynamic, blocks in row["swept"]:
            asked += 1
            found = occupancy(dataclasses.replace(used, dynamic_shared_bytes=dynamic), h200, threads=threads)
            assert found.blocks_per_sm == blocks, (row["kernel"], threads, dynamic)
    assert asked == 440


# ------------------------------------------------------------------------------------------------ a report


def test_a_report_says_what_ncu_exports_of_it(tmp_path: Path) -> None:
    file = tmp_path / "h200.ncu-rep"
    file.write_bytes(gzip.decompress((HERE / "h200.ncu-rep.gz").read_bytes()))
    ours, theirs = ncu_report.read(file), ncu_csv.parse(stored()["exported"])
    assert [row.kernel for row in ours] == ["t_vector_add", "t_stride2", "cu_conflict32"]
    for mine, exported in zip(ours, theirs, strict=True):
        result = {
            key: value for key, value in dataclasses.asdict(exported).items() if value is not None and value != {}
        }
        assert len(result) == 24
        for key, value in result.items():  # ncu exports six decimals
            same = pytest.approx(value, rel=1e-6, abs=1e-8) if isinstance(value, float) else value
            assert getattr(mine, key) == same, (mine.kernel, key)
    assert ours[1].sectors_per_load == 32


def test_the_bound_is_five_per_cent() -> None:
    assert CLOSE == 0.05

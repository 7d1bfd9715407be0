"""A kernel's page: the schema that others read, and the shape that was asked for.

What compiles runs in a process of its own: where there is no GPU, this one has Triton's interpreter, which does not.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.gpus import find, memory_peak

ASKED = """\
import json
from sublight.gpus import find
from sublight.xray.examine import examine
from sublight.xray.inputs.load import load
from dataclasses import replace


def page(target, gpu, **words):
    return [examine(code).to_json() for code in load(target, [find(gpu)], **words)]


(code,) = load("softmax:_row_kernel", [find("h200")], shape="4096x8192")
alone = replace(code, ptx="", grid=(), arguments={}, resources=replace(code.resources, threads=None))
print(json.dumps(dict(
    rows=page("softmax:_row_kernel", "h200", shape="4096x8192"),
    gather=page("embedding:_gather_kernel", "h100", shape="65536x768x50257"),
    alone=examine(alone).to_json(),
    measured=[str(examine(code, measured_s=s).roof.sentence) for s in (60e-6, 5e-6)],
    words=[examine(replace(code, grid=(1,))).waves.sentence],
)))
"""
KERNEL: dict[str, type | tuple[type, ...]] = {  # of the schema
    "name": str,
    "gpu": str,
    "registers": int,
    "spill_bytes": int,
    "shared_bytes": int,
    "threads": int,
    "blocks_per_sm": int,
    "occupancy": float,
    "limited_by": str,
    "tensor_core": (str, type(None)),
    "accesses": list,
}
ACCESS: dict[str, type | tuple[type, ...]] = {
    "line": int,
    "kind": str,
    "bytes_per_thread": int,
    "sectors_per_request": (float, type(None)),
    "bank_conflict": (float, type(None)),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", ASKED]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2], env=environment
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def bound(page: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in page["roof"] if row["name"] == name)


def test_the_schema(answers: dict[str, Any]) -> None:
    for page in (*answers["rows"], *answers["gather"]):
        assert {name: page[name] for name in KERNEL if not isinstance(page[name], KERNEL[name])} == {}
        assert page["accesses"]
        for access in page["accesses"]:
            assert {name: access[name] for name in ACCESS if not isinstance(access[name], ACCESS[name])} == {}


def test_values_of_a_row_softmax(answers: dict[str, Any]) -> None:
    (page,) = answers["rows"]
    assert (page["name"], page["gpu"], page["tensor_core"], page["spill_bytes"]) == ("_row_kernel", "h200", None, 0)
    assert page["threads"] == 512 and page["occupancy"] == page["warps_per_sm"] / 64
    assert page["blocks_per_sm"] == page["warps_per_sm"] // 16
    in_memory = [access for access in page["accesses"] if access["space"] == "global"]
    assert [access["kind"] for access in in_memory] == ["load", "load", "store", "store"]
    assert {access["sectors_per_request"] for access in in_memory} == {16.0}
    assert {access["bytes_per_thread"] for access in in_memory} == {16}
    assert all(access["bank_conflict"] == 1 for access in page["accesses"] if access["space"] == "shared")


def test_the_page_is_for_the_shape_that_was_asked_for(answers: dict[str, Any]) -> None:
    (page,) = answers["rows"]
    assert page["grid"] == [4096] and page["waves"].startswith("4096 blocks")
    floor = bound(page, "floor")
    assert floor["detail"].startswith("67.1 MB read and 67.1 MB written, at 4.25 TB/s")
    assert floor["seconds"] == pytest.approx(2 * 4096 * 8192 * 2 / 4.25e12)


def test_a_gather_claims_no_more_of_its_table_than_was_followed(answers: dict[str, Any]) -> None:
    (page,) = answers["gather"]
    assert page["grid"] == [24576]
    floor = bound(page, "floor")
    assert "of w_ptr data say what is read" in floor["detail"]
    ids, rows = 65536 * 8, 65536 * 768 * 2
    assert ids + rows < floor["seconds"] * memory_peak(find("h100")).value < 1.1 * (ids + rows), (
        "what is written, and the ids"
    )


def test_what_is_not_known_says_why(answers: dict[str, Any]) -> None:
    page = answers["alone"]
    assert page["threads"] is page["occupancy"] is page["limited_by"] is page["blocks_per_sm"] is None
    assert page["accesses"] == [] and {row["seconds"] for row in page["roof"]} == {None}
    assert all(row["detail"] for row in page["roof"])
    assert page["notes"][0] == "how many threads a block has is not known: give --threads 256"


def test_the_measured_time_beside_the_bounds(answers: dict[str, Any]) -> None:
    slow, fast = answers["measured"]
    assert slow == (
        "nothing but device memory holds it back: 31.6 µs at best; measured 60.0 µs, of which that explains 53 %"
    )
    assert fast.endswith("measured 5.00 µs, which is less: a cache had its data")


def test_one_block(answers: dict[str, Any]) -> None:
    (words,) = answers["words"]
    assert re.fullmatch(r"1 block is less than one wave of \d+: 131 of 132 SMs stay idle", words), words


def test_what_an_author_accepts_is_information() -> None:
    from dataclasses import replace

    from sublight.report.xray import fakes
    from sublight.xray.examine import _judged
    from sublight.xray.record import Finding

    spill = Finding(id="spill", kernel="k", place=None, detail="8 bytes")
    plain = fakes.code()
    assert _judged(plain, spill) == spill
    accepted = _judged(replace(plain, accepted={"spill": "quicker so"}), spill)
    assert accepted.is_information and accepted.detail == "8 bytes; accepted: quicker so"

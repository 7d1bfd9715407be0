"""Planted kernels, good and bad: sectors, passes, findings; and Triton's own output, whose stored values are compared.

What compiles runs in one process of its own: where there is no GPU, this one has Triton's interpreter, which does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublight.gpus import find
from sublight.xray.ptx.accesses import access_findings, accesses, follow_blocks
from sublight.xray.record import Access, Code, Finding, Resources

ROOT = Path(__file__).parents[3]
HEAD = """
.version 8.0
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 tile[];
.visible .entry k(.param .u64 .ptr .global .align 4 x_ptr, .param .u64 .ptr .global .align 4 y_ptr, .param .u32 n)
.reqntid 64
{
.reg .pred %p<9>; .reg .b32 %r<30>; .reg .b64 %rd<30>; .reg .b16 %h<4>;
.loc 1 10 0
ld.param.u64 %rd1, [x_ptr]; ld.param.u64 %rd2, [y_ptr]; ld.param.u32 %r9, [n];
mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 64, %r1; mov.u32 %r4, tile;
"""
TAIL = 'ret;\n}\n.file 1 "planted.cu"\n'


def planted(body: str, *, grid: tuple[int, ...] = (1,), **arguments: Any) -> Code:
    resources = Resources(
        registers=0, spill_bytes=0, stack_bytes=0, static_shared_bytes=0, dynamic_shared_bytes=0, barriers=0, threads=64
    )
    given = {"x_ptr": np.arange(2**16, dtype=np.uint32), "y_ptr": np.zeros(2**16, np.uint32), "n": 64} | arguments
    return Code(
        name="k",
        symbol="k",
        gpu=find("h200"),
        resources=resources,
        sass="",
        ptx=HEAD + body + TAIL,
        signature={"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"},
        grid=grid,
        arguments={name: value for name, value in given.items() if value is not None},
    )


def seen(code: Code, *, blocks: int = 3) -> tuple[tuple[Access, ...], tuple[Finding, ...]]:
    followed = follow_blocks(code, blocks=blocks)
    assert followed.problem == ""
    assert followed.stops == ()
    return accesses(code, followed=followed), access_findings(code, followed)


GLOBAL = ".loc 1 20 0\n{index}; mul.wide.u32 %rd3, %r5, {scale}; add.s64 %rd4, %rd1, %rd3; {load}; "


@pytest.mark.parametrize(
    ("index", "scale", "load", "width", "sectors", "ideal", "found"),
    [
        ("mov.u32 %r5, %r3", 4, "ld.global.u32 %r6, [%rd4]", 4, 4, 4, None),
        ("mov.u32 %r5, %r3", 16, "ld.global.v4.u32 {%r6,%r7,%r8,%r10}, [%rd4]", 16, 16, 16, None),
        ("mov.u32 %r5, %r3", 2, "ld.global.u16 %h1, [%rd4]", 2, 2, 2, None),
        ("shl.b32 %r5, %r3, 1", 4, "ld.global.u32 %r6, [%rd4]", 4, 8, 4, "uncoalesced"),
        ("shl.b32 %r5, %r3, 5", 4, "ld.global.u32 %r6, [%rd4]", 4, 32, 4, "uncoalesced"),
        ("add.u32 %r5, %r3, 1", 4, "ld.global.u32 %r6, [%rd4]", 4, 5, 4, "misaligned"),
        ("mov.u32 %r5, 0", 4, "ld.global.u32 %r6, [%rd4]", 4, 1, 1, None),
        ("mov.u32 %r5, %r3", 4, "st.global.u32 [%rd4], %r3", 4, 4, 4, None),
        ("shl.b32 %r5, %r3, 5", 4, "st.global.u32 [%rd4], %r3", 4, 32, 4, "uncoalesced"),
        ("mov.u32 %r5, %r3", 4, "red.global.add.u32 [%rd4], %r3", 4, 4, 4, None),
    ],
)
def test_sectors_a_request(
    index: str, scale: int, load: str, width: int, sectors: int, ideal: int, found: str | None
) -> None:
    (access,), findings = seen(planted(GLOBAL.format(index=index, scale=scale, load=load), grid=(5,)))
    assert (access.bytes_per_thread, access.sectors_per_request) == (width, sectors)
    assert access.ideal_sectors / access.requests == ideal
    assert access.requests == 6, "two warps of three blocks"
    assert access.place and (access.place.file, access.place.line) == ("planted.cu", 20)
    assert [finding.id for finding in findings] == ([found] if found else [])


def test_a_view_that_begins_in_the_middle_is_misaligned() -> None:
    x = np.arange(1000, dtype=np.uint32)[3:]
    body = GLOBAL.format(index="mov.u32 %r5, %r3", scale=4, load="ld.global.u32 %r6, [%rd4]")
    (access,), (finding,) = seen(planted(body, x_ptr=x))
    assert access.sectors_per_request == 5
    assert (finding.id, finding.place and finding.place.line) == ("misaligned", 20)
    assert "320 bytes of sectors touched for 256 wanted" in finding.detail


def test_one_sector_of_sixteen_is_not_worth_a_word() -> None:
    load = "ld.global.v4.u32 {%r6,%r7,%r8,%r10}, [%rd4]"
    body = GLOBAL.format(index="add.u32 %r5, %r3, 1", scale=16, load=load)
    (access,), findings = seen(planted(body))
    assert (access.sectors_per_request, findings) == (17, ())


def test_a_masked_tail() -> None:
    """40 of 64: the second warp has eight lanes, one sector; of 20 it has none, and makes no request."""
    body = GLOBAL.format(
        index="mov.u32 %r5, %r3; setp.lt.u32 %p1, %r3, %r9", scale=4, load="@%p1 ld.global.u32 %r6, [%rd4]"
    )
    (access,), findings = seen(planted(body, n=40))
    assert (access.requests, access.sectors, access.ideal_sectors) == (2, 5, 5)
    (access,), _ = seen(planted(body, n=20))
    assert (access.requests, access.sectors) == (1, 3)
    assert findings == ()


def test_a_gather_by_real_indices() -> None:
    where = np.array([0, 1, 2, 3, 100, 101, 200, 300] * 8, np.uint32)
    body = GLOBAL.format(
        index="mul.wide.u32 %rd5, %r3, 4; add.s64 %rd5, %rd2, %rd5; ld.global.u32 %r5, [%rd5]",
        scale=4,
        load="ld.global.u32 %r6, [%rd4]",
    )
    (straight, gather), _ = seen(planted(body, y_ptr=where))
    assert (straight.sectors, gather.sectors, gather.ideal_sectors) == (8, 8, 2)
    (straight, gather), _ = seen(planted(body, y_ptr=None))
    assert straight.sectors == 8
    assert (gather.unknown, gather.sectors_per_request) == ("its address depends on the values of y_ptr", None)


def test_lanes_that_may_or_may_not_run_it() -> None:
    body = GLOBAL.format(
        index="mov.u32 %r5, %r3; ld.global.u32 %r6, [%rd2]; setp.eq.u32 %p1, %r6, 0",
        scale=4,
        load="@%p1 ld.global.u32 %r7, [%rd4]; st.global.u32 [%rd1], %r7",
    )
    (_, load, store), _ = seen(planted(body, y_ptr=None))
    assert (load.unknown, load.requests) == ("which lanes run it depends on the values of y_ptr", 0)
    assert (store.unknown, store.sectors) == ("", 2)


def test_a_missing_number_is_named() -> None:
    body = GLOBAL.format(index="mul.lo.u32 %r5, %r3, %r9", scale=4, load="ld.global.u32 %r6, [%rd4]")
    (access,), _ = seen(planted(body, n=None))
    assert access.unknown == "its address depends on argument n, which is not given (--arg n=4096)"


def test_what_a_block_loads_twice() -> None:
    load = "mul.wide.u32 %rd3, %r5, 16; add.s64 %rd4, %rd1, %rd3; ld.global.v4.u32 {%r6,%r7,%r8,%r10}, [%rd4]; "
    body = f".loc 1 20 0\nmov.u32 %r5, %r3; {load}\n.loc 1 30 0\n{load}"
    _, (finding,) = seen(planted(body, grid=(2,)))
    assert (finding.id, finding.is_information) == ("redundant-load", True)
    assert finding.place and finding.place.line == 30
    assert finding.detail.startswith("2,048 of 2,048 bytes")
    other = body.replace("1 30 0\n", "1 30 0\nadd.u32 %r5, %r5, 128; ")
    assert seen(planted(other, grid=(2,)))[1] == ()


SHARED = ".loc 1 40 0\nmul.lo.u32 %r5, %r1, {pitch}; add.u32 %r5, %r4, %r5; {access};"


@pytest.mark.parametrize(
    ("pitch", "access", "conflict"),
    [
        (128, "st.shared.u32 [%r5], %r1", 32),
        (132, "st.shared.u32 [%r5], %r1", 1),
        (4, "st.shared.u32 [%r5], %r1", 1),
        (8, "ld.shared.u32 %r6, [%r5]", 2),
        (0, "ld.shared.u32 %r6, [%r5]", 1),
        (16, "ld.shared.v4.u32 {%r6,%r7,%r8,%r10}, [%r5]", 1),
        (64, "ld.shared.v4.u32 {%r6,%r7,%r8,%r10}, [%r5]", 4),
        (128, "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6,%r7,%r8,%r10}, [%r5]", 8),
        (144, "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6,%r7,%r8,%r10}, [%r5]", 1),
    ],
)
def test_bank_conflicts(pitch: int, access: str, conflict: int) -> None:
    (told,), findings = seen(planted(SHARED.format(pitch=pitch, access=access)))
    assert told.bank_conflict == conflict
    assert told.requests == 2
    assert [finding.id for finding in findings] == (["bank-conflict"] if conflict > 1 else [])
    if findings:
        assert f"{conflict}-way" in findings[0].detail


def test_a_bulk_copy_has_no_addresses_of_lanes() -> None:
    body = """elect.sync %r5|%p1, -1;
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd1, {%r1, %r1}], [%r4];"""
    (access,), findings = seen(planted(body))
    assert (access.kind, access.unknown, findings) == ("bulk copy", "TMA moves whole tiles", ())


def test_only_the_binary() -> None:
    code = planted("")
    object.__setattr__(code, "ptx", "")
    assert follow_blocks(code).problem.startswith("only the binary")
    assert accesses(code) == ()


# ------------------------------------------------------------------------------------------------ Triton's output

if __name__ == "__main__" or "torch" in sys.modules:
    from sublight.backend.jit import tl, triton

    @triton.jit
    def _transpose_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
        row, col = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
        tile = tl.load(x_ptr + row * SIZE + col)
        tl.store(y_ptr + row * SIZE + col, tl.trans(tile))

    @triton.jit
    def _every_second_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + 2 * place, mask=place < n)
        tl.store(y_ptr + place, x, mask=place < n)


def _told(launch: Any, output: str, truth: Any) -> dict[str, Any]:
    """Compile, follow every block, and compare what was stored with the truth."""
    import torch

    from sublight.xray.build import code_of
    from sublight.xray.ptx.entry import parse_entry
    from sublight.xray.ptx.machine_test import Silent
    from sublight.xray.ptx.start import start_of
    from sublight.xray.ptx.steps import follow

    launch.arguments[output].fill_(float("nan"))  # nothing that lay there before counts
    code = code_of(launch, find("h200"))
    followed = follow_blocks(code)
    entry = parse_entry(code.ptx, code.symbol)
    start = start_of(code, entry, blocks=10**6)
    assert not isinstance(start, str)
    follow(entry, start, Silent(), most_steps=10**6)
    region = next(region for region in start.memory.regions if region.name == output)
    data = torch.from_numpy(region.memory.data).view(truth.dtype)[: truth.numel()]
    return {
        "stops": [stop.reason for stop in followed.stops],
        "error": float((data - truth.reshape(-1)).abs().max()),
        "unknown_bytes": 0 if region.memory.why is None else int((region.memory.why > 0).sum()),
        "accesses": [
            (one.space, one.kind, one.bytes_per_thread, one.sectors_per_request, one.bank_conflict, one.unknown)
            for one in accesses(code, followed=followed)
        ],
        "findings": [finding.id for finding in access_findings(code, followed)],
    }


def answers() -> dict[str, Any]:
    import torch

    from sublight.ops import find as op
    from sublight.xray.compile import recording

    torch.manual_seed(0)
    x, weight = torch.randn(5, 1000), torch.randn(1000)
    wide, wide_weight = torch.randn(3, 8192), torch.randn(8192)
    y = torch.zeros(10**6)
    square = torch.randn(64, 64)
    with recording(90, find("h200")) as launches:
        op("softmax").launch(x)
        op("rms_norm").launch(x, weight)
        op("rms_norm").launch(wide, wide_weight)
        _transpose_kernel[(1,)](square, y, SIZE=64, num_warps=4)
        _every_second_kernel[(4,)](x.view(-1), y, 2000, BLOCK=512, num_warps=4)
    softmax, norm, wide_norm, transpose, second = launches
    expected = torch.nn.functional.rms_norm
    return {
        "softmax": _told(softmax, "y_ptr", torch.softmax(x, -1)),
        "rms_norm": _told(norm, "y_ptr", expected(x, (1000,), weight, 1e-6)),
        "wide": _told(wide_norm, "y_ptr", expected(wide, (8192,), wide_weight, 1e-6)),
        "transpose": _told(transpose, "y_ptr", square.T.contiguous()),
        "second": _told(second, "y_ptr", x.view(-1)[:4000:2]),
    }


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "sublight.xray.ptx.accesses_test"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("name", ["softmax", "rms_norm", "wide", "transpose", "second"])
def test_values_that_triton_s_code_stores(told: dict[str, Any], name: str) -> None:
    assert told[name]["stops"] == []
    assert told[name]["unknown_bytes"] == 0
    assert told[name]["error"] < (1e-6 if name == "softmax" else 1e-5 if "norm" in name or name == "wide" else 1e-30)


def test_triton_reads_rows_side_by_side(told: dict[str, Any]) -> None:
    sectors = [
        (width, sectors)
        for space, _, width, sectors, _, _ in told["softmax"]["accesses"]
        if space == "global" and sectors
    ]
    assert sectors
    assert all(found <= width for width, found in sectors), "a full warp of w bytes a lane fills w sectors"
    assert told["softmax"]["findings"] == []


def test_triton_s_transpose_goes_through_swizzled_shared_memory(told: dict[str, Any]) -> None:
    found = told["transpose"]["accesses"]
    assert {(space, width, sectors) for space, _, width, sectors, _, _ in found if space == "global"} == {
        ("global", 16, 16)
    }
    conflicts = [conflict for space, *_, conflict, _ in found if space == "shared"]
    assert conflicts
    assert max(conflicts) <= 2


def test_triton_s_stride_of_two(told: dict[str, Any]) -> None:
    """Four elements a thread, so that the store is wide: its loads lie 32 bytes apart, a sector each."""
    found = {(kind, width): sectors for _, kind, width, sectors, _, _ in told["second"]["accesses"]}
    assert found == {("load", 4): pytest.approx(31.25), ("store", 16): pytest.approx(15.6, 0.01)}
    assert told["second"]["findings"] == ["uncoalesced"]


if __name__ == "__main__":
    print(json.dumps(answers()))

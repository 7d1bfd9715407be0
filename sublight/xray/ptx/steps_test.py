"""Forms of instructions that compilers write seldom, and what is not known: each is right, or said to be unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sublight.xray.ptx.accesses import accesses, follow_blocks
from sublight.xray.ptx.entry import parse_entry
from sublight.xray.ptx.machine_test import Silent, code, kernel
from sublight.xray.ptx.numbers import Array
from sublight.xray.ptx.start import start_of
from sublight.xray.ptx.steps import follow

ONES = 0xFFFFFFFF
OUT = "ld.param.u64 %rd1, [a0]; mov.u32 %r20, %tid.x; mul.wide.u32 %rd2, %r20, 4; add.s64 %rd3, %rd1, %rd2;\n"


def left(body: str, given: dict[str, Any] | None = None, *, threads: int = 32) -> tuple[Array, Array | None]:
    """What a0 holds at the end, and why any of it is not known."""
    one = code(kernel(OUT + body, threads=threads), {"0": np.zeros(threads, np.uint32), **(given or {})})
    entry = parse_entry(one.ptx)
    start = start_of(one, entry, blocks=1)
    assert not isinstance(start, str)
    assert follow(entry, start, Silent(), most_steps=10_000) == ()
    memory = start.memory.regions[0].memory
    assert memory.data is not None
    return memory.data.view(np.uint32), memory.why


@pytest.mark.parametrize(
    ("instruction", "result"),
    [
        ("max.s32 %r0, %r1, %r2, %r3", 9),
        ("min.s32 %r0, %r1, %r2, %r3", -7 & ONES),
        ("max.relu.s32 %r0, %r1, %r1", 0),
        ("add.sat.s32 %r0, %r4, %r3", 0x7FFFFFFF),
        ("sub.sat.s32 %r0, %r5, %r3", 0x80000000),
        ("bfind.shiftamt.u32 %r0, %r3", 28),
        ("bfind.shiftamt.u32 %r0, 0", ONES),
        ("sad.u32 %r0, %r2, %r3, %r2", 9),
        ("cvt.rzi.s32.f32 %r0, 0f7FC00000", 0),
        ("cvt.rzi.s64.f32 %rd9, 0f7FC00000; shr.u64 %rd9, %rd9, 32; cvt.u32.u64 %r0, %rd9", 0x80000000),
        ("mov.b32 %r7, {%h7, %h1}; or.b32 %r7, %r7, 65536; mov.b32 {_, %h2}, %r7; cvt.u32.u16 %r0, %h2", 5),
    ],
)
def test_seldom_seen(instruction: str, result: int) -> None:
    given = "mov.b32 %r1, -7; mov.b32 %r2, 2; mov.b32 %r3, 9; mov.b32 %r4, 0x7FFFFFFE; mov.b32 %r5, 0x80000001;"
    data, why = left(f"{given} mov.b16 %h1, 5;\n{instruction};\nst.global.u32 [%rd3], %r0;")
    assert why is None and set(data.tolist()) == {result}


@pytest.mark.parametrize(
    ("vote", "result"),
    [
        ("bar.red.popc.u32 %r0, 0, %p1", 40),
        ("bar.red.and.pred %p2, 0, %p1; selp.b32 %r0, 1, 2, %p2", 2),
        ("barrier.cta.red.or.pred %p2, 0, 64, %p1; selp.b32 %r0, 1, 2, %p2", 1),
    ],
)
def test_a_block_votes(vote: str, result: int) -> None:
    data, why = left(f"setp.lt.u32 %p1, %r20, 40; {vote}; st.global.u32 [%rd3], %r0;", threads=64)
    assert why is None and set(data.tolist()) == {result}


def test_a_vote_whose_warps_come_one_by_one_is_not_known() -> None:
    body = """setp.lt.u32 %p1, %r20, 32; @%p1 bra FIRST; bar.red.popc.u32 %r0, 0, %p1; bra DONE;
    FIRST: bar.red.popc.u32 %r0, 0, %p1; DONE: st.global.u32 [%rd3], %r0;"""
    _, why = left(body, threads=64)
    assert why is not None and why.any()


COPY = """ld.param.u64 %rd4, [a1]; add.s64 %rd5, %rd4, %rd2; ld.global.u32 %r1, [%rd5];
.shared .align 16 .b8 tile[128]; mov.u32 %r2, tile; shl.b32 %r3, %r20, 2; add.u32 %r2, %r2, %r3;
"""


@pytest.mark.parametrize(
    "copy",
    [
        "mul.wide.u32 %rd6, %r1, 4; add.s64 %rd6, %rd4, %rd6; cp.async.ca.shared.global [%r2], [%rd6], 4;",
        "cp.async.ca.shared.global [%r2], [%rd5], 4, %r1;",
    ],
    ids=["from where", "how much"],
)
def test_a_copy_of_unknown_memory_leaves_unknown_memory(copy: str) -> None:
    read_back = "ld.shared.u32 %r4, [%r2]; st.global.u32 [%rd3], %r4;"
    _, why = left(COPY + copy + read_back)
    assert why is not None and why.all()
    known = np.zeros(32, np.uint32) + 4
    data, why = left(COPY + copy + read_back, {"1": known})
    assert why is None and set(data.tolist()) == {4}
    one = code(kernel(OUT + COPY + copy), {"0": np.zeros(32, np.uint32)})
    (seen,) = [each for each in accesses(one) if each.kind == "async copy" and each.space == "global"]
    assert "depends on the values of 1" in seen.unknown


def test_a_load_of_wmma_is_said_to_be_unknown() -> None:
    words = ", ".join(f"%r{i}" for i in range(8))
    one = code(kernel(f"{OUT} wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {{{words}}}, [%rd1], 16;"), {})
    (seen,) = accesses(one)
    assert (seen.kind, seen.space) == ("matrix load", "global") and "not documented" in seen.unknown


# ------------------------------------------------------------------------------------------------ how a launch begins


class Descriptor:
    """As triton.tools.tensor_descriptor has it."""

    def __init__(self, base: Array) -> None:
        self.base, self.shape, self.strides = base, list(base.shape), [base.shape[1], 1]
        self.padding = "zero"


def test_a_descriptor_is_many_parameters() -> None:
    parameters = ("u64", *["u64"] * 4, "u8", "u8", "u32", "u32", "u64", "u64", "u64")
    body = """ld.param.u64 %rd1, [a0]; ld.param.u64 %rd2, [a3]; ld.param.u32 %r1, [a8]; ld.param.u64 %rd3, [a11];
    ld.global.u32 %r2, [%rd1+4]; st.global.u32 [%rd3], %r2; st.global.u64 [%rd3+8], %rd2; st.global.u32 [%rd3+16], %r1;
    """
    out = np.zeros(8, np.uint32)
    given = {"d": Descriptor(np.arange(48, dtype=np.uint32).reshape(4, 12)), "out_ptr": out}
    one = replace(
        code(kernel(body, parameters=parameters), given),
        signature={"d": "tensordesc<u32[4, 4]>", "out_ptr": "*u32"},
    )
    entry = parse_entry(one.ptx)
    start = start_of(one, entry, blocks=1)
    assert not isinstance(start, str) and follow(entry, start, Silent(), most_steps=100) == ()
    memory = next(region.memory for region in start.memory.regions if region.name == "out_ptr")
    assert memory.data is not None and memory.data.view(np.uint32).tolist() == [1, 0, 12, 0, 12, 0, 0, 0]


def test_a_whole_number_for_a_float_is_a_float() -> None:
    body = OUT.replace("[a0]", "[a1]") + "ld.param.b32 %r1, [a0]; st.global.u32 [%rd3], %r1;"
    one = code(kernel(body, parameters=("b32", "u64")), {"scale": 2, "y": np.zeros(32, np.float32)})
    one = replace(one, signature={"scale": "fp32", "y": "*fp32"})
    entry = parse_entry(one.ptx)
    start = start_of(one, entry, blocks=1)
    assert not isinstance(start, str) and follow(entry, start, Silent(), most_steps=100) == ()
    data = start.memory.regions[0].memory.data
    assert data is not None and set(data.view(np.float32).tolist()) == {2.0}


def test_sides_that_nobody_gave_are_not_guessed() -> None:
    ptx = kernel("mov.u32 %r1, %tid.y;").replace(".reqntid 32", ".maxntid 256")
    assert "--threads 32x8" in follow_blocks(code(ptx, {}, threads=256)).problem
    rank = "; ".join(f"mov.u32 %r{i}, %{word}" for i, word in enumerate(("tid.x", "tid.z", "ntid.x", "ntid.y")))
    whole = ptx.replace("ret;", f"{rank};\nret;")
    assert follow_blocks(code(whole, {}, threads=256)).problem == "", "cooperative groups' thread_rank"
    sided = replace(code(ptx, {}, threads=256), options={"block": (32, 8)})
    assert follow_blocks(sided).problem == ""

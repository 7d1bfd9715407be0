"""The engine computes what a GPU would: each value stored is compared, as are the ways that lanes part and meet."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest

from sublight.gpus import find
from sublight.xray.ptx.accesses import follow_blocks
from sublight.xray.ptx.entry import parse_entry
from sublight.xray.ptx.machine import Stop
from sublight.xray.ptx.start import start_of
from sublight.xray.ptx.steps import follow
from sublight.xray.record import Code, Resources

HEAD = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry k({parameters})
.reqntid {threads}
{{
.reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<30>; .reg .b64 %rd<30>; .reg .f32 %f<9>; .reg .f64 %fd<9>;
{body}
ret;
}}
"""


class Silent:
    """Hears of every access, and keeps nothing."""

    def note(self, *arguments: Any, **more: Any) -> None: ...

    def note_operands(self, *arguments: Any, **more: Any) -> None: ...

    def note_unknown(self, *arguments: Any, **more: Any) -> None: ...


def code(
    ptx: str, arguments: dict[str, Any], *, grid: tuple[int, ...] = (1,), symbol: str = "k", threads: Any = None
) -> Code:
    resources = Resources(registers=0, threads=threads)
    gpu = find("h200")
    return Code(name="k", symbol=symbol, gpu=gpu, resources=resources, sass="", ptx=ptx, grid=grid, arguments=arguments)


def kernel(body: str, *, parameters: tuple[str, ...] = ("u64", "u64"), threads: int = 32) -> str:
    listed = ", ".join(f".param .{kind} a{i}" for i, kind in enumerate(parameters))
    return HEAD.format(parameters=listed, threads=threads, body=body)


def stored(
    one: Code, which: int = -1, *, most_steps: int = 20_000
) -> tuple[np.ndarray, np.ndarray | None, tuple[Stop, ...]]:
    """The bytes of an argument after all blocks ran, why some are unknown, and what stopped."""
    entry = parse_entry(one.ptx, one.symbol)
    start = start_of(one, entry, blocks=1000)
    assert not isinstance(start, str)
    stops = follow(entry, start, Silent(), most_steps=most_steps)
    memory = start.memory.regions[which].memory
    assert memory.data is not None
    return memory.data, memory.why, stops


# ------------------------------------------------------------------------------------------------ one instruction


def bits(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def bf16(x: float) -> int:
    return bits(x) >> 16


ONES = 0xFFFFFFFF
CASES = [  # instruction with %r1, %r2, %r3 in and %r0 out; inputs; result
    ("add.s32 %r0, %r1, %r2", (ONES, 5), 4),
    ("sub.s32 %r0, %r1, -1", (ONES,), 0),
    ("mul.lo.s32 %r0, %r1, %r2", (70000, 70000), 70000 * 70000 & ONES),
    ("mul.hi.u32 %r0, %r1, %r2", (70000, 70000), 70000 * 70000 >> 32),
    ("mul.hi.s32 %r0, %r1, %r2", (ONES, 7), ONES),
    ("mad.lo.s32 %r0, %r1, %r2, %r3", (3, 4, 5), 17),
    ("div.s32 %r0, %r1, %r2", (-7 & ONES, 2), -3 & ONES),
    ("rem.s32 %r0, %r1, %r2", (-7 & ONES, 2), -1 & ONES),
    ("div.u32 %r0, %r1, %r2", (7, 0), ONES),
    ("min.s32 %r0, %r1, %r2", (ONES, 1), ONES),
    ("min.u32 %r0, %r1, %r2", (ONES, 1), 1),
    ("abs.s32 %r0, %r1", (-5 & ONES,), 5),
    ("neg.s32 %r0, %r1", (5,), -5 & ONES),
    ("not.b32 %r0, %r1", (0xF0,), 0xFFFFFF0F),
    ("shl.b32 %r0, %r1, %r2", (1, 32), 0),
    ("shl.b32 %r0, %r1, 4", (3,), 48),
    ("shr.s32 %r0, %r1, %r2", (0x80000000, 40), ONES),
    ("shr.u32 %r0, %r1, %r2", (0x80000000, 31), 1),
    ("bfe.u32 %r0, %r1, 4, 8", (0xABCD,), 0xBC),
    ("bfe.s32 %r0, %r1, 4, 8", (0xABCD,), 0xFFFFFFBC),
    ("bfi.b32 %r0, %r1, %r2, 8, 4", (0xF, 0x1000), 0x1F00),
    ("prmt.b32 %r0, %r1, %r2, 0x7531", (0x33221100, 0x77665544), 0x77553311),
    ("prmt.b32 %r0, %r1, %r2, 0x9F", (0x00008000, 0x80000000), 0x0000FFFF),
    ("lop3.b32 %r0, %r1, %r2, %r3, 0x96", (0b1100, 0b1010, 0b1111), 0b1001),
    ("popc.b32 %r0, %r1", (0xF0F,), 8),
    ("clz.b32 %r0, %r1", (0xFF,), 24),
    ("brev.b32 %r0, %r1", (1,), 0x80000000),
    ("bfind.u32 %r0, %r1", (0x500,), 10),
    ("shf.l.wrap.b32 %r0, %r1, %r2, 8", (0xAA000000, 0x11), 0x11AA),
    ("shf.r.clamp.b32 %r0, %r1, %r2, 32", (1, 2), 2),
    ("bmsk.clamp.b32 %r0, 4, 8", (), 0xFF0),
    ("szext.clamp.s32 %r0, %r1, 4", (0xF8,), 0xFFFFFFF8),
    ("cvt.s16.s32 %h0, %r1; cvt.s32.s16 %r0, %h0", (0x18000,), 0xFFFF8000),
    ("cvt.u8.u32 %r0, %r1", (0x1FF,), 0xFF),
    ("cvt.rzi.s32.f32 %r0, %r1", (bits(-2.7),), -2 & ONES),
    ("cvt.rni.s32.f32 %r0, %r1", (bits(2.5),), 2),
    ("cvt.rzi.u32.f32 %r0, %r1", (bits(-2.7),), 0),
    ("cvt.rzi.s32.f32 %r0, %r1", (bits(1e20),), 0x7FFFFFFF),
    ("cvt.rn.f32.s32 %r0, %r1", (-3 & ONES,), bits(-3.0)),
    ("cvt.rn.f32.u32 %r0, %r1", (ONES,), bits(4294967296.0)),
    ("cvt.rmi.f32.f32 %r0, %r1", (bits(-2.5),), bits(-3.0)),
    ("cvt.rn.bf16x2.f32 %r0, %r1, %r2", (bits(2.0), bits(1.0)), bf16(2.0) << 16 | bf16(1.0)),
    ("cvt.rn.f16.f32 %h0, %r1; cvt.u32.u16 %r0, %h0", (bits(1.5),), 0x3E00),
    ("cvt.sat.f32.f32 %r0, %r1", (bits(3.0),), bits(1.0)),
    ("add.f32 %r0, %r1, 0f3F800000", (bits(2.0),), bits(3.0)),
    ("fma.rn.f32 %r0, %r1, %r2, %r3", (bits(2.0), bits(3.0), bits(4.0)), bits(10.0)),
    ("fma.rn.bf16x2 %r0, %r1, %r2, %r3", (bf16(2.0) << 16 | bf16(1.0), bf16(3.0) << 16 | bf16(5.0), 0), 0x40C040A0),
    ("max.f32 %r0, %r1, %r2", (bits(math.nan), bits(2.0)), bits(2.0)),
    ("sub.rn.f32.bf16 %r0, %h1, %r2", (bits(1.0), bits(2.0)), bits(-1.0)),
    ("ex2.approx.ftz.f32 %r0, %r1", (bits(3.0),), bits(8.0)),
    ("rsqrt.approx.f32 %r0, %r1", (bits(4.0),), bits(0.5)),
    ("neg.f32 %r0, %r1", (bits(4.0),), bits(-4.0)),
    ("setp.lt.s32 %p1, %r1, %r2; selp.b32 %r0, 1, 2, %p1", (ONES, 0), 1),
    ("setp.lt.u32 %p1, %r1, %r2; selp.b32 %r0, 1, 2, %p1", (ONES, 0), 2),
    ("setp.gtu.f32 %p1, %r1, %r2; selp.b32 %r0, 1, 2, %p1", (bits(math.nan), 0), 1),
    ("setp.ne.f32 %p1, %r1, %r2; selp.b32 %r0, 1, 2, %p1", (bits(math.nan), 0), 2),
    ("setp.eq.s32 %p0, 1, 1; setp.eq.and.s32 %p1|%p2, %r1, 4, !%p0; selp.b32 %r0, 1, 2, %p2", (4,), 2),
    ("set.eq.u32.s32 %r0, %r1, 4", (4,), ONES),
    ("slct.b32.s32 %r0, %r1, %r2, %r3", (1, 2, ONES), 2),
    ("mov.b32 {%h1, %h2}, %r1; mov.b32 %r0, {%h2, %h1}", (0x12345678,), 0x56781234),
    ("mov.b64 %rd9, {%r1, %r2}; shr.u64 %rd9, %rd9, 16; cvt.u32.u64 %r0, %rd9", (0x11112222, 0x33334444), 0x44441111),
    ("mul.wide.s32 %rd9, %r1, %r2; shr.u64 %rd9, %rd9, 32; cvt.u32.u64 %r0, %rd9", (ONES, 2), ONES),
    ("mad.wide.u32 %rd9, %r1, %r2, 1; shr.u64 %rd9, %rd9, 32; cvt.u32.u64 %r0, %rd9", (ONES, 4), 3),
    ("mov.u32 %r0, %ntid.x", (), 32),
    ("mov.u32 %r0, %nctaid.x", (), 1),
    ("mov.u32 %r0, %lanemask_lt; add.u32 %r0, %r0, 1; shr.u32 %r0, %r0, %laneid", (), 1),
]


@pytest.mark.parametrize(("instruction", "given", "result"), CASES, ids=[case[0].split(" ")[0] for case in CASES])
def test_arithmetic(instruction: str, given: tuple[int, ...], result: int) -> None:
    loads = "".join(f"ld.global.u32 %r{i + 1}, [%rd1+{4 * i}]; " for i in range(len(given)))
    body = f"""
    ld.param.u64 %rd1, [a0]; ld.param.u64 %rd2, [a1]; {loads}
    shr.u32 %r9, %r1, 16; cvt.u16.u32 %h1, %r9;
    {instruction};
    mov.u32 %r8, %tid.x; mul.wide.u32 %rd3, %r8, 4; add.s64 %rd2, %rd2, %rd3; st.global.u32 [%rd2], %r0;"""
    data, why, stops = stored(code(kernel(body), {"0": np.array([*given, 0], np.uint32), "1": np.zeros(32, np.uint32)}))
    assert stops == ()
    assert why is None or not why.any()
    assert {hex(x) for x in data.view(np.uint32)} == {hex(result)}


# ------------------------------------------------------------------------------------------------ warps

PER_LANE = "mov.u32 %r1, %tid.x; ld.param.u64 %rd2, [a0]; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd2, %rd2, %rd3; "


@pytest.mark.parametrize(
    ("instruction", "truth"),
    [
        ("shfl.sync.bfly.b32 %r0, %r1, 3, 31, -1", lambda i: i ^ 3),
        ("shfl.sync.up.b32 %r0, %r1, 2, 0, -1", lambda i: i % 32 - 2 + i // 32 * 32 if i % 32 >= 2 else i),
        ("shfl.sync.down.b32 %r0, %r1, 2, 0x1807, -1", lambda i: i + 2 if i % 8 + 2 < 8 else i),
        ("shfl.sync.idx.b32 %r0|%p1, %r1, 5, 31, -1", lambda i: i // 32 * 32 + 5),
        ("setp.gt.u32 %p1, %r1, 30; vote.sync.ballot.b32 %r0, %p1, -1", lambda i: (1 << 31) if i < 32 else ONES),
        ("setp.gt.u32 %p1, %r1, 30; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r0, 1, 0, %p2", lambda i: int(i >= 32)),
        ("redux.sync.add.s32 %r0, %r1, -1", lambda i: sum(range(32)) + i // 32 * 1024),
        ("redux.sync.max.u32 %r0, %r1, -1", lambda i: i | 31),
        ("elect.sync %r2|%p1, -1; selp.b32 %r0, 1, 0, %p1", lambda i: int(i % 32 == 0)),
        ("and.b32 %r2, %r1, 1; match.any.sync.b32 %r0, %r2, -1", lambda i: 0xAAAAAAAA if i % 2 else 0x55555555),
        ("activemask.b32 %r0", lambda i: ONES),
    ],
)
def test_lanes_of_a_warp(instruction: str, truth: Any) -> None:
    body = f"{PER_LANE} {instruction}; st.global.u32 [%rd2], %r0;"
    ptx = kernel(body, parameters=("u64",), threads=64)
    data, why, _ = stored(code(ptx, {"0": np.zeros(64, np.uint32)}))
    assert why is None
    assert data.view(np.uint32).tolist() == [truth(i) for i in range(64)]


def test_a_lane_that_is_off_says_nothing() -> None:
    body = (
        f"{PER_LANE} setp.lt.u32 %p1, %r1, 16; @%p1 shfl.sync.bfly.b32 %r1, %r1, 16, 31, -1; st.global.u32 [%rd2], %r1;"
    )
    _, why, _ = stored(code(kernel(body, parameters=("u64",)), {"0": np.zeros(32, np.uint32)}))
    assert why is not None
    assert why.reshape(32, 4).any(1).tolist() == [True] * 16 + [False] * 16


# ------------------------------------------------------------------------------------------------ ways

COLLATZ = kernel(  # each lane takes its own number of rounds, and its own way in each
    """
    ld.param.u64 %rd1, [a0]; ld.param.u64 %rd2, [a1]; ld.param.u32 %r9, [a2];
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 96, %r1;
    setp.ge.s32 %p1, %r3, %r9; @%p1 bra END;
    mul.wide.s32 %rd3, %r3, 4; add.s64 %rd4, %rd1, %rd3; ld.global.u32 %r4, [%rd4]; mov.u32 %r5, 0;
LOOP: setp.eq.s32 %p2, %r4, 1; @%p2 bra OUT;
    and.b32 %r6, %r4, 1; setp.eq.b32 %p3, %r6, 1; @%p3 bra ODD;
    shr.s32 %r4, %r4, 1; bra.uni NEXT;
ODD: mad.lo.s32 %r4, %r4, 3, 1;
NEXT: add.s32 %r5, %r5, 1; bra.uni LOOP;
OUT: add.s64 %rd5, %rd2, %rd3; st.global.u32 [%rd5], %r5;
END:
    """,
    parameters=("u64", "u64", "u32"),
    threads=96,
)


def rounds(x: int) -> int:
    return 0 if x == 1 else 1 + rounds(3 * x + 1 if x % 2 else x // 2)


def test_lanes_part_and_meet() -> None:
    x, y = np.arange(1, 251, dtype=np.int32), np.full(288, -1, np.int32)
    data, _, stops = stored(code(COLLATZ, {"0": x, "1": y, "2": 250}, grid=(3,)))
    assert stops == ()
    assert data.view(np.int32).tolist() == [rounds(i) for i in range(1, 251)] + [-1] * 38
    assert (y == -1).all(), "the caller's data stays as it was"


def test_a_jump_through_a_table() -> None:
    body = f"""
    TABLE: .branchtargets A, B, C;
    {PER_LANE} rem.u32 %r4, %r1, 3; brx.idx %r4, TABLE;
C: mov.u32 %r5, 30; bra OUT;
A: mov.u32 %r5, 10; bra OUT;
B: mov.u32 %r5, 20;
OUT: st.global.u32 [%rd2], %r5;"""
    data, _, stops = stored(code(kernel(body, parameters=("u64",)), {"0": np.zeros(32, np.uint32)}))
    assert stops == ()
    assert data.view(np.uint32).tolist() == [10 + 10 * (i % 3) for i in range(32)]


def test_a_barrier_waits_for_those_who_take_a_detour() -> None:
    """The first warp's detour lies behind the code of the others, who must not read before it has written."""
    body = f"""
    .shared .align 4 .b8 s[4];
    {PER_LANE}
    setp.lt.u32 %p1, %r1, 32; @%p1 bra DETOUR;
MEET: bar.sync 0; ld.shared.u32 %r5, [s]; st.global.u32 [%rd2], %r5; ret;
DETOUR: mov.u32 %r4, 77; st.shared.u32 [s], %r4; bra.uni MEET;"""
    data, why, stops = stored(code(kernel(body, parameters=("u64",), threads=64), {"0": np.zeros(64, np.uint32)}))
    assert stops == () and why is None
    assert (data.view(np.uint32) == 77).all()


def test_warps_that_wait_for_one_another_are_left() -> None:
    body = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1, 64; ret; A: bar.sync 2, 64;"
    _, _, (stop,) = stored(code(kernel(body, threads=64), {"0": np.zeros(4), "1": np.zeros(4)}))
    assert stop.reason == "its warps wait at barriers for one another"


def test_an_endless_loop_is_left() -> None:
    body = "LOOP: add.u32 %r1, %r1, 1; bra LOOP;"
    _, _, (stop,) = stored(code(kernel(body), {"0": np.zeros(4), "1": np.zeros(4)}), most_steps=500)
    assert stop.reason == "it was still running after 502 instructions"


def test_what_another_block_answers_is_unknown_and_the_way_goes_on() -> None:
    body = f"""
    {PER_LANE} ld.param.u64 %rd5, [a1];
WAIT: ld.volatile.global.u32 %r5, [%rd5]; setp.eq.s32 %p1, %r5, 0; @%p1 bra WAIT;
    st.global.u32 [%rd2], %r5; mov.u32 %r6, 3; st.global.u32 [%rd2+128], %r6;"""
    one = code(kernel(body), {"0": np.zeros(64, np.uint32), "1": np.zeros(4, np.uint32)})
    data, why, stops = stored(one, 0)
    assert stops == () and why is not None
    assert why[:128].all() and not why[128:].any()
    assert (data.view(np.uint32)[32:] == 3).all()


def test_an_unknown_branch_stops_and_says_why() -> None:
    body = f"{PER_LANE} ld.global.u32 %r5, [%rd2]; setp.eq.s32 %p1, %r5, 0; @%p1 bra OUT; st.global.u32 [%rd2], 1; OUT:"
    followed = follow_blocks(code(kernel(body), {}))
    assert [stop.reason for stop in followed.stops] == ["a branch depends on the values of 0"]
    assert [tally.index for tally in followed.tallies] == [4]


def test_an_unknown_branch_over_sums_alone_does_not_stop() -> None:
    body = f"""{PER_LANE} ld.global.u32 %r5, [%rd2]; mov.u32 %r6, 1; mov.u32 %r7, 1;
    setp.eq.s32 %p1, %r5, 0; @%p1 bra OUT; mov.u32 %r6, 2;
OUT: ld.param.u64 %rd9, [a1]; st.global.u32 [%rd9], %r6; st.global.u32 [%rd9+4], %r7;"""
    _, why, stops = stored(code(kernel(body), {"1": np.zeros(2, np.uint32)}))
    assert stops == () and why is not None
    assert why.tolist() == [*[why[0]] * 4, 0, 0, 0, 0] and why[0]


# ------------------------------------------------------------------------------------------------ memory


def test_atomics_of_one_address_go_one_after_another() -> None:
    body = f"""
    .shared .align 4 .b8 s[16];
    {PER_LANE} setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.v4.u32 [s], {{10, 0, 0, 0}}; bar.sync 0;
    atom.shared.add.u32 %r5, [s], 2; st.global.u32 [%rd2], %r5; red.shared.max.u32 [s+4], %r1; bar.sync 0;
    ld.shared.v2.u32 {{%r6, %r7}}, [s]; @%p1 st.global.u32 [%rd2+256], %r6; @%p1 st.global.u32 [%rd2+260], %r7;"""
    body = body.replace("{10, 0, 0, 0}", "{%r10, %r11, %r11, %r11}").replace(
        "setp.eq", "mov.u32 %r10, 10; mov.u32 %r11, 0; setp.eq", 1
    )
    data, why, _ = stored(code(kernel(body, parameters=("u64",), threads=64), {"0": np.zeros(66, np.uint32)}))
    words = data.view(np.uint32).tolist()
    assert why is None
    assert sorted(words[:64]) == list(range(10, 138, 2))
    assert words[64:] == [138, 63]


def test_matrices_come_back_as_they_went() -> None:
    """stmatrix then ldmatrix: the same registers; transposed: element (i, j) where (j, i) was."""
    body = f"""
    .shared .align 16 .b8 s[1024];
    {PER_LANE} shl.b32 %r2, %r1, 4; mov.u32 %r3, s; add.u32 %r3, %r3, %r2; shl.b32 %r4, %r1, 17; or.b32 %r4, %r4, %r1;
    stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {{%r4}};
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r5}}, [%r3]; st.global.u32 [%rd2], %r5;
    ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {{%r6}}, [%r3]; st.global.u32 [%rd2+128], %r6;"""
    data, why, _ = stored(code(kernel(body, parameters=("u64",)), {"0": np.zeros(64, np.uint32)}))
    lanes = np.arange(32, dtype=np.uint32)
    matrix = (lanes << 17 | lanes).view(np.uint16).reshape(8, 8)
    assert why is None
    assert (data.view(np.uint32)[:32] == (lanes << 17 | lanes)).all()
    assert (data.view(np.uint16)[64:].reshape(8, 8) == matrix.T).all()


def test_an_async_copy_fills_up_with_zeros() -> None:
    body = """
    .shared .align 16 .b8 s[512];
    mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [a0]; ld.param.u64 %rd2, [a1]; mul.wide.u32 %rd3, %r1, 16;
    add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3; shl.b32 %r2, %r1, 4; mov.u32 %r3, s; add.u32 %r3, %r3, %r2;
    setp.lt.u32 %p1, %r1, 8; selp.b32 %r4, 16, 0, %p1;
    cp.async.cg.shared.global [ %r3 + 0 ], [ %rd1 + 0 ], 0x10, %r4; cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r3]; st.global.v4.b32 [%rd2], {%r5, %r6, %r7, %r8};"""
    one = code(kernel(body), {"0": np.arange(128, dtype=np.uint32), "1": np.full(128, 9, np.uint32)})
    data, why, _ = stored(one)
    assert why is None
    assert data.view(np.uint32).tolist() == [*range(32), *[0] * 96]
    copied = [tally for tally in follow_blocks(one).tallies if tally.kind == "async copy"]
    assert [(tally.space, tally.sectors, tally.wavefronts) for tally in copied] == [("global", 4, 0), ("shared", 0, 4)]


@pytest.mark.parametrize(("first", "passes"), [("%rd8", 16 + 32), ("{%r1,%r2,%r3,%r4}", 32)])
def test_tensor_cores_read_their_tiles_out_of_shared_memory(first: str, passes: int) -> None:
    """128 columns by 16 of 16 bits are 4096 bytes, 64 rows half of that; once for the four warps of a group."""
    body = f"mov.u64 %rd8, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {{%f1,%f2}}, {first}, %rd8, 1, 1, 1;"
    (told,) = follow_blocks(code(kernel(body, threads=256), {}, grid=(3,))).tallies
    assert (told.space, told.kind, told.requests) == ("shared", "matrix operand", 3 * 8)
    assert told.wavefronts == told.ideal == 3 * 2 * passes and not told.unknown


def test_a_sparse_product_is_not_guessed_at() -> None:
    tile = "wgmma.mma_async.sp.sync.aligned.m64n128k32.f32.f16.f16"
    body = f"mov.u64 %rd8, 0; {tile} {{%f1,%f2}}, %rd8, %rd8, %r1, 0, 1, 1, 1;"
    (told,) = follow_blocks(code(kernel(body, threads=128), {})).tallies
    assert told.unknown and not told.wavefronts


def test_generic_and_local_memory() -> None:
    body = f"""
    .local .align 4 .b8 mine[8]; .shared .align 4 .b8 s[128];
    {PER_LANE} mov.u64 %rd5, mine; st.local.u32 [%rd5+4], %r1; cvta.local.u64 %rd6, %rd5; ld.u32 %r5, [%rd6+4];
    mov.u64 %rd7, s; cvta.shared.u64 %rd8, %rd7; mul.wide.u32 %rd9, %r1, 4; add.s64 %rd8, %rd8, %rd9;
    st.u32 [%rd8], %r5; ld.u32 %r6, [%rd8]; st.u32 [%rd2], %r6;"""
    one = code(kernel(body, parameters=("u64",)), {"0": np.zeros(32, np.uint32)})
    data, why, _ = stored(one)
    assert why is None
    assert data.view(np.uint32).tolist() == list(range(32))
    assert [(tally.space, tally.kind) for tally in follow_blocks(one).tallies] == [
        *[("shared", "store"), ("shared", "load"), ("global", "store")]
    ]


def test_memory_that_nobody_wrote_is_unknown() -> None:
    body = f".shared .align 4 .b8 s[4]; {PER_LANE} ld.shared.u32 %r5, [s]; st.global.u32 [%rd2], %r5;"
    _, why, _ = stored(code(kernel(body, parameters=("u64",)), {"0": np.zeros(32, np.uint32)}))
    assert why is not None and why.all()


def test_an_unknown_instruction_makes_unknown_values() -> None:
    body = f"{PER_LANE} mov.u32 %r5, 1; dp4a.s32.s32 %r5, %r1, %r1, %r5; st.global.u32 [%rd2], %r5;"
    _, why, _ = stored(code(kernel(body, parameters=("u64",)), {"0": np.zeros(32, np.uint32)}))
    assert why is not None and why.all()

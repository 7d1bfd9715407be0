"""Planted kernels: where each lane goes is what the kernel computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublight.errors import BadInput
from sublight.xray.ptx.accesses_test import planted
from sublight.xray.ptx.reach import reaches

AT = "mul.wide.u32 %rd3, %r5, 4; add.s64 %rd4, %rd1, %rd3; "


def test_every_lane_of_a_load() -> None:
    """Lane l reads word 3 l + 5 of x."""
    (load,) = reaches(
        planted(".loc 1 20 0\nmad.lo.s32 %r5, %r1, 3, 5; " + AT + "ld.global.u32 %r6, [%rd4]; ")
    ).instructions
    assert (load.space, load.kind, load.width, load.argument, load.warp) == ("global", "load", 4, "x_ptr", 0)
    assert load.offsets == tuple(12 * lane + 20 for lane in range(32))
    assert load.place and load.place.line == 20


def test_lanes_that_take_no_part_and_the_first_warp_that_does() -> None:
    body = "mov.u32 %r5, %r1; " + AT + "setp.gt.u32 %p1, %r1, 39; @%p1 ld.global.u32 %r6, [%rd4]; "
    (load,) = reaches(planted(body)).instructions
    assert load.warp == 1
    assert load.offsets == (*(None for _ in range(8)), *(4 * (32 + lane) for lane in range(8, 32)))


def test_shared_memory_and_the_order_of_the_code() -> None:
    """Lane l writes word 31 - l, then reads word l."""
    body = (
        ".loc 1 30 0\nand.b32 %r7, %r1, 31; sub.s32 %r5, 31, %r7; shl.b32 %r5, %r5, 2; add.s32 %r8, %r4, %r5; "
        "st.shared.u32 [%r8], %r1; shl.b32 %r5, %r7, 2; add.s32 %r8, %r4, %r5; ld.shared.u32 %r6, [%r8]; "
    )
    store, load = reaches(planted(body)).instructions
    assert (store.kind, load.kind, store.argument) == ("store", "load", "")
    begin = load.offsets[0]
    assert begin is not None
    assert store.offsets == tuple(begin + 4 * (31 - lane) for lane in range(32))
    assert load.offsets == tuple(begin + 4 * lane for lane in range(32))


def test_what_is_not_known_says_why() -> None:
    body = "mov.u32 %r5, %r1; " + AT + "ld.global.u32 %r5, [%rd4]; " + AT + "ld.global.u32 %r6, [%rd4]; "
    code = planted(body)
    _, second = reaches(replace(code, arguments={"n": 64})).instructions
    assert second.offsets == () and second.unknown
    with pytest.raises(BadInput, match=r"give the \.cu"):
        reaches(replace(code, ptx=""))


def test_a_branch_on_what_is_not_given_says_what_to_give() -> None:
    body = "setp.gt.u32 %p1, %r9, 5; @%p1 bra DONE; mov.u32 %r5, %r1; " + AT + "ld.global.u32 %r6, [%rd4]; DONE: "
    stopped = reaches(planted(body, n=None))
    assert stopped.instructions == () and "--arg n=" in stopped.stopped
    whole = reaches(planted(body, n=3))
    assert len(whole.instructions) == 1 and not whole.stopped

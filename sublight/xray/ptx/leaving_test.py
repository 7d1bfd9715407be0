"""Loads that only the last guarded store needs are made by the lanes that store; no others are."""

from __future__ import annotations

import pytest

from sublight.xray.ptx.accesses import follow_blocks
from sublight.xray.ptx.machine_test import code, kernel

BEGIN = """
.shared .align 16 .b8 s[512];
mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [a0]; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd2, %rd1, %rd3; mov.u32 %r2, s;
shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3; st.shared.b32 [%r4], %r1; bar.sync 0;
"""
ASKED = "setp.lt.u32 %p1, %r1, 8;"
STORE = "@%p1 st.global.b32 [%rd2], %r5;"


@pytest.mark.parametrize(
    ("end", "requests"),
    [
        (f"ld.shared.b32 %r5, [%r4]; {ASKED} {STORE}", 1),
        (f"{ASKED} ld.shared.b32 %r5, [%r4]; @!%p1 st.global.b32 [%rd2], %r5;", 4),  # 24 of the first warp, all others
        (f"ld.shared.v2.b32 {{%r5,%r6}}, [s]; {ASKED} @%p1 st.global.v2.b32 [%rd1], {{%r5,%r6}};", 1),
        (f"ld.shared.v2.b32 {{%r5,%r6}}, [s]; {ASKED} {STORE}", 4),  # half of it goes nowhere
        (f"ld.volatile.shared.b32 %r5, [%r4]; {ASKED} {STORE}", 4),
        (f"ld.shared.b32 %r5, [%r4]; {ASKED} bar.sync 0; {STORE}", 4),
        (f"ld.shared.b32 %r5, [%r4]; {ASKED} {STORE} st.global.b32 [%rd2+512], %r1;", 4),
        (f"ld.shared.b32 %r5, [%r4]; setp.lt.u32 %p1, %r5, 8; {STORE}", 4),  # the guard needs it, too
        (f"ld.shared.b32 %r5, [%r4]; {ASKED} st.global.b32 [%rd2], %r5;", 4),
        (f"ld.shared.b32 %r5, [%r4]; {ASKED} $HERE: {STORE}", 4),
    ],
)
def test_who_loads(end: str, requests: int) -> None:
    followed = follow_blocks(code(kernel(BEGIN + end, parameters=("u64",), threads=128), {}))
    assert not followed.stops
    (load,) = [tally for tally in followed.tallies if (tally.space, tally.kind) == ("shared", "load")]
    assert load.requests == requests and not load.unknown

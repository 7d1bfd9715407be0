"""What is left out changes no count, and following stays within its budget; both by number, not by the clock."""

from __future__ import annotations

import pytest

from sublight.xray.counters.h200_test import code_of, launches
from sublight.xray.ptx import accesses as accesses_module
from sublight.xray.ptx.accesses import BLOCKS, Followed, follow_blocks, most_steps_of
from sublight.xray.ptx.entry import parse_entry
from sublight.xray.ptx.machine import Machine, Stop
from sublight.xray.ptx.machine_test import code, kernel
from sublight.xray.ptx.needed import everything, needed
from sublight.xray.record import Code

LABELS = (
    *("softmax 64x1601", "rms_norm backward", "cross_entropy 64x32000", "embedding 256x512x1000", "cumsum 64x2048"),
    *(
        "t_matmul 128 stages 3",
        "t_matmul 32 warps 1",
        "t_gather",
        "t_atomic",
        "t_trans 32 bf16",
        "cu_async",
        "cu_spill",
    ),
)
LOOP = """
ld.param.u64 %rd1, [a0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2; mov.u32 %r2, 0;
LOOP: ld.global.b32 %r3, [%rd3];
{arithmetic}
add.s64 %rd3, %rd3, {stride}; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, {turns}; @%p1 bra LOOP;
st.global.b32 [%rd1], %r3;
"""


class Ran:
    """What a machine came by, and what it computed of it."""

    steps = ran = 0


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    told, run = Ran(), Machine.run

    def watched(machine: Machine, *given: object, **named: int) -> tuple[Stop, ...]:
        stops = run(machine, *given, **named)  # type: ignore[arg-type]
        told.steps, told.ran = machine.steps, machine.ran
        return stops

    monkeypatch.setattr(Machine, "run", watched)
    return told


def looping(turns: int, *, sums: int = 0, stride: int = 128, threads: int = 128) -> Code:
    body = LOOP.format(arithmetic="mul.lo.u32 %r3, %r3, %r3;" * sums, stride=stride, turns=turns)
    return code(kernel(body, parameters=("u64",), threads=threads), {}, grid=(BLOCKS,))


def counts(followed: Followed) -> tuple[object, ...]:
    return followed.tallies, followed.stops, followed.again_bytes, followed.loaded_bytes, followed.moved


@pytest.mark.parametrize("label", LABELS)
def test_what_is_left_out_changes_nothing(label: str, monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    for row in launches(label):
        ours = counts(follow_blocks(code_of(row), blocks=3))
        computed = ran.ran
        with monkeypatch.context() as patched:
            patched.setattr(accesses_module, "needed", everything)
            assert counts(follow_blocks(code_of(row), blocks=3)) == ours
        assert computed <= ran.ran


def test_sums_that_no_address_hangs_on_are_passed_by(ran: Ran) -> None:
    follow_blocks(looping(50, sums=100))
    assert ran.steps > 50 * 100 and ran.ran < 50 * 8


@pytest.mark.parametrize(
    ("body", "results"),
    [
        ("mov.u32 %r1, %tid.x; mul.lo.u32 %r2, %r1, %r1; st.global.b32 [%rd1], %r2;", set()),
        ("mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; @%p1 st.global.b32 [%rd1], %r1;", {0, 1}),
        ("mov.u32 %r1, s; ld.shared.b32 %r2, [%r1]; ld.shared.b32 %r3, [%r2]; add.u32 %r4, %r3, 1;", {0, 1}),
        ("mov.u32 %r1, 3; st.shared.b32 [s], %r1; ld.shared.b32 %r2, [s]; ld.shared.b32 %r3, [%r2];", {0, 2}),
        ("mov.u32 %r1, 3; st.global.b32 [%rd1], %r1; ld.shared.b32 %r2, [s]; ld.shared.b32 %r3, [%r2];", {2}),
        ("mov.u32 %r1, 3; st.b32 [%rd1], %r1; ld.shared.b32 %r2, [s]; ld.shared.b32 %r3, [%r2];", {0, 2}),
        ("mov.u32 %r1, 3; cp.async.ca.shared.global [s], [%rd1], 4, %r1;", {0}),
        ("L: ld.acquire.gpu.global.b32 %r1, [%rd1]; setp.ne.u32 %p1, %r1, 0; @%p1 bra L; mov.u32 %r2, 1;", {0, 1, 2}),
        ("mov.b32 %r1, 0; mov.b32 %r2, 1; L: mov.b32 %r3, %r2; mov.b32 %r2, %r1; ld.shared.b32 %r4, [%r3]; bra L;",
         {0, 1, 2, 3}),
    ],
)  # fmt: skip
def test_what_is_needed(body: str, results: set[int]) -> None:
    entry = parse_entry(kernel(f".shared .align 16 .b8 s[512]; {body}"))
    assert needed(entry).results == results


def test_what_a_copy_brings_is_needed_with_where_it_came_from() -> None:
    entry = parse_entry(
        kernel("cp.async.ca.shared.global [%r1], [%rd1], 4; ld.shared.b32 %r2, [%r1]; ld.b32 %r3, [%r2];")
    )
    assert needed(entry).spaces == {"global", "shared"}


@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_a_page_computes_no_more_than_its_budget(threads: int, ran: Ran) -> None:
    """The bar of three seconds a page, without a clock: no kernel makes following take longer than this."""
    (stop, *_) = follow_blocks(looping(10**7, threads=threads)).stops
    assert stop.reason.startswith("it was still running after ")
    assert 0 <= ran.ran - most_steps_of(threads, BLOCKS) <= 5, "a turn of the loop"
    assert ran.ran * (2048 + threads * BLOCKS) < 2.1e8, "half a second for 100 lanes, three times that for 8,192"


def test_a_loop_is_counted_once_where_it_asks_for_the_same_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    worked_out = []
    real = accesses_module.shape_of
    monkeypatch.setattr(accesses_module, "shape_of", lambda *given: worked_out.append(1) or real(*given))
    (load, _) = follow_blocks(looping(300, stride=128)).tallies
    assert (load.requests, load.sectors) == (300 * 4 * BLOCKS, 300 * 16 * BLOCKS) and len(worked_out) == 2
    (load, _) = follow_blocks(looping(300, stride=4)).tallies  # 32 places within a line: more than are remembered
    assert load.sectors == sum(4 + (turn % 8 > 0) for turn in range(300)) * 4 * BLOCKS
    assert len(worked_out) == 2 + 300 + 1

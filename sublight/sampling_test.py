"""What the sampler promises beside its doctest: the interpreter's switch interval comes back."""

from __future__ import annotations

import sys

from sublight.sampling import Sampler, line_before


def test_the_switch_interval_is_shorter_only_while_it_looks() -> None:
    before = sys.getswitchinterval()
    sampler = Sampler(hz=1000)
    sampler.switch_s = before / 4
    sampler.start()
    assert sys.getswitchinterval() < before / 2
    sampler.stop()
    assert sys.getswitchinterval() == before
    sampler.stop()
    sampler.switch_s = 0.0
    sampler.start()
    assert sys.getswitchinterval() == before
    sampler.stop()


def test_what_the_program_sets_meanwhile_stays() -> None:
    before = sys.getswitchinterval()
    sampler = Sampler(hz=1000)
    sampler.switch_s = before / 4
    sampler.start()
    sys.setswitchinterval(before / 2)
    own = sys.getswitchinterval()
    sampler.stop()
    try:
        assert sys.getswitchinterval() == own
    finally:
        sys.setswitchinterval(before)


def test_an_instruction_without_a_line_has_the_one_before() -> None:
    code = compile("x = 0\nwhile x < 9:\n    x += 1\n", "loop.py", "exec")
    known = [(start, line) for start, _, line in code.co_lines() if line]
    assert [line_before(code, start) for start, _ in known] == [line for _, line in known]
    assert line_before(code, 10**6) == known[-1][1] and line_before(code, -1) == code.co_firstlineno

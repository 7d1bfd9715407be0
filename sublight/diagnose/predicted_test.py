"""What is predicted of a cure is of what the cure does; the fix's saving stands beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublight.diagnose.cures_test import done, explained, fix
from sublight.report.explain import fix as explain_fix


def test_a_cure_is_held_against_what_it_does_and_shown_beside_what_the_fix_does() -> None:
    explanation = explained(unfused_attention=8e-3, unfused_norm=3e-3)
    attention, norm = explanation.findings
    less = replace(attention, cure_savings_s={"compile": 2e-3})
    compiled, norms = ("compile",), ("patch norms",)
    outcomes = {compiled: done(*compiled, 8e-3), norms: done(*norms, 7e-3)}
    outcomes[norms + compiled] = replace(done("compile", 6e-3), did={"compile": "a", "patch norms": "b"})
    fixed, asked = fix(replace(explanation, findings=(less, norm)), outcomes)
    assert asked == [(), norms, compiled, (*norms, *compiled)]  # by what they are expected to save
    tried = fixed.tried[1]
    assert (tried.predicted_s, tried.fix_s, tried.ratio) == (2e-3, 8e-3, pytest.approx(1.0))
    assert fixed.tried[2].predicted_s == pytest.approx(5e-3)
    lines = explain_fix.lines(fixed)
    assert (
        "compile does less than the fix of unfused-attention: 2.00 ms is predicted of it, 8.00 ms of the fix" in lines
    )
    assert not any(line.startswith("patch norms does less") for line in lines)

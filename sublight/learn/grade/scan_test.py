"""The scan alone: nothing runs."""

from __future__ import annotations

import types

import pytest

from sublight.learn.exercises import EXERCISES
from sublight.learn.grade.fakes import HONEST, OTHERS, SCANNED, Cheat
from sublight.learn.grade.scan import (
    FLAGS,
    METHODS,
    OF_BLOCKS,
    OF_TRITON,
    _Scanner,
    branches,
    runnable,
    scan,
    words_between_blocks,
)


@pytest.mark.parametrize("cheat", SCANNED, ids=lambda cheat: cheat.name)
def test_what_a_submission_may_not_contain_is_named(cheat: Cheat) -> None:
    faults = scan(cheat.source, cheat.exercise)
    assert [fault.kind for fault in faults[:1]] == ["scan"]
    assert any(cheat.word in fault.text and fault.line for fault in faults), faults


def test_honest_code_may_run() -> None:
    for exercise in EXERCISES:
        assert scan(exercise.starter(), exercise.name) == scan(exercise.solution(), exercise.name) == []
    for style, source in HONEST.items():
        assert scan(source, "add") == [], style
    for style, (name, source) in OTHERS.items():
        assert scan(source, name) == [], style


def test_python_that_cannot_be_read_has_its_line() -> None:
    [fault] = scan("def add(x):\n    return (\n", "add")
    assert fault.kind == "syntax" and fault.line == 2


def test_the_function_must_be_there() -> None:
    [fault] = scan("def other(x):\n    pass\n", "add")
    assert fault.kind == "missing" and "add" in fault.text


def test_a_trial_is_left_out_and_lines_stay() -> None:
    source = "A = 1\nif __name__ == '__main__':\n    import os\n    os.abort()\nB = 2\n"
    assert runnable(source) == "A = 1\n\n\n\nB = 2\n"
    assert runnable("if __name__ == '__main__':\n    A = 1\nelse:\n    B = 2\n").count("B = 2") == 1


def test_branches_and_words_between_blocks_of_kernels() -> None:
    kernel = "@triton.jit\ndef k(p, n):\n    m = (p < n) and (p > 0)\n"
    assert branches(kernel) and words_between_blocks(kernel) == [3]
    launcher = "def add(x):\n    if x and x:\n        pass\n"
    assert not branches(launcher) and words_between_blocks(launcher) == []


def test_a_name_that_was_mistyped() -> None:
    [fault] = scan("def add(x, place):\n    return plcae\n", "add")
    assert fault.text == "`plcae` is not defined; there are place" and fault.line == 2


def test_no_module_but_tritons_own_is_reached_through_what_is_allowed() -> None:
    triton = pytest.importorskip("triton")
    scanner = _Scanner(defined=set())
    ahead, seen = [("triton", triton)], set()
    while ahead:
        path, module = ahead.pop()
        for name, value in list(vars(module).items()):
            dotted = f"{path}.{name}"
            if not isinstance(value, types.ModuleType) or not scanner._may(dotted) or value.__name__ in seen:
                continue
            assert value.__name__.startswith("triton.") or value.__name__ == "math", f"{dotted} is {value.__name__}"
            seen.add(value.__name__)
            ahead.append((dotted, value))
    assert "triton.language" in seen and OF_TRITON


def test_a_kernel_may_use_everything_that_a_block_offers() -> None:
    language = pytest.importorskip("triton.language")
    offered = {name for kind in (language.tensor, language.core.tensor_descriptor_base) for name in dir(kind)}
    assert {name for name in offered if not name.startswith("_")} <= OF_BLOCKS | METHODS | FLAGS

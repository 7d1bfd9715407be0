"""The scan alone: nothing runs."""

from __future__ import annotations

import types

import pytest

from sublight.learn.exercises import EXERCISES
from sublight.learn.grade import disguised_fakes as disguised
from sublight.learn.grade.fakes import HONEST, OTHERS, SCANNED, Cheat
from sublight.learn.grade.mistakes import branches, joins_blocks, words_between_blocks
from sublight.learn.grade.scan import (
    FLAGS,
    METHODS,
    OF_BLOCKS,
    OF_TRITON,
    _Scanner,
    runnable,
    scan,
)


@pytest.mark.parametrize("cheat", (*SCANNED, *disguised.SCANNED), ids=lambda cheat: cheat.name)
def test_what_a_submission_may_not_contain_is_named(cheat: Cheat) -> None:
    faults = scan(cheat.source, cheat.exercise)
    assert [fault.kind for fault in faults[:1]] == ["scan"]
    assert any(cheat.word in fault.text and fault.line for fault in faults), faults


def test_honest_code_may_run() -> None:
    for exercise in EXERCISES:
        assert scan(exercise.starter(), exercise.name) == scan(exercise.solution(), exercise.name) == []
    for style, source in (*HONEST.items(), *disguised.HONEST.items()):
        assert scan(source, "add") == [], style
    for style, (name, source) in OTHERS.items():
        assert scan(source, name) == [], style


def test_python_that_cannot_be_read_has_its_line() -> None:
    [fault] = scan("def add(x):\n    return (\n", "add")
    assert fault.kind == "syntax" and fault.line == 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def add(x):\n    pass\0\n", "null bytes"),
        (f"def add(x):\n    a = {'-' * 100_000}1\n", "nested too deeply"),
        (f"def add(x):\n    a = x{'.T' * 3000}\n", "nested too deeply"),
        ("a = 1\n" * 100_000, "600,000 characters"),
    ],
)
def test_what_no_person_writes_has_its_line_too(source: str, words: str) -> None:
    [fault] = scan(source, "add")
    assert fault.kind == "syntax" and words in fault.text


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
    assert words_between_blocks("@triton.jit\ndef k(p, n, m):\n    m = p < n & m < 3\n") == [3]  # p < (n & m) < 3
    assert words_between_blocks("@triton.jit\ndef k(p, n, m):\n    m = (p < n) & (m < 3)\n") == []
    launcher = "def add(x):\n    if x and x:\n        pass\n"
    assert not branches(launcher) and words_between_blocks(launcher) == []


def test_a_name_that_was_mistyped() -> None:
    [fault] = scan("def add(x, place):\n    return plcae\n", "add")
    assert fault.text == "`plcae` is not defined; did you mean place?" and fault.line == 2


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("return math.ceil(3.5)", "`math` is not defined: `import math` is missing"),
        ("return tl.cdiv(3, 5)", "`tl` is not defined: `import triton.language as tl` is missing"),
        ("return plcae.clone()", "`plcae` is not defined; did you mean place?"),
    ],
)
def test_what_is_not_there_is_the_only_fault(code: str, text: str) -> None:
    [fault] = scan(f"def add(x, place):\n    {code}\n", "add")
    assert fault.text == text and fault.line == 2


def test_a_name_that_is_like_no_other_is_answered_by_the_names_at_that_place() -> None:
    source = "import triton\nBLOCK = 8\n@triton.jit\ndef k(p):\n    a = p + idx\ndef add(x):\n    grid = 1\n"
    [fault] = scan(source, "add")
    assert fault.text == "`idx` is not defined; the names here are BLOCK, a, add, k, p"


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("if n > 0 and n < 9:\n        m = p and n", set()),
        ("at = tl.arange(0, 8)\n    mask = n > 0 and at < n", {4}),
        ("at = tl.arange(0, 8)\n    low, mask = 0, at\n    mask = 0 < mask < n", {5}),
        ("total = tl.sum(tl.zeros((8,), tl.int32), axis=0)\n    is_full = total > 8 and n > 8", set()),
    ],
)
def test_numbers_may_be_joined_and_blocks_not(code: str, lines: set[int]) -> None:
    source = f"@triton.jit\ndef k(p, n):\n    {code}\n"
    assert joins_blocks(source) == lines and words_between_blocks(source)


@pytest.mark.parametrize(
    ("code", "words"),
    [("torch.inf", 'infinity is float("inf")'), ("p.float()", ".to(tl.float32) converts a block"),
     ("torch.sum(p)", "tl.sum")],
)  # fmt: skip
def test_words_of_torch_in_a_kernel(code: str, words: str) -> None:
    [fault] = scan(
        f"import torch\nimport triton\n@triton.jit\ndef k(p):\n    a = {code}\ndef add(x):\n    pass\n", "add"
    )
    assert words in fault.text


def test_a_word_of_tritons_is_found_where_it_is() -> None:
    source = "import triton\n@triton.jit\ndef k(p):\n    a = arange(0, 8)\ndef add(x):\n    k[(cdiv(8, 4),)](x)\n"
    first, second = scan(source, "add")
    assert first.text == "`arange` is not defined; it is tl.arange"
    assert second.text == "`cdiv` is not defined; it is triton.cdiv"


def test_torch_in_a_kernel_has_its_counterpart() -> None:
    source = (
        "import torch\nimport triton\n@triton.jit\ndef k(p):\n    a = torch.arange(8)\ndef add(x):\n    k[(1,)](x)\n"
    )
    [fault] = scan(source, "add")
    assert fault.text.endswith("a kernel computes with tl (triton.language), not with torch: tl.arange")


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

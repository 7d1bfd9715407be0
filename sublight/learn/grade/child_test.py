"""Common mistakes, as Triton words them: each is said again in words that tell what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sublight.learn.grade.child import explained, failure_of


@pytest.mark.parametrize(
    ("words", "code", "better"),
    [
        (
            "ValueError: Unsupported ptr type <['1024'], fp32> in `tl.store`",
            "tl.store(x, out_ptr)",
            "addresses come first",
        ),
        (
            "AssertionError: input and other must have equal reduction dimensions",
            "tl.dot(q, k)",
            "tl.trans turns the one",
        ),
        ("AssertionError: Both operands must be same dtype. Got fp32 and fp16", "", "tl.dot(weight.to(v.dtype), v)"),
        ("TypeError: unsupported operand type(s) for @: 'tensor' and 'tensor'", "q @ k", "is tl.dot(a, b)"),
        ("TypeError: cannot add pointers together", "tl.load(x_ptr + y_ptr)", "load from each of them"),
        ("AttributeError: 'torch.Size' object has no attribute 'dtype'", "mask = place < n", "x.shape[0]"),
        ("Boolean value of Tensor with more than one value is ambiguous", "if place < n:", "tl.where(condition, a, b)"),
        ("numel (16777216) exceeds triton maximum tensor numel (1048576)", "", "a block of 16777216 elements is too"),
        (
            "NameError: Cannot access global variable BLOCK from within @jit'ed function. More",
            "",
            "`BLOCK: tl.constexpr`",
        ),
        ("fp32[constexpr[1024]] is not string", "print(x)", 'print("x", x)'),
        (
            "ValueError: arange's arguments must be of type tl.constexpr",
            "place = tl.arange(program * BLOCK, (program + 1) * BLOCK)",
            "program * BLOCK + tl.arange(0, BLOCK)",
        ),
        ("ValueError: arange's arguments must be of type tl.constexpr", "tl.arange(0, BLOCK)", "`BLOCK: tl.constexpr`"),
        ("ValueError: arange's range must be a power of 2", "tl.arange(0, 1000)", "as 1024"),
        ("TypeError: must be real number, not tensor", "y = math.exp(x)", "math is for single numbers"),
        ("IndexError: list index out of range", "mask = place < x_ptr.shape[0]", "knows no sizes"),
        ("ValueError: Mask must have boolean scalar type", "tl.store(out_ptr + place, x, mask=n)", "mask = place < n"),
        ("TypeError: program_id() missing 1 required positional argument: 'axis'", "", "tl.program_id(0)"),
        ("TypeError: sum() got an unexpected keyword argument 'dim'", "tl.sum(x, dim=0)", "axis=0"),
        ("ValueError: axis 1 out of bounds for shape ['constexpr[1024]']", "tl.sum(x, axis=1)", "no dimension 1"),
        ("AttributeError: 'torch.dtype' object has no attribute 'scalar'", "x.to(torch.float32)", "tl.float32"),
        ("AttributeError: module 'triton.language' has no attribute 'inf'", "tl.inf", 'float("inf")'),
        ("AttributeError: 'tensor' object has no attribute 'unsqueeze'", "row.unsqueeze(1)", "row[:, None]"),
        ("AttributeError: 'tensor' object has no attribute 'mean'", "x.mean()", "has no mean"),
        ("TypeError: 'tensor' object does not support item assignment", "out_ptr[row] = x", "tl.store(out_ptr + place"),
        (
            "ValueError: tl.math has a reason of its own",
            "y = tl.math.exp(x)",
            "ValueError: tl.math has a reason of its own",
        ),
    ],
)
def test_a_mistake_in_a_kernel(words: str, code: str, better: str) -> None:
    assert better in explained(words, is_in_kernel=True, code=code)


def test_arguments_that_were_changed() -> None:
    words = "TypeError: copy() missing 1 required positional argument: 'n'"
    assert explained(words, is_in_kernel=False) == f"{words}: keep the starter's `def` with its arguments"
    assert explained(words, is_in_kernel=False, code="launch(x)") == words  # a function of the learner's own


def test_a_launch_with_too_few_arguments_is_told_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "add.py"
    launch = "def add(x):\n    raise TypeError(\"k() missing 1 required positional argument: 'n'\")\n"
    file.write_text(f"{launch}@triton.jit\ndef k(x_ptr, n, BLOCK):\n    pass\n")
    names: dict[str, Any] = {}
    exec(compile(launch, str(file), "exec"), names)
    with pytest.raises(TypeError) as raised:
        names["add"](1)
    failure = failure_of(raised.value, str(file))
    assert failure["line"] == 2
    assert failure["text"].endswith(": a launch gives all of k(x_ptr, n, BLOCK), in this order or by name")


def test_a_kernel_without_its_grid_is_wrong_where_it_is_called(tmp_path: object) -> None:
    file = f"{tmp_path}/copy.py"
    source = "def kernel(x):\n    raise AttributeError(\"no attribute 'grid_idx'\")\n\ndef copy(x):\n    kernel(x)\n"
    known: dict[str, object] = {}
    exec(compile(source, file, "exec"), known)
    with pytest.raises(AttributeError) as raised:
        known["copy"](1)  # type: ignore[operator]
    failure = failure_of(raised.value, file)
    assert failure["line"] == 5 and "start it on a grid" in failure["text"]

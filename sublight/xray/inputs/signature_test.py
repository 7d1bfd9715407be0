"""Types and constants as they are written, and what is wrong with them."""

from __future__ import annotations

import pytest

from sublight.errors import BadInput
from sublight.xray.inputs.signature import Typed, parse_constants, parse_signature, parse_value

NAMES = ["x", "n", "BLOCK"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", {}),
        ("x:*bf16, n:i32", {"x": Typed(kind="*bf16"), "n": Typed(kind="i32")}),
        ("n : int64 , x : *float32:1", {"n": Typed(kind="i64"), "x": Typed(kind="*fp32", divisor=1)}),
        (
            "*fp16:16, i32:16, 64",
            {"x": Typed(kind="*fp16", divisor=16), "n": Typed(kind="i32", divisor=16), "BLOCK": "64"},
        ),
        ("x:tensordesc<bf16[64, 32]>, n:u8", {"x": Typed(kind="tensordesc<bf16[64, 32]>"), "n": Typed(kind="u8")}),
        ("**fp8, bool", {"x": Typed(kind="**fp8e4nv"), "n": Typed(kind="i1")}),
    ],
)
def test_types(words: str, found: dict[str, Typed | str]) -> None:
    assert parse_signature(words, NAMES) == found


@pytest.mark.parametrize(
    ("typed", "is_aligned", "is_one"),
    [
        (Typed(kind="*bf16"), True, False),
        (Typed(kind="*bf16", divisor=1), False, False),
        (Typed(kind="*bf16", divisor=8), False, False),
        (Typed(kind="i32"), False, False),
        (Typed(kind="i32", divisor=16), True, False),
        (Typed(kind="i32", divisor=1), False, True),
    ],
)
def test_what_a_divisor_says(typed: Typed, is_aligned: bool, is_one: bool) -> None:
    assert (typed.is_aligned, typed.is_one) == (is_aligned, is_one)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("x:*bf61", "'*bf61' is no type: use one of bf16"),
        ("x:*bf16, x:i32", "names x twice"),
        ("z:*bf16, n:i32", "no argument is named by 'z:*bf16': they are x, n, BLOCK"),
        ("x:*bf16, i32", "no argument is named by 'i32'"),
        ("x:*bf16:32", "'*bf16:32' ends in no divisor: write :16"),
        ("i32, i32, 4, i32", "--sig has 4 types, the kernel 3 arguments: x, n, BLOCK"),
    ],
)
def test_a_bad_type_is_told(words: str, complaint: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_signature(words, NAMES)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        *(("1024", 1024), ("0x10", 16), ("1_000", 1000), ("-1e-6", -1e-6), ("True", True), ("false", False)),
        *(("None", None), ("'1'", "1"), ("exact", "exact"), ("(16, 32)", (16, 32)), ("relu", abs)),
    ],
)
def test_values(words: str, value: object) -> None:
    found = parse_value(words, {"relu": abs})
    assert found == value and type(found) is type(value)


def test_data_types_are_values() -> None:
    tl = pytest.importorskip("triton.language")
    assert parse_value("tl.float16", {}) is tl.float16
    with pytest.raises(BadInput, match=r"tl\.float61 is not in triton\.language"):
        parse_value("tl.float61", {})


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["BLOCK"], "'BLOCK' is no constant: write NAME=VALUE"),
        (["BLOCK="], "'BLOCK=' is no constant"),
        (["=4"], "'=4' is no constant"),
        (["a b=4"], "'a b=4' is no constant"),
        (["B=4", "C=1, B=5"], "gives B twice"),
    ],
)
def test_a_bad_constant_is_told(words: list[str], complaint: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_constants(words, {})
    assert complaint in str(caught.value)

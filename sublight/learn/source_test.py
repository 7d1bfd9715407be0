"""A notebook's function with all that it uses, as one file; and how a notebook shows a verdict."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from sublight.errors import BadInput
from sublight.learn.grade.scan import scan
from sublight.learn.notebook import check, page
from sublight.learn.source import source_of
from sublight.learn.verdict import Fault, Verdict

BLOCK = 256
WIDTH = tl.constexpr(8)
UNSENDABLE = object()


@triton.jit
def helper(x):
    return x + WIDTH


@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, helper(tl.load(x_ptr + place, mask=place < n)), mask=place < n)


def programs(n: int) -> int:
    return math.ceil(n / BLOCK)


def copy(x, out):  # type: ignore[no-untyped-def]
    kernel[(programs(x.numel()),)](x, out, x.numel(), BLOCK=BLOCK)


def uses_an_object(x, out):  # type: ignore[no-untyped-def]
    print(UNSENDABLE)


def test_what_a_function_uses_comes_before_it() -> None:
    source = source_of(copy)
    assert scan(source, "copy") == []
    order = [
        "import math",
        "WIDTH = tl.constexpr(8)",
        "def helper",
        "def kernel",
        "BLOCK = 256",
        "def programs",
        "def copy",
    ]
    places = [source.index(words) for words in order]
    assert source.count("def kernel") == source.count("import triton\n") == 1
    assert places[1] < places[2] < places[3] and max(places) == places[-1]
    compile(source, "notebook", "exec")


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(BadInput, match="UNSENDABLE is a object"):
        source_of(uses_an_object)
    for other in (kernel, 3, None, print):
        with pytest.raises(BadInput, match="takes the function that launches"):
            check(other)  # type: ignore[arg-type]


def test_a_page_shows_code_as_text() -> None:
    fault = Fault(kind="values", text="out[0] is <b>1</b>", line=1, case="n = 3")
    verdict = Verdict(
        exercise="copy", file="", faults=(fault,), source="x = '<script>'", drawn_by=page, notes=("a < b",)
    )
    shown = verdict._repr_html_()
    assert (
        shown is not None
        and "a &lt; b" in shown
        and "&lt;script&gt;" in shown
        and "<script>" not in shown
        and "<b>1" not in shown
    )

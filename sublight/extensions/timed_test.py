"""What is timed of a ladder, and who stands beside its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from sublight.correct import FACTOR, FAR_OFF
from sublight.errors import BadInput
from sublight.extensions import LADDERS, timed
from sublight.extensions.transpose import TRANSPOSE
from sublight.report import fakes


def test_a_ladders_own_shapes_or_those_that_are_given() -> None:
    matmul = timed.find("cuda:matmul", LADDERS)
    assert [case.dtype for case in timed.cases(matmul)] == [d for d, shapes in matmul.shapes.items() for _ in shapes]
    assert len(timed.cases(matmul, is_quick=True)) == 1
    (case,) = timed.cases(
        matmul, ["m=2,k=3,n=5" if "m" in next(iter(matmul.shapes.values()))[0] else "2x3x5"], ["fp16"]
    )
    assert case.dtype == "float16" and sorted(case.shape.values()) == [2, 3, 5]
    for words, message in (
        ({"shapes": ["2x3"]}, "shape '2x3' does not fit cuda:matmul: write "),
        ({"dtypes": ["int8"]}, "unknown data type 'int8'"),
    ):
        with pytest.raises(BadInput, match=message):
            timed.cases(matmul, **words)
    with pytest.raises(BadInput, match="unknown ladder 'cuda:matmull': did you mean cuda:matmul"):
        timed.find("cuda:matmull", LADDERS)


def test_who_stands_beside_the_steps_is_checked_as_they_are() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError

    case = timed.Case(ladder=replace(TRANSPOSE, rungs=()), shape={"rows": 33, "cols": 32}, dtype="float32")
    others = {"right": lambda x: x.t().clone(), "wrong": lambda x: x.t() + 1, "fails": fails}
    theirs, right, wrong, none = timed.rows(case, "cpu", 2**20, fakes.limits(), others=others, time_limit_s=0.001)
    assert (theirs.provider, theirs.error, right.provider, right.error) == ("torch", None, "right", 0.0)
    assert right.median_s and right.ours and wrong.error == FAR_OFF > FACTOR
    assert none.median_s is None and none.unavailable == "RuntimeError: "

"""What changed between two kernels is told, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sublight.errors import BadInput
from sublight.report.xray import diff as xray_diff
from sublight.report.xray import fakes as xray_fakes
from sublight.report.xray.diff import Pair
from sublight.report.xray.terminal_test import TOLD, WRONG, drawn, named, row
from sublight.xray.record import Finding

OLD = "LDG.E.128 R4, desc[UR4][R2.64]"
NEW = "LDG.E.U16 R4, desc[UR4][R2.64]"


def changed(**given: Any) -> Pair:
    after = xray_fakes.code(sass=xray_fakes.SASS.replace(OLD, NEW).replace("FADD R4, R4, R4", "IADD3 R4, R4, R5, RZ"))
    after = dataclasses.replace(
        after, resources=dataclasses.replace(after.resources, registers=64), constants={"N": 64}
    )
    return Pair(before=xray_fakes.page(), after=xray_fakes.page(code=after, **given))


def test_figures_constants_and_instructions_that_changed() -> None:
    pair = changed()
    assert pair.given == {"N": ("512", "64")}
    assert pair.figures["registers a thread"] == ("40", "64") and pair.figures["spilled"] == ("8 B", "8 B")
    assert pair.kinds == {"fp32": (2, 1), "integer": (0, 1)}
    assert pair.lines_changed == (2, 2)
    assert pair.shapes == ({"LDG.E.128": 1, "FADD": 1}, {"LDG.E.U16": 1, "IADD3": 1})
    text = drawn(xray_diff.page([pair]))
    assert text.startswith("_double  h200\n")
    assert row(text, "N  ") == ["N", "512", "64", "changed"]
    assert row(text, "registers") == ["registers a thread", "40", "64", "changed"]
    assert row(text, "spilled") == ["spilled", "8 B", "8 B"]
    assert row(text, "fp32") == ["fp32 instructions", "2", "1", "-1"]
    assert "  2 instructions gone, 2 new\n  − 1 LDG.E.128, 1 FADD\n  + 1 LDG.E.U16, 1 IADD3" in text


def test_registers_and_addresses_are_no_change() -> None:
    moved = xray_fakes.code(sass=xray_fakes.SASS.replace("R4", "R6").replace("/*00", "/*01"))
    pair = Pair(before=xray_fakes.page(), after=xray_fakes.page(code=moved))
    assert pair.lines_changed == (0, 0) and pair.kinds == {}
    text = drawn(xray_diff.page([pair]))
    assert "the same instructions, whatever their registers" in text and "changed" not in text and "−" not in text


def test_findings_are_cured_new_or_still_there() -> None:
    def finding(name: str, detail: str, line: int = 4) -> Finding:
        return Finding(id=name, kernel="k", place=xray_fakes.place(line), detail=detail)

    before = (WRONG, finding("narrow-load", "2 bytes"), finding("race", "as it was"), TOLD)
    after = (finding("narrow-load", "4 bytes"), finding("race", "as it was", line=9), finding("new-one", "oh"), TOLD)
    pair = Pair(before=xray_fakes.page(findings=before), after=xray_fakes.page(findings=after))
    assert [each.id for each in pair.cured] == ["spill"]
    assert [each.id for each in pair.caused] == ["new-one"]
    assert [each.detail for each in pair.still] == ["4 bytes"]
    text = drawn(xray_diff.page([pair]))
    assert "  cured:\n    spill  double.py:4\n      8 bytes do not fit." in text
    assert "  new:\n    new-one  double.py:4\n      oh" in text and "race" not in text and "enough" not in text
    data = pair.to_json()
    assert [each["id"] for each in data["cured"]] == ["spill"] and data["still"][0]["detail"] == "4 bytes"


def test_one_cured_of_two_alike() -> None:
    pair = Pair(before=xray_fakes.page(findings=(WRONG, WRONG)), after=xray_fakes.page(findings=(WRONG,)))
    assert len(pair.cured) == 1 and pair.caused == pair.still == []


def test_kernels_are_paired_by_name_and_gpu() -> None:
    before = [named("a"), named("b"), named("gone")]
    after = [named("b"), named("a", "a100"), named("a"), named("made")]
    pairs = xray_diff.paired(before, after)
    assert [(pair.before.code.name, pair.after.code.gpu.key) for pair in pairs] == [("a", "h200"), ("b", "h200")]
    assert xray_diff.alone(before, after, pairs) == ["gone", "a", "made"]
    text = drawn(xray_diff.page(pairs, ["gone", "made"]))
    assert text.splitlines()[-1] == "on one side only: gone, made"
    with pytest.raises(BadInput, match="no kernel is in both: a, b against c, d"):
        xray_diff.paired([named("a"), named("b")], [named("c"), named("d")])


def test_one_against_one_whatever_they_are_called() -> None:
    (pair,) = xray_diff.paired([named("old")], [named("new")])
    assert drawn(xray_diff.page([pair])).startswith("old → new  h200\n")
    (pair,) = xray_diff.paired([named("k", "a100")], [named("k")])  # two cubins
    assert drawn(xray_diff.page([pair])).startswith("k  a100 → h200\n")
    pairs = xray_diff.paired([named("old"), named("old", "a100")], [named("new"), named("new", "a100")])
    assert [(pair.before.code.gpu.key, pair.after.code.gpu.key) for pair in pairs] == [("h200",) * 2, ("a100",) * 2]


def test_json_tells_only_what_changed() -> None:
    (data,) = xray_diff.to_json([changed()])["kernels"]
    assert data["figures"]["registers a thread"] == ["40", "64"] and "spilled" not in data["figures"]
    assert data["instructions"] == {"fp32": [2, 1], "integer": [0, 1]}
    assert (data["instructions_gone"], data["instructions_new"], data["fewer"]) == (2, 2, {"LDG.E.128": 1, "FADD": 1})
    assert data["before"]["registers"] == 40 and data["after"]["registers"] == 64

"""What a run under watch has found, worst first."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sublight.report.xray import run as xray_run
from sublight.report.xray.terminal_test import TOLD, WRONG, drawn
from sublight.xray.sanitize.run import Report

REPORT = Report(script=Path("a.py"), findings=(TOLD, WRONG), kernels=("k", "l"), launches=3, failure="")


def test_what_is_wrong_comes_first_with_its_place_and_kernel() -> None:
    assert drawn(xray_run.page(REPORT)).splitlines() == [
        "spill  double.py:4  k",
        "  8 bytes do not fit.",
        "enough  k",
        "  Enough.",
        "3 launches of k, l: 1 finding",
    ]
    wide = dataclasses.replace(WRONG, detail="so " * 60)
    text = drawn(xray_run.page(dataclasses.replace(REPORT, findings=(wide,))), 60)
    assert all(line.startswith("  so") and len(line) <= 60 for line in text.splitlines()[1:-1])


def test_a_clean_run_and_a_failed_one() -> None:
    clean = dataclasses.replace(REPORT, findings=(TOLD,), launches=1, kernels=("k",))
    assert drawn(xray_run.page(clean)).splitlines()[-1] == "1 launch of k: nothing wrong was found"
    failed = dataclasses.replace(
        REPORT, findings=(WRONG, dataclasses.replace(WRONG, detail="Another.")), failure="AssertionError: no"
    )
    assert drawn(xray_run.page(failed)).splitlines()[-2:] == [
        "the script itself ended with AssertionError: no",
        "3 launches of k, l: 2 findings until it stopped; the rest was not looked at",
    ]


def test_what_could_not_be_interpreted_is_not_said_to_be_right() -> None:
    stopped = dataclasses.replace(TOLD, id="not-interpreted")
    text = drawn(xray_run.page(dataclasses.replace(REPORT, findings=(stopped,))))
    assert "nothing wrong was found" not in text
    assert text.splitlines()[-1] == "3 launches of k, l: nothing wrong until it stopped; the rest was not looked at"

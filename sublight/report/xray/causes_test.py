"""One cause is one finding, whatever follows from it."""

from __future__ import annotations

from sublight.report.xray.causes import causes
from sublight.xray.record import Finding, Place


def finding(id: str, line: int, detail: str = "", **more: bool) -> Finding:
    return Finding(id=id, kernel="k", place=Place(file="a/norm.py", line=line), detail=detail or f"{id} {line}", **more)


def test_rows_that_begin_anywhere_are_one_cause() -> None:
    [one] = causes(
        [finding("misaligned", 33), finding("narrow-load", 33), finding("narrow-load", 52), finding("narrow-store", 57)]
    )
    assert one.lead.detail == "narrow-load 33" and one.ids == "narrow-load, narrow-store, misaligned"
    assert one.where == "norm.py:33, 52, 57"


def test_what_has_another_cause_stays_apart() -> None:
    found = causes(
        [
            finding("uncoalesced", 3),
            finding("narrow-load", 3),  # every lane elsewhere: of course it is narrow
            finding("narrow-load", 7),
            finding("misaligned", 9),
            finding("spill", 3, "8 bytes"),
            finding("spill", 4, "8 bytes"),
            finding("spill", 5, "16 bytes"),
            finding("narrow-load", 8, is_information=True),
        ]
    )
    assert [(cause.ids, cause.where) for cause in found] == [
        ("uncoalesced, narrow-load", "norm.py:3"),
        ("narrow-load", "norm.py:7"),
        ("misaligned", "norm.py:9"),
        ("spill", "norm.py:3, 4"),
        ("spill", "norm.py:5"),
        ("narrow-load", "norm.py:8"),
    ]

"""The docs show the table as the steps would answer now."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend.device import Facts
from sublight.ops.attention.features import table

DOCS = Path(__file__).parents[3] / "docs" / "attention.md"


def test_the_docs_show_what_each_step_takes() -> None:
    assert "\n".join(table()) in DOCS.read_text(encoding="utf-8")


def test_the_table_depends_on_the_gpu() -> None:
    elsewhere = table(Facts(capability=80))
    assert elsewhere != table() and all(line.split("|")[4].strip() == "no" for line in elsewhere[2:])

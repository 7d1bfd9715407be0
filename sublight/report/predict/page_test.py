"""The page holds every figure that it is given, needs nothing from elsewhere, and opens without a word of complaint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sublight import units
from sublight.predict import config, estimate, grid, machine, precisions
from sublight.predict.step import Precision, Step
from sublight.report.explain.browser_test import CHROMIUM, chromium
from sublight.report.predict import charts, data, page

LLAMA = config.load("llama-3.2-1b")
MACHINES = (machine.find("h100"), machine.change(machine.find("h100"), {"bandwidth": 2.0}))
STEPS = tuple(Step(mode=mode, batch=8, context=2048) for mode in ("prefill", "decode", "train"))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def document() -> str:
    found = estimate.side_by_side(LLAMA, MACHINES, STEPS)
    grids = [grid.grid(LLAMA, MACHINES[0], step) for step in STEPS[:2]]
    beside = precisions.side_by_side(LLAMA, MACHINES[:1], STEPS[1:2])
    return page.html(data.to_json(LLAMA, Precision(), found, beside), found, grids)


def test_every_time_and_every_op_is_there(document: str) -> None:
    for found in estimate.side_by_side(LLAMA, MACHINES, STEPS):
        assert units.text(found.expected_s, "s") in document and units.text(found.memory.total, "B") in document
    assert document.count("<svg") == 3 + 3 + 2  # bars and a roofline a step, and two grids
    assert "Data types side by side" in document and "+1.7 to 1.8 %" in document and "not of llama-3.2-1b" in document
    assert "h100 bandwidth x2" in document and "Bottleneck on h100" in document


def test_nothing_is_fetched_and_nothing_runs(document: str) -> None:
    links = re.findall(r'(?:src|href)="([^"]+)"|url\(([^)]+)\)', document)
    assert links == [] and "<script" not in document


def test_pictures_scroll_on_a_phone_where_they_would_be_too_small_to_read(document: str) -> None:
    assert document.count('<div class="wide"><svg') == document.count("<svg")
    assert ".wide svg{min-width:640px}" in document


def test_a_hostile_name_is_text() -> None:
    from dataclasses import replace

    model = replace(LLAMA, name="<script>alert(1)</script>", source="<img src=x>")
    found = estimate.side_by_side(model, MACHINES[:1], STEPS[1:2])
    shown = page.html(data.to_json(model, Precision(), found), found, [])
    assert "<script>" not in shown and "<img" not in shown and "&lt;script&gt;" in shown


def test_cells_that_do_not_fit_have_no_time() -> None:
    big = config.load("llama-3-8b")
    shown = charts.heatmap(grid.grid(big, machine.find("l4"), Step(mode="decode", batch=1, context=4096)))
    assert shown.count("<g>") == 81 and "needs" in shown and shown.count("tokens/s") + shown.count("needs") == 81


def test_labels_do_not_lie_on_one_another() -> None:
    placed: list[tuple[float, float]] = []
    heights = [charts._free(placed, 100.0, 50.0) for _ in range(4)]
    assert heights == [50.0, 65.0, 80.0, 95.0] and charts._free(placed, 400.0, 50.0) == 50.0


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page in (Debian: chromium)")
def test_it_opens_in_a_browser(document: str, tmp_path: Path) -> None:
    ran = chromium(tmp_path, document, "--dump-dom")
    assert [line for line in ran.stderr.splitlines() if "CONSOLE" in line] == []
    assert ran.stdout.count("<svg") == 8 and "All predictions" in ran.stdout

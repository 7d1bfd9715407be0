"""The fit finds what was put in, holds out what it says, and the docs print its errors."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path
from typing import Any

import pytest

from sublight.predict import table

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("predict_fit", HERE / "predict_fit.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["predict_fit"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rows_of(script: Any, factor: Any, count: int = 200) -> list[Any]:
    """Products whose time is the analytic one times a factor of the shape."""
    draw, fitted = random.Random(0), table.parameters("product")
    rows = []
    for _ in range(count):
        m, n, k = (1 << draw.randint(low, 13) for low in (0, 7, 7))
        row = script.product_row(script.machine.find("h100"), m, n, k, 1.0)
        seconds = row.model(fitted) * factor(m, n, k)
        rows.append(script.product_row(script.machine.find("h100"), m, n, k, seconds))
    return rows


def test_the_grid_finds_a_correction_that_was_put_in(script: Any) -> None:
    rows = rows_of(script, lambda m, n, k: 1.5 if m < 16 else 1.0)
    axes = [script.steps(0, 16, 2), script.steps(5, 17, 4), script.steps(5, 17, 4)]
    fitted = table.parameters("product")
    parameters, made, check = script.checked("product", "h100", rows, axes, "a test", fitted)
    assert parameters == fitted and made["rows"] == 200 and check["rows"] == 100
    assert check["table"][0] < 0.05 < check["analytic"][1] and check["roofline"][0] > check["table"][0]
    values = table.Table(**{**made, "axes": tuple(map(tuple, made["axes"])), "values": tuple(made["values"])})
    assert values.correction((4, 1024, 1024)) == pytest.approx(1.5, rel=0.05)
    assert values.correction((4096, 1024, 1024)) == pytest.approx(1.0, rel=0.05)


def test_the_fit_finds_parameters_that_were_put_in(script: Any) -> None:
    truth = {"launch_s": 4e-6, "stream": 0.7}
    here = script.machine.find("h200")
    rows = []
    for power in range(12, 32):
        moved = 1 << power
        seconds = script.analytic.stream_s(moved, 1, here.gpu.memory_bytes_per_s, truth)
        rows.append(script.stream_row(here, {"bytes": moved, "median_s": seconds}))
    found = script.fit(rows, script.START["stream"])
    assert found["launch_s"] == pytest.approx(4e-6, rel=0.05) and found["stream"] == pytest.approx(0.7, rel=0.05)


def test_halves_share_nothing(script: Any) -> None:
    known, held = script.halves(list(range(101)))
    assert set(known) | set(held) == set(range(101)) and not set(known) & set(held)


def test_a_run_of_this_project_is_read(script: Any) -> None:
    """The format that a GPU run of products and attention is expected in."""
    product = {"op": "matmul", "direction": "fwd", "shape": {"m": 128, "n": 256, "k": 512}, "median_s": 1e-5}
    heads = {"batch": 2, "heads": 8, "kv_heads": 2, "q_len": 1, "kv_len": 900, "head_dim": 128, "causal": 1}
    decode = {"op": "attention", "direction": "fwd", "shape": heads, "median_s": 1e-5}
    found = script.rows_of_run("h200", [product, decode] * script.LEAST_ROWS)
    assert {kind: len(rows) for kind, rows in found.items()} == {"product": 40, "decode attention": 40}
    assert found["product"][0].sizes == (128, 256, 512) and found["decode attention"][0].seconds == pytest.approx(1e-5)
    assert script.rows_of_run("h200", [product] * (script.LEAST_ROWS - 1)) == {}


def test_only_the_table_of_a_page_is_written_anew(script: Any) -> None:
    for old in ("", "\nold\n", "\n"):
        page = script.with_checks(f"before\n{script.BEGIN}{old}{script.END}\nafter\n", table.data()["checks"])
        assert page.startswith("before\n") and page.endswith(f"{script.END}\nafter\n") and "old" not in page
    with pytest.raises(SystemExit, match="left as it is"):
        script.with_checks("a page without the marks", [])


def test_the_docs_print_the_errors_of_the_tables(script: Any) -> None:
    page = (HERE.parent / "docs" / "predict.md").read_text(encoding="utf-8")
    assert script.checks_markdown(table.data()["checks"]) in page


def test_errors_that_are_claimed_hold_the_bars() -> None:
    """Median on rows that were held out: H100 by its tables, A100 by its figures alone."""
    checks = {check["what"]: check for check in table.data()["checks"]}
    for kind in ("product", "prefill attention", "decode attention"):
        check = checks[f"{kind}, h100"]
        assert check["table"][0] <= 0.08 and check["table"][0] < check["analytic"][0] < check["roofline"][0]
    assert checks["product, a100"]["analytic"][0] <= 0.20
    assert all(math.isfinite(value) for each in table.tables() for value in each.values)

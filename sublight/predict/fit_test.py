"""The fit finds what was put into rows, and the half that it is checked on is not the half that it saw."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sublight.predict import fit, machine, table


def rows_of(factor: Any, count: int = 200) -> list[Any]:
    """Products whose time is the analytic one times a factor of the shape."""
    draw, fitted = random.Random(0), table.parameters("product")
    rows = []
    for _ in range(count):
        m, n, k = (1 << draw.randint(low, 13) for low in (0, 7, 7))
        row = fit.product_row(machine.find("h100"), m, n, k, 1.0)
        seconds = row.model(fitted) * factor(m, n, k)
        rows.append(fit.product_row(machine.find("h100"), m, n, k, seconds))
    return rows


def test_the_grid_finds_a_correction_that_was_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(lambda m, n, k: 1.5 if m < 16 else 1.0)
    fitted = table.parameters("product")
    monkeypatch.setattr(fit, "fit", lambda rows, start: fitted)
    parameters, made, check = fit.checked("product", machine.find("h100"), rows, "a test")
    assert parameters == fitted and made["rows"] == 200 and check["rows"] == 100
    assert check["table"][0] < 0.05 < check["analytic"][1] and check["roofline"][0] > check["table"][0]
    values = table.Table(**{**made, "axes": tuple(map(tuple, made["axes"])), "values": tuple(made["values"])})
    assert values.correction((4, 1024, 1024)) == pytest.approx(1.5, rel=0.05)
    assert values.correction((4096, 1024, 1024)) == pytest.approx(1.0, rel=0.05)


def test_the_fit_finds_parameters_that_were_put_in() -> None:
    """Rows too long for the chip, rows that 16 does not divide, few rows for many SMs, and inputs in the L2."""
    truth = {"launch_s": 4e-6, "cold_s": 1e-6, "stream": 0.7, "sm_share": 1.2, "blend": 4.0}
    truth |= {"long": 0.5, "long_backward": 0.6, "odd": 0.25, "odd_most": 0.18, "ramp_s": 3e-6, "ramp": 3.0}
    here = machine.find("h200")
    rows = []
    for power in range(12, 32):
        for cols, sets in ((4096, 1), (4096, 4096), (4097, 4096), (4104, 4096), (1 << 17, 4096)):
            shape = {"rows": max(1, (1 << power) // (4 * cols)), "cols": cols}
            row = {"op": "rms_norm", "direction": "fwd", "shape": shape, "bytes": 1 << power, "buffer_sets": sets}
            seconds = fit.stream_row(here, row | {"median_s": 1.0}).model(truth)
            rows.append(fit.stream_row(here, row | {"median_s": seconds}))
    found = fit.fit(rows, fit.START["stream"])
    sure = ("launch_s", "cold_s", "long", "odd", "odd_most", "ramp_s")
    assert {name: found[name] for name in sure} == pytest.approx({name: truth[name] for name in sure}, rel=0.06)
    assert fit.errors([row.model(found) for row in rows], rows)[1] < 0.02  # `blend` may stand in for `stream`


def test_halves_share_nothing() -> None:
    known, held = fit.halves(list(range(101)))
    assert set(known) | set(held) == set(range(101)) and not set(known) & set(held)


def test_a_run_of_this_project_is_read() -> None:
    """The format that a GPU run of products and attention is expected in."""
    product = {"op": "matmul", "direction": "fwd", "shape": {"m": 128, "n": 256, "k": 512}, "median_s": 1e-5}
    heads = {"batch": 2, "heads": 8, "kv_heads": 2, "q_len": 1, "kv_len": 900, "head_dim": 128, "causal": 1}
    decode = {"op": "attention", "direction": "fwd", "shape": heads, "median_s": 1e-5}
    found = fit.rows_of_run(machine.find("h200"), [product, decode] * fit.LEAST_ROWS)
    assert {kind: len(rows) for kind, rows in found.items()} == {"product": 40, "decode attention": 40}
    assert found["product"][0].sizes == (128, 256, 512) and found["decode attention"][0].seconds == pytest.approx(1e-5)
    assert fit.rows_of_run(machine.find("h200"), [product] * (fit.LEAST_ROWS - 1)) == {}

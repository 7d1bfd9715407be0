"""The script for attention's bars: the table says what rows say, time ends a run and keeps it, bad words one line."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

from sublight import bench
from sublight.limits import run as limits_run
from sublight.results import Limits, Result, Run, read_run

SCRIPT = Path(__file__).with_name("attention.py")


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return importlib.import_module("benchmarks.attention")


def row(module: ModuleType, name: str, provider: str, median_s: float, **more: Any) -> Result:
    bar = next(bar for bar in module.BARS if f"{bar.part} {bar.name}" == name)
    made = {"op": bar.op, "direction": bar.direction, "shape": module._shape(bar), "dtype": "bfloat16"}
    return Result(**{**made, "provider": provider, "median_s": median_s, "flops": 5e11, "bytes": 10**9, **more})


def line(module: ModuleType, rows: list[Result], words: str) -> str:
    (found,) = (line for line in module.table(rows) if words in line)
    return str(found)


def test_a_bar_is_met_where_a_right_row_reaches_it(module: ModuleType) -> None:
    name = "forward heads of 128, 4096, full"
    rows = [row(module, name, "cudnn", 1e-3), row(module, name, "flash", 1.25e-3), row(module, name, "hopper", 0.9e-3)]
    full = "| forward | heads of 128, 4096, full"
    assert "| 500 | 556 | 400 | 1.08 x cuDNN | 1.11 x: met |" in line(module, rows, full)
    assert "0.80 x over 1: not met" in line(module, rows, "| heads of 128, `flash`")
    slower = [*rows[:2], row(module, name, "hopper", 0.95e-3)]
    assert "1.05 x: not met" in line(module, slower, full)
    wrong = [*rows[:2], row(module, name, "hopper", 0.5e-3, error=2.5)]
    assert line(module, wrong, full).endswith("| not measured |")


def test_decoding_has_seconds_and_bytes(module: ModuleType) -> None:
    one = row(module, "decode one sequence of 4096", "sublight", 8.9e-6, bytes=16_800_000)
    assert "8.9 µs, 1.89 TB/s" in (text := line(module, [one], "one sequence")) and text.endswith("| met |")
    many = row(module, "decode 16 of 8192", "sublight", 250e-6)
    assert line(module, [many], "16 of 8192").endswith("| not met |")  # 4.0 of 4.1 TB/s


def test_time_ends_a_run_which_keeps_its_rows(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = iter(10.0 * turn for turn in range(1000))
    limits = Limits(device="H200", kind="cuda")
    head = {"gpu": "h200", "driver": "", "torch": "", "triton": "", "commit": "c", "date": "", "limits": limits}

    def run(ops: Any, *, shapes: Any = (), directions: Any = (), **options: Any) -> Run:
        more = (
            {"direction": directions[0], "dtype": "bfloat16", "provider": "sublight", "median_s": 1e-5} if ops else {}
        )
        return Run(**head, rows=tuple(Result(op=op.name, shape=op.parse_shape(shapes[0]), **more) for op in ops))

    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(limits_run, "this_machine", lambda kind: None)
    monkeypatch.setattr(bench, "limits_for", lambda machine: limits)
    monkeypatch.setattr(bench, "run", run)
    found = module.measured(["decode", "forward"], 25.0, tmp_path / "rows.json")
    assert [each.op for each in found.rows] == ["paged_attention"] * 2  # each case takes two looks at the clock
    assert read_run(tmp_path / "rows.json").rows == found.rows
    whole = tmp_path / "all.json"
    whole.write_text(json.dumps(Run(**{**head, "commit": "old"}, rows=found.rows[:1]).to_json()))
    monkeypatch.setattr(sys, "argv", ["attention.py", "--from", str(tmp_path / "rows.json"), "--into", str(whole)])
    module.main()
    assert [each.commit for each in read_run(whole).rows] == ["c", "c"]


@pytest.mark.parametrize("words", [["--only", "forwards"], ["--from", "nowhere.json"]])
def test_bad_words_get_one_line(words: list[str]) -> None:
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr and words[1] in done.stderr.splitlines()[-1]

"""The script for the GPU: tables say what rows say, a part that breaks costs its own rows, bad words one line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("attention.py")


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


def row(provider: str, median_s: float, **more: Any) -> dict[str, Any]:
    shape = {"batch": 4, "q_len": 4096, "causal": 1}
    made = {"op": "attention", "direction": "fwd", "shape": shape, "dtype": "bfloat16", "provider": provider}
    return {**made, "median_s": median_s, "flops": 5e11, "bytes": 10**9, "error": 1.0, **more}


def test_tables_show_rates_ratios_and_what_is_wrong(module: ModuleType) -> None:
    rows = [
        row("cudnn", 1e-3),
        row("flash", 2e-3, ours=True),
        row("hopper", 0.5e-3, ours=True, error=50.0),  # quick and wrong: marked, and no ratio
        {**row("flash2", 0.0), "median_s": None, "unavailable": "not here"},
    ]
    text = "\n".join(module.tables(rows))
    assert "500" in text and "250" in text and "1000!" in text
    assert "flash 0.50 x cudnn" in text and "hopper 2" not in text
    assert "flash2: not here" in text


def test_a_part_that_hangs_or_fails_costs_its_own_rows(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.dumps({"rows": [row("cudnn", 1e-3)]})
    good = f"import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text({rows!r})"
    parts = (
        module.Part(words=("-c", "import time; time.sleep(60)"), limit_s=0.5),
        module.Part(words=("-c", "raise SystemExit('broken')"), limit_s=60),
        module.Part(words=("-c", good), limit_s=60),
        module.Part(words=("-c", good), limit_s=60),  # the same rows again: kept once
    )
    monkeypatch.setattr(module, "PARTS", {"forward": parts})
    assert [each["provider"] for each in module.measure(["forward"])] == ["cudnn"]


@pytest.mark.parametrize("words", [["--only", "forwards"], ["--from", "nowhere.json"]])
def test_bad_words_get_one_line(words: list[str]) -> None:
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr and words[1] in done.stderr.splitlines()[-1]

"""`sublight predict` as a user meets it: one line for what cannot be, the same figures on every way out, no torch."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sublight import units
from sublight.cli import main
from sublight.report.predict import plans

LLAMA = ("predict", "llama-3-8b")


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.run([*words, "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *LLAMA, "--gpu", "h100,b200", "--batch", "1,8", "--context", "1k,4096", "--mode", "decode")
    rows = found["predictions"]
    keys = {(row["gpu"], row["batch"], row["context"]) for row in rows}
    assert len(rows) == len(keys) == 8 and {row["mode"] for row in rows} == {"decode"}
    assert found["model"]["parameters"] == 8_030_261_248
    for row in rows:
        assert row["expected_s"] == pytest.approx(sum(op["expected_s"] for op in row["ops"]))
        assert row["floor_s"] <= row["expected_s"] and sum(op["share"] for op in row["ops"]) == pytest.approx(1)
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["expected_s"])


def test_the_terminal_prints_the_figures_of_the_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = [*LLAMA, "--gpu", "h100,a100", "--batch", "4", "--context", "2048", "--price", "2.5", "--census"]
    rows = answer(capsys, *words)["predictions"]
    monkeypatch.setenv("COLUMNS", "220")
    assert main.run(words) == 0
    shown = capsys.readouterr().out
    for row in rows:
        if row["fits"]:
            assert units.text(row["expected_s"], "s") in shown and units.text(row["floor_s"], "s") in shown
            assert f"{row['price_per_million_tokens']:.3g}" in shown
            assert all(op["name"] in shown and units.text(op["expected_s"], "s") in shown for op in row["ops"])
    table = tmp_path / "out.csv"
    assert main.run([*words[:-1], "--csv", str(table)]) == 0
    lines = list(csv.DictReader(table.open(encoding="utf-8")))
    assert [line["expected_s"] for line in lines] == [str(row.get("expected_s", "")) for row in rows]
    assert [int(line["total_bytes"]) for line in lines] == [row["memory_bytes"]["total"] for row in rows]
    assert all("carried over" in line["how"] for line in lines if line["gpu"] == "h100" and line["fits"] == "True")


def test_every_time_says_how_it_is_known_and_how_far_it_may_be_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = [*LLAMA, "--gpu", "h200,a100", "--mode", "decode", "--batch", "8"]
    page = tmp_path / "p.html"
    rows = answer(capsys, *words, "--html", str(page))["predictions"]
    plan = ("predict", "llama-3-70b", "--gpu", "a100", "--plan", "8")
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main.run(words) == 0
        shown = capsys.readouterr().out
        assert all(each in shown for each in (" how ", " measured ", " analytic ", "Memory is counted"))
        assert all(f"{100 * row['error']:.0f} %" in shown for row in rows)
    assert main.run([*plan]) == 0
    assert " analytic " in capsys.readouterr().out
    assert ">measured<" in page.read_text(encoding="utf-8") and ">analytic<" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("columns", ["80", "100"])
def test_tables_fit_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    words = [
        *LLAMA,
        "--gpu",
        "h100",
        "--what-if",
        "bandwidth=2x,flops=3x",
        "--batch",
        "1,64",
        "--price",
        "2",
        "--census",
    ]
    assert main.run(words) == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= int(columns)
    assert not [line for line in shown if "…" in line and not line.startswith("… and ")]  # no figure is cut
    assert any("x1." in line for line in shown)  # what the change brings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lama-3-8b",), "unknown model 'lama-3-8b': did you mean llama-3-8b"),
        (("llama-3-8b", "--gpu", "h110"), "unknown GPU 'h110': nearest are"),
        (("llama-3-8b", "--gpu", "none.toml"), "there is no file none.toml"),
        (("llama-3-8b", "--gpu", "a100", "--dtype", "fp8"), "A100 SXM 80GB has no fp8 products"),
        (("llama-3-8b", "--dtype", "fp7"), "unknown data type 'fp7'"),
        (("llama-3-8b", "--batch", "0"), "--batch 0: it must be from 1"),
        (("llama-3-8b", "--batch", "many"), "--batch many: give whole numbers"),
        (("llama-3-8b", "--mode", "forward"), "llama-3-8b has no forward step: use prefill or decode or train"),
        (("llama-3-8b", "--mode", "sleep"), "unknown mode 'sleep'"),
        (("llama-3-8b", "--price", "free"), "--price free: give the price"),
        (("llama-3-8b", "--what-if", "speed=2x"), "unknown --what-if 'speed'"),
        (("llama-3-8b", "--network", "50"), "--network 50: give one GPU's bytes a second"),
        (("llama-3-8b", "--tp", "5"), "--tp 5 does not divide the 32 heads"),
        (("llama-3-8b", "--ep", "2"), "llama-3-8b has no experts"),
        (("gpt2", "--context", "4096"), "gpt2 has 1024 positions"),
        (("vit-b-16", "--context", "77"), "vit-b-16 takes images"),
        (("resnet-50", "--tp", "2"), "resnet-50 is cut by --dp only"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert main.run(["predict", *words]) == 2
    caught = capsys.readouterr()
    assert message in caught.err and caught.err.count("\n") == 1 and not caught.out


def test_without_a_model_the_known_ones_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["predict", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) >= 25 and {"llama-3-8b", "resnet-50"} <= {row["name"] for row in rows}
    assert main.run(["predict", "--batch", "8"]) == 2
    assert "no model is named" in capsys.readouterr().err
    assert main.run(["predict", "gpt2", "--from", "trace.json"]) == 2
    assert "name a model or a trace, not both" in capsys.readouterr().err


def test_plans_and_what_they_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "predict", "llama-3-70b", "--gpu", "h100", "--plan", "4", "--latency", "40ms")
    assert found["plans"][0]["meets"] and found["plans"][0]["gpus"] == 4
    slower = [row["parallel"] for row in found["plans"] if not row["meets"]]
    assert slower and plans.slower_lines(found) == [f"Slower than 40.0 ms: {', '.join(slower)}."]
    for words, message in (
        (("--plan", "4", "--tp", "2"), "leave out --tp"),
        (("--plan", "4", "--html", "x.html"), "leave out --html"),
        (("--plan", "4", "--gpu", "h100,a100"), "--plan takes one GPU"),
        (("--latency", "5ms"), "needs --plan N"),
        (("--plan", "4", "--latency", "soon"), "give a time"),
        (("--plan", "1"), "does not fit on 1"),
        (("--plan", "0"), "--plan 0: give how many GPUs"),
        (("--lora", "0"), "--lora 0: give the adapters' rank"),
        (("--lora", "99999999999"), "wide, and adapters are narrower"),
    ):
        assert main.run(["predict", "llama-3-70b", *words]) == 2
        assert message in capsys.readouterr().err


def test_fp8_says_what_a_product_holds(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--dtype", "fp8"), ("--precisions",), ("--weights", "fp8"), ()):
        assert main.run([*LLAMA, "--gpu", "h100", "--mode", "decode", *words]) == 0
        is_there = "find the scale of their input" in " ".join(capsys.readouterr().out.split())
        assert is_there == (words in (("--dtype", "fp8"), ("--precisions",)))


def test_a_recorded_step_elsewhere_says_that_nobody_checked_it(capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(__file__).parents[2] / "examples" / "recorded" / "h200" / "unfused_norm.json.gz"
    found = answer(capsys, "predict", "--from", str(trace), "--gpu", "b200")
    assert found["how"] == "analytic" and found["error"] is None
    assert main.run(["predict", "--from", str(trace), "--gpu", "b200"]) == 0
    assert found["note"].split(";")[0] in " ".join(capsys.readouterr().out.split())


def test_a_trace_takes_gpus_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in ((("--batch", "2"), "leave out --batch"), ((), "there is no file gone.json.gz")):
        assert main.run(["predict", "--from", "gone.json.gz", *words]) == 2
        assert message in capsys.readouterr().err


def test_few_bits_are_not_trained(capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer(capsys, *LLAMA, "--gpu", "h200", "--weights", "int4")["predictions"]
    assert {row["mode"] for row in rows} == {"prefill", "decode"}
    assert main.run([*LLAMA, "--gpu", "h200", "--weights", "int4", "--mode", "train"]) == 2
    assert "weights of 4 bits are not trained" in capsys.readouterr().err
    adapted = answer(capsys, *LLAMA, "--gpu", "h200", "--weights", "int4", "--mode", "train", "--lora", "16")
    assert adapted["predictions"][0]["memory_bytes"]["weights"] < 6e9


def test_data_types_stand_side_by_side_with_whose_accuracy_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*LLAMA, "--gpu", "a100,h200", "--mode", "decode", "--precisions"]
    found = answer(capsys, *words)
    rows = {(row["gpu"], row["precision"]["products"], row["precision"]["weights"]): row for row in found["precisions"]}
    assert ("h200", "float8_e4m3fn", "float8_e4m3fn") in rows and len(rows) == 4 + 5  # an A100 has no fp8 products
    times = [rows["h200", "bfloat16", kind]["expected_s"] for kind in ("int4", "int8", "bfloat16")]
    assert times == sorted(times) and rows["h200", "bfloat16", "bfloat16"]["expected_s"] == times[2]
    rise = rows["h200", "bfloat16", "int4"]["precision"]["perplexity_rise"]
    assert 0.016 < rise["least"] < rise["most"] < 0.019
    monkeypatch.setenv("COLUMNS", "80")
    assert main.run(words) == 0
    shown = capsys.readouterr().out
    assert (
        "+1.7 to 1.8 %" in shown and "of a character model (4 layers of 256" in shown and "not of llama-3-8b" in shown
    )
    assert main.run([*LLAMA, "--gpu", "h200", "--mode", "decode", "--weights", "int4"]) == 0
    assert "Perplexity in bf16, weights int4: +1.7 to 1.8 %, of a character" in " ".join(
        capsys.readouterr().out.split()
    )
    for wrong in (["--weights", "int4"], ["--mode", "train"]):
        assert main.run([*LLAMA, "--gpu", "h200", "--precisions", *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_batch_that_does_not_fit_says_by_how_much_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*LLAMA, "--gpu", "h100", "--mode", "decode", "--batch", "500"]) == 2
    line = capsys.readouterr().err
    assert "needs 285 GB of 81.6 GB, 203 GB too much: batch 121 fits" in line and line.count("\n") == 1
    assert main.run(["predict", "llama-3-70b", "--gpu", "h100", "--mode", "decode"]) == 2
    assert "--tp 2 or more, or --weights int4, would lower it" in capsys.readouterr().err


def test_one_of_several_that_does_not_fit_has_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer(capsys, *LLAMA, "--gpu", "h100", "--mode", "decode", "--batch", "1,500")["predictions"]
    assert [row["fits"] for row in rows] == [True, False] and "expected_s" not in rows[1]
    assert rows[1]["largest_batch"] == 121


def test_a_prediction_needs_no_torch() -> None:
    code = (
        "import sys; from sublight.cli import main;"
        "status = main.run(['predict', 'llama-3-8b', '--gpu', 'h100,h200,b200', '--batch', '1,8,64']);"
        "assert status == 0 and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""The plan of a call for a GPU that is not here, and limits that were measured before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sublight.cli import main as cli

pytest.importorskip("torch")


def test_why(capsys: pytest.CaptureFixture[str]) -> None:
    """The same plan as a call on that GPU makes, by its compute capability."""
    pytest.importorskip("triton")
    plans = {}
    for gpu in ("h200", "a100"):
        assert cli.run(["why", "matmul", "--shape", "4096x4096x4096", "--gpu", gpu, "--json", "-"]) == 0
        plans[gpu] = json.loads(capsys.readouterr().out)
    assert plans["h200"]["kernel"] != plans["a100"]["kernel"]  # Hopper has kernels of its own
    assert plans["h200"]["shape"] == {"m": 4096, "n": 4096, "k": 4096} and plans["a100"]["reason"]
    assert cli.run(["why", "softmax", "--shape", "4096x1024", "--gpu", "h200"]) == 0
    page = capsys.readouterr().out
    assert "4096 programs" in page and "1024 columns: one row a program" in page
    assert cli.run(["why", "rms_norm", "--shape", "8x128", "--gpu", "h200"]) == 0
    assert "rms_norm 8x128 bfloat16 on h200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["why", "sofmax"], "did you mean softmax"),
        (["why", "softmax", "--shape", "3"], "does not fit softmax"),
        (["why", "softmax", "--shape", f"{10**23}x5"], "a size has 63 bits"),
        (["why", "softmax", "--shape", f"{10**13}x{10**13}"], "is too large for a tensor"),
        (["why", "softmax", "--dtype", "int3"], "int3"),
        (["why", "softmax", "--gpu", "voodoo"], "unknown GPU"),
        (["limits", "--kept", "--quick"], "--kept measures nothing"),
    ],
)
def test_bad_words(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 2
    assert complaint in capsys.readouterr().err


def test_limits_that_were_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sublight.limits import run
    from sublight.results import Limit, Limits, write_json

    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path))
    assert cli.run(["limits", "--kept", "--device", "cpu"]) == 2
    assert "nothing was measured" in capsys.readouterr().err
    limits = Limits(device="this", kind="cpu", limits=(Limit(name="host_copy", unit="B/s", value=12e9),))
    write_json(limits.to_json(), run.this_machine("cpu").cache_path)
    assert cli.run(["limits", "--kept", "--device", "cpu", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["limits"][0]["value"] == 12e9

"""`sublight limits`: what it passes on, its JSON, its page, and an interrupted run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sublight.cli.main_test import Say, say  # noqa: F401
from sublight.limits import run as limits_run
from sublight.report import fakes


@pytest.fixture
def fake_limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the measurement, and keeps what it was asked."""
    asked: dict[str, Any] = {}

    def run(**given: Any) -> Any:
        asked.update(given)
        return fakes.limits()

    monkeypatch.setattr(limits_run, "run", run)
    return asked


def test_limits_passes_on_what_was_asked(say: Say, fake_limits: dict[str, Any]) -> None:  # noqa: F811
    status, out, _ = say("limits", "--quick", "--only", "hbm_copy,hbm_read", "--only", "disk", "--device", "cpu")
    assert status == 0
    assert fake_limits == {
        "kind": "cpu",
        "quick": True,
        "only": ["hbm_copy", "hbm_read", "disk"],
        "progress": None,  # stderr is no terminal here
    }
    assert "throttled (power cap)" in out


def test_limits_json_has_the_agreed_shape(say: Say, fake_limits: dict[str, Any]) -> None:  # noqa: F811
    data = json.loads(say("limits", "--json", "-")[1])
    assert data["device"] == "NVIDIA <H200>"
    wanted = {"name", "value", "unit", "spec", "fraction_of_spec", "verdict", "unavailable"}
    assert all(wanted <= set(limit) for limit in data["limits"])


def test_limits_interrupted_shows_what_there_is(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    part = replace(fakes.limits(), source="measured in part: interrupted after 3 of 9")
    monkeypatch.setattr(limits_run, "run", lambda **_: part)
    status, out, _ = say("limits")
    assert status == 130
    assert "interrupted after 3 of 9" in out
    assert "hbm_read" in out


def test_limits_page(say: Say, fake_limits: dict[str, Any], tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "limits.html"
    assert say("limits", "--html", str(path))[0] == 0
    page = path.read_text()
    assert "NVIDIA &lt;H200&gt;" in page
    assert "<H200>" not in page


def test_people_say_gpu(say: Say, fake_limits: dict[str, Any]) -> None:  # noqa: F811
    assert say("limits", "--device", "GPU")[0] == 0
    assert fake_limits["kind"] == "cuda"

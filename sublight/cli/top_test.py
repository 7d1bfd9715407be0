"""The verb: what it prints, its exit status, how it ends; on a machine without a GPU and with stand-ins."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pynvml")

from rich.console import Console

from sublight.cli import top
from sublight.cli.main import run
from sublight.health import check, fakes, read, xids
from sublight.report.top import page
from sublight.top import record
from sublight.top.history import History


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the driver that the verb finds."""
    monkeypatch.setattr(xids, "in_kernel_log", lambda: [])
    monkeypatch.setattr(check, "of_host", lambda _: ())
    monkeypatch.setattr(read, "APART_S", 0)

    def use(*gpus: dict[str, Any], system: dict[str, Any] | None = None) -> None:
        found = fakes.by_hand(*gpus, system=system)
        monkeypatch.setattr(read, "_nvidia", lambda _: read.ask(found, read.nvidia.Reader))

    return use


NARROW = {"nvmlDeviceGetCurrPcieLinkWidth": 8}


def test_check_says_a_line_a_problem_and_its_status(
    machine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # one line a problem at any width
    machine({}, {**NARROW, "nvmlDeviceGetRemappedRows": [0, 0, 1, 0]})
    assert run(["top", "--check"]) == top.UNWELL
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["GPU 1", "GPU 1"] and "x8" in lines[0] and "remapped" in lines[1]
    machine({}, {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x4})  # at its power cap: nobody should be woken
    assert run(["top", "--check"]) == 0
    assert capsys.readouterr().out == "well: 2 GPUs and the host\n"


def test_json_holds_the_snapshot_and_its_problems(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine(NARROW)
    assert run(["top", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["gpus"][0]["activity"]["tensor_share"] == 0.64
    assert data["gpus"][0]["power"]["fan_share"] == {"unavailable": "not supported by this GPU or driver"}
    assert [problem["kind"] for problem in data["problems"]] == ["link"]
    assert run(["top", "--check", "--json", "-"]) == top.UNWELL


def test_without_a_gpu_the_host_is_shown_and_why(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine(system={"nvmlInit": {"error": 12}})
    assert run(["top", "--once"]) == 0
    out = capsys.readouterr().out
    assert "CPU " in out and "network" in out and "no GPU of NVIDIA: no NVIDIA driver here" in out


def test_a_table_on_stdout_stands_there_alone(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine(NARROW)
    assert run(["top", "--once", "--csv", "-"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("time,gpu_index") and len(rows) == 1


def test_a_recorded_session_is_shown_checked_and_made_a_table(
    machine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(NARROW)
    session, table = str(tmp_path / "session"), tmp_path / "table.csv"
    assert run(["top", "--looks", "2", "--every", "0.1", "--record", session]) == 0
    assert "2 looks in" in capsys.readouterr().err
    machine(system={"nvmlInit": {"error": 12}})  # what is here now does not matter
    assert run(["top", "--replay", session]) == 0
    assert "NVIDIA H200" in capsys.readouterr().out
    assert run(["top", "--replay", session, "--check", "--csv", str(table)]) == top.UNWELL
    assert len(table.read_text().splitlines()) == 3


def test_several_looks_of_one_page_lie_apart(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    begun = time.monotonic()
    assert run(["top", "--once", "--looks", "3", "--every", "0.5", "--csv", str(table)]) == 0
    assert time.monotonic() - begun > 1.0 and len(table.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--every", "0"], "--every takes 0.1"),
        (["--every", "nan"], "--every takes 0.1"),
        (["--every", "1e30"], "at most a day"),
        (["--looks", "-1"], "--looks takes 1 or more"),
        (["--looks", str(10**23), "--once"], "--looks takes 1 or more"),
        (["--check", "--once"], "--once and --check exclude"),
        (["--diagnose", "--csv", "x"], "--diagnose and --csv exclude"),
        (["--replay", "/no/such"], "cannot read /no/such"),
        (["--prometheus", "nine"], "write :9400"),
        (["--replay", "a", "--record", "a"], "is named twice"),
        (["--once", "--csv", "-", "--json", "-"], "two outputs are to be printed"),
    ],
)
def test_bad_input_is_one_line(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", *words]) == 2
    error = capsys.readouterr().err
    assert part in error and error.count("\n") == 1


def test_a_session_that_cannot_be_read_leaves_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("{}")
    assert run(["top", "--replay", str(tmp_path / "other"), "--record", str(tmp_path / "new"), "--looks", "1"]) == 2
    assert not (tmp_path / "new").exists()


class Pressed(top.Keys):
    """q after so many looks, or Ctrl-C."""

    def __init__(self, looks: int, *, interrupted: bool = False) -> None:
        super().__init__()
        self._left, self._interrupted = looks, interrupted

    def quit_within(self, seconds: float) -> bool:
        self._left -= 1
        if self._left == 0 and self._interrupted:
            raise KeyboardInterrupt
        return self._left == 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_live_view_ends_with_q_and_with_ctrl_c(machine: Any, interrupted: bool, tmp_path: Path) -> None:
    machine({})
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, legacy_windows=False)
    session = record.Writer(tmp_path / "session")
    looks = top.looks("")
    assert top.watch(looks, [session], screen, Pressed(3, interrupted=interrupted), 0) == 3
    session.close()
    assert len(record.read(tmp_path / "session")) == 3
    assert "\x1b[?1049l" in screen.file.getvalue()  # type: ignore[attr-defined]  # the terminal is as it was


WORKERS = [fakes.process(-at, at * 10**9) for at in range(1, 30)]


@pytest.mark.parametrize(
    "gpus",
    [[], [{}], [{**NARROW, "nvmlDeviceGetComputeRunningProcesses": WORKERS}], [NARROW] * 2, [{}] * 8],
    ids=["none", "well", "busy", "two", "eight"],
)
def test_the_live_view_fits_a_small_terminal(machine: Any, gpus: list[dict[str, Any]]) -> None:
    machine(*gpus)
    reader, history = read.Reader(), History()
    for _ in range(70):
        snapshot = reader.read()
        history.add(snapshot)
    console = Console(file=io.StringIO(), width=80, height=24, highlight=False)
    console.print(page(snapshot, history, lines=24))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines if line.strip()]
    assert "CPU" in names and "waited" in names
    if len(gpus) == 1:
        assert {"SM", "tensor", "bandwidth", "PCIe", "clock", "power", "heat", "memory", "errors", "XIDs"} <= set(names)
    if gpus and "nvmlDeviceGetComputeRunningProcesses" in gpus[0]:
        assert any("more" in line for line in lines)

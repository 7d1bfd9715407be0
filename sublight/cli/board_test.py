"""`sublight board` as a command: accounts, what is refused, and an end that leaves nothing."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from sublight.cli import board as cli_board
from sublight.cli import main as cli
from sublight.learn.board import jail
from sublight.learn.board.store import Store


def test_an_account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = tmp_path / "board.sqlite"
    assert cli.run(["board", "--db", str(db), "--add", "ann", "--json", "-"]) == 0
    made = json.loads(capsys.readouterr().out)
    account = Store(db).account_of(made["token"])
    assert account is not None and account.name == "ann"
    assert db.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--add", "<b>"], "is no name"),
        (["--add", ""], "is no name"),  # as a shell's empty variable gives it: no server
        (["--json", "-"], "--json goes with --add"),
        (["--sandbox", "paper"], "unknown sandbox"),
        (["--graders", "0"], "--graders 0"),
        (["--host", "no.such.host.invalid"], "cannot listen"),
        (["--db", "nowhere/board.sqlite"], "in a folder that is there"),
        (["--db", str(jail.PACKAGE / "board.sqlite")], "could read it there"),
    ],
)
def test_bad_words(
    words: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["board", *words]) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "a board that was refused left its file"


def test_it_serves_says_that_it_runs_nothing_and_puts_all_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fastapi")
    stop, home = threading.Event(), tmp_path / "home"
    home.mkdir()
    monkeypatch.setattr(cli_board, "_stop_by_signal", lambda: stop)
    monkeypatch.setattr(cli_board, "_home", lambda: home)
    monkeypatch.setattr(jail, "usable", lambda *args: (None, "none is allowed"))
    db = str(tmp_path / "board.sqlite")
    options = {"host": "127.0.0.1", "port": 0, "graders": 1, "is_open": False, "sandbox": ""}
    serving = threading.Thread(target=cli_board.serve, args=(db,), kwargs=options)
    serving.start()
    result = ""
    while "http" not in result and serving.is_alive():
        time.sleep(0.02)
        result += capsys.readouterr().err
    assert "no code is run: no sandbox can be had here (none is allowed)" in result
    address = result.split()[1].rstrip(";")
    with urllib.request.urlopen(f"{address}/api/status", timeout=30) as reply:
        assert not json.loads(reply.read())["runs_code"]
    stop.set()
    serving.join()
    assert not home.exists()

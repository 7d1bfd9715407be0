"""`sublight serve` as its user meets it, until it listens."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
from sublight.cli import main as cli
from sublight.cli.serve import taken

SIZES = {
    **{"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--host", "no host"], "--host no host"),
        (["--queue", "-1"], "--queue -1"),
        (["--time-limit", "0"], "--time-limit 0"),
        (["--weights", "w3"], "unknown way of --weights 'w3'"),
        (["--context", "65"], "more than the model's 64"),
        ([], "has no *.safetensors"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    status = cli.run(["serve", str(folder), "--device", "cpu", "--port", "0", *words])
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "") and complaint in shown.err and shown.err.count("\n") == 1


def test_a_port_that_somebody_has(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with taken("127.0.0.1", 0) as other:
        other.listen()
        port = other.getsockname()[1]
        assert cli.run(["serve", str(folder), "--device", "cpu", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_it_says_where_it_listens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to where uvicorn takes over; a cache that is smaller than the context bounds a text."""
    from sublight.engines.generate import weights

    ran: list[Any] = []
    monkeypatch.setattr(weights, "load", lambda config, folder, how, **given: weights.random(config, **given))
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: ran.append((self.config.app, sockets)))
    words = ["--device", "cpu", "--port", "0", "--host", "0.0.0.0", "--cache", "32", "--name", "small", "--batch", "2"]
    assert cli.run(["serve", str(folder), *words]) == 0
    shown = capsys.readouterr()
    assert "small on http://0.0.0.0:" in shown.out and "32 tokens a text, 32 in the cache" in shown.out
    assert "there is no --api-key" in shown.err
    assert isinstance(ran[0][1][0], socket.socket)

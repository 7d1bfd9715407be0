"""A file is written whole or not at all; one that cannot be read is said in a line; limits like that are set aside."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from sublight import results
from sublight.errors import BadInput
from sublight.results import read_limits, read_run, write_json
from sublight.results_test import RUN


class Planted(BaseException):
    """Not an Exception: Ctrl-C is none either."""


def test_write_makes_the_folder_and_ends_the_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "run.json"
    write_json({"unit": "µs"}, path)
    assert path.read_text(encoding="utf-8") == '{\n "unit": "µs"\n}\n'
    assert [other.name for other in path.parent.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("data", "error"),
    [({"a": 1, "b": object()}, TypeError), ({"a": math.nan}, ValueError), ({"a": [1.0, math.inf]}, ValueError)],
    ids=["no JSON", "NaN", "infinity"],
)
def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path, data: Any, error: type[Exception]) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with pytest.raises(error):
        write_json(data, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("planted", "raised"), [(Planted(), Planted), (OSError(28, "No space left"), BadInput)])
def test_an_interrupt_half_way_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: BaseException, raised: type[BaseException]
) -> None:
    def fail(_: str, mode: int) -> None:  # the last step before the rename
        raise planted

    path = tmp_path / "run.json"
    path.write_text("old")
    monkeypatch.setattr(results.os, "chmod", fail)
    with pytest.raises(raised):
        write_json({}, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["file/run.json", "file/folder/run.json", "folder"])
def test_a_place_that_cannot_be_written_is_said_in_a_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match="cannot write") as error:
        write_json({}, tmp_path / name)
    assert str(tmp_path / name) in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_run_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(RUN.to_json(), path)
    assert read_run(path) == RUN


NO_RUN = {
    "empty": b"",
    "cut off": b'{"gpu": "h200", "rows": [',
    "no text": b"\xff\xfe\x00",
    "a list": b"[1, 2]",
    "brackets in brackets": b"[" * 100_000,
    "a word": b'"gpu"',
    "limits": json.dumps(RUN.limits.to_json()).encode(),
    "a trace": b'{"traceEvents": []}',
    "rows are numbers": json.dumps({**RUN.to_json(), "rows": [1]}).encode(),
    "rows of others": json.dumps({**RUN.to_json(), "rows": [{"name": "x"}]}).encode(),
    "no limits": json.dumps({**RUN.to_json(), "limits": None}).encode(),
}


@pytest.mark.parametrize("content", NO_RUN.values(), ids=NO_RUN.keys())
def test_another_file_is_no_run(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(BadInput) as error:
        read_run(path)
    assert str(error.value) == f"{path} is not a results file: make one with `sublight bench --json FILE`"


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_run_that_cannot_be_read_is_said_in_a_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="cannot read") as error:
        read_run(tmp_path / name)
    assert "\n" not in str(error.value)


def test_limits_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    assert read_limits(path) is None
    write_json(RUN.limits.to_json(), path)
    assert read_limits(path) == RUN.limits
    assert list(tmp_path.iterdir()) == [path]


NO_LIMITS = (b"", b"\xff", b"[1]", b'{"limits": [{"name": "x"}]}', b'{"limits": 3}', b"[" * 100_000)


@pytest.mark.parametrize("content", NO_LIMITS, ids=range(len(NO_LIMITS)))
def test_corrupt_limits_are_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "limits.json"
    path.write_bytes(content)
    assert read_limits(path) is None
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("limits.json.corrupt-")
    assert aside.read_bytes() == content


def test_corrupt_limits_that_cannot_be_moved_are_no_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "limits.json"
    path.write_text("{")
    monkeypatch.setattr(Path, "rename", refuse)
    assert read_limits(path) is None
    assert path.read_text() == "{"


def test_a_file_of_limits_that_is_missing_is_not_called_another_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot read .*missing\.json: No such file"):
        results.read_limits_file(tmp_path / "missing.json")
    (tmp_path / "deep.json").write_bytes(b"[" * 100_000)
    with pytest.raises(BadInput, match="is not a file of limits"):
        results.read_limits_file(tmp_path / "deep.json")


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    results.write_file("x", tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "target.json").read_text() == "x"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    results.write_file("said", pipe)
    assert os.read(reader, 10) == b"said" and pipe.is_fifo()
    os.close(reader)

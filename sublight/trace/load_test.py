from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sublight.errors import BadInput
from sublight.trace import fuzz_test, load
from sublight.trace.read import chrome_fakes


def test_a_trace_is_known_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    text = chrome_fakes.text()
    contents = {
        "a": text,
        "b": b"\xef\xbb\xbf \n" + text,
        "c": gzip.compress(text),
        "d": b"SQLite format 3\x00",
        "e": b"[",
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        assert load.is_trace(tmp_path / name), name
    for name, data in {"script.py": b"[1]", "notes.txt": b"hello", "empty": b""}.items():
        (tmp_path / name).write_bytes(data)
        assert not load.is_trace(tmp_path / name), name
    assert load.is_trace(tmp_path / "not there.json.gz") and not load.is_trace(tmp_path / "not there")
    assert load.is_trace(tmp_path)


def test_the_kind_of_a_file_is_in_its_bytes(tmp_path: Path) -> None:
    database = fuzz_test.database(tmp_path / "made")
    (tmp_path / "a.json").write_bytes(database)
    (tmp_path / "b.txt").write_bytes(gzip.compress(chrome_fakes.text()))
    assert [trace.tool for trace in load.load(tmp_path / "a.json")] == ["nsight"]
    assert [trace.tool for trace in load.load(tmp_path / "b.txt")] == ["pytorch"]


def test_a_folder_gives_what_can_be_read(tmp_path: Path) -> None:
    for rank in (1, 0):
        found = chrome_fakes.trace(steps=1)
        found["distributedInfo"]["rank"] = rank
        (tmp_path / f"rank{rank}.json").write_bytes(chrome_fakes.text(found))
    (tmp_path / "broken.json").write_bytes(b"{")
    (tmp_path / "readme.md").write_text("no trace")
    assert [trace.rank for trace in load.load(tmp_path)] == [0, 1]


def test_nothing_to_load_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no file"):
        load.load(tmp_path / "x.json")
    with pytest.raises(BadInput, match="holds no trace"):
        load.load(tmp_path)
    (tmp_path / "broken.json").write_bytes(b"{")
    with pytest.raises(BadInput, match=r"no trace of .* can be read: .*broken.json"):
        load.load(tmp_path)

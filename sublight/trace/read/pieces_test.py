"""A trace read in pieces: each holds whole events, none is missing, and damaged gzip data is used as far as it goes."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from sublight.errors import BadInput
from sublight.trace.read import pieces

EVENTS = [b'{"ph": "X", "name": "e%d", "args": {"a": [{"b": "}, {"}]}}' % at for at in range(40)]
TEXT = b'{"top": 1, "traceEvents": [' + b",\n ".join(EVENTS) + b'], "end": 2}'


def read(path: Path, data: bytes) -> tuple[list[bytes], list[str]]:
    path.write_bytes(data)
    opened = pieces.open_pieces(path)
    found = list(opened)
    assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
    return [text for text, _ in found], opened.lost


def test_a_long_run_of_events_that_begin_with_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels of processes, some hundred thousand of them, behind events that begin with their phase."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(pieces, "FAR_BYTES", 4000)
    labels = [b'{\n  "name": "process_name", "ph": "M", "args": {"name": "{}, {"}}' for _ in range(200)]
    found, lost = read(tmp_path / "t", b'{"traceEvents": [' + b",\n".join((*EVENTS, *labels, *EVENTS)) + b"]}")
    assert lost == [] and len(found) > 10
    assert b"".join(found).count(b'"ph"') == 280
    for text in found[:-1]:
        assert len(json.loads(text)) > 0


@pytest.mark.parametrize("size", [16, 33, 100, 1000, 1 << 20])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_pieces_hold_whole_events_and_nothing_is_missing(
    tmp_path: Path, size: int, pack: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", size)
    monkeypatch.setattr(pieces, "GZIP_BLOCK_BYTES", size)
    found, lost = read(tmp_path / "t", pack(TEXT))  # type: ignore[operator]
    assert lost == []
    for text in found[:-1]:
        assert text.startswith(b'[{"ph"') and text.endswith(b"}]")
    assert re.findall(rb"e\d+", b"".join(found)) == [b"e%d" % at for at in range(40)]
    assert found[-1].endswith(b'], "end": 2}')
    assert len(found) > 3 or size > 100


def test_two_gzip_members_are_one_file(tmp_path: Path) -> None:
    middle = len(TEXT) // 2
    found, lost = read(
        tmp_path / "t", gzip.compress(TEXT[:middle]) + b"\0\0" + gzip.compress(TEXT[middle:]) + b"\0" * 9
    )
    assert re.findall(rb"e\d+", b"".join(found)) == [b"e%d" % at for at in range(40)]
    assert (found[-1][-12:], lost) == (b'], "end": 2}', [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data + b"garbage", "Something else than gzip data follows"),
        (lambda data: data[:-9], "The gzip file ends early"),
        (lambda data: data[:-8] + b"\0" * 8, "The gzip data is damaged (incorrect data check)"),
    ],
)
def test_what_is_wrong_with_gzip_data_is_said_and_the_text_is_used(tmp_path: Path, change: object, said: str) -> None:
    found, lost = read(tmp_path / "t", change(gzip.compress(TEXT)))  # type: ignore[operator]
    assert b"e38" in b"".join(found)
    assert len(lost) == 1 and lost[0].startswith(said)


def test_text_without_an_event_is_not_read_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 100)
    monkeypatch.setattr(pieces, "FAR_BYTES", 1000)
    found, lost = read(tmp_path / "t", TEXT[:500] + b" " * 9000)
    assert lost[0].startswith("No event ends in") and sum(map(len, found)) < 2500
    with pytest.raises(BadInput, match="it has no traceEvents"):
        read(tmp_path / "t", b'{"a": "' + b"x" * 2000 + b'", "traceEvents": []}')


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a folder"):
        pieces.open_pieces(tmp_path)
    with pytest.raises(BadInput, match="cannot read"):
        pieces.open_pieces(tmp_path / "nowhere")

"""A file's or folder's kind is known by its bytes; what is no trace is refused in a line that names it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sublight.errors import BadInput
from sublight.trace import fuzz_test, load
from sublight.trace.read import chrome_fakes, jax_fakes


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


def test_two_recordings_of_one_rank_are_not_held_against_each_other(tmp_path: Path) -> None:
    """As PyTorch's handler for TensorBoard leaves them: one a cycle."""
    for cycle in (1, 2):
        (tmp_path / f"host_1.{cycle}.pt.trace.json").write_bytes(chrome_fakes.text())
    with pytest.raises(BadInput, match=r"holds 2 traces of rank 0 \(host_1.1.pt.trace.json, host_1.2.pt.*: name one"):
        load.load(tmp_path)


def test_nothing_to_load_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no file"):
        load.load(tmp_path / "x.json")
    with pytest.raises(BadInput, match="holds no trace"):
        load.load(tmp_path)
    (tmp_path / "broken.json").write_bytes(b"{")
    with pytest.raises(BadInput, match=r"no trace of .* can be read: .*broken.json"):
        load.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("host.xplane.pb", b"\n\x10", "an XPlane profile of JAX or TensorFlow"),
        ("profile", b"\n\x84\x01\x08\x02\x12\x0e/host:metadata", "an XPlane profile of JAX or TensorFlow"),
        ("run.pftrace", b"\n\x05hello", "a Perfetto trace in its binary form"),
        ("run.perfetto-trace", b"\n\x05hello", "a Perfetto trace in its binary form"),
        ("kernel.ncu-rep", b"NVR\0", "a report of Nsight Compute"),
        ("old.qdrep", b"NVDA", "a report of an old Nsight Systems"),
    ],
)
def test_what_is_no_trace_for_us_is_named_for_what_it_is(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert load.is_trace(tmp_path / name), "and not run as a script"
    with pytest.raises(BadInput, match=words) as error:
        load.load(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_chrome_trace_by_another_name_is_still_one(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_bytes(b"\n" + chrome_fakes.text())  # the first byte of a protocol buffer, too
    assert load.load(tmp_path / "trace.txt")[0].tool == "pytorch"


def test_the_folder_that_jax_writes(tmp_path: Path) -> None:
    for day in ("2026_11_14", "2026_11_15"):
        run = tmp_path / "plugins" / "profile" / day
        run.mkdir(parents=True)
        (run / "host.xplane.pb").write_bytes(b"\n\x10")
        (run / "host.trace.json.gz").write_bytes(gzip.compress(jax_fakes.text()))
    (trace,) = load.load(tmp_path)
    assert trace.tool == "jax" and "2026_11_15" in trace.source

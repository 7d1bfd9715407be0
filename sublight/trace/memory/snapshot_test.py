"""A snapshot is read as plain data; a hostile, damaged or foreign file gets one line and runs nothing."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from sublight.errors import BadInput
from sublight.trace.memory import snapshot
from sublight.trace.memory.report import read

FRAMES = [{"filename": "/me/train.py", "line": 3, "name": "main"}]


def small() -> dict[str, Any]:
    block = {"address": 4096, "size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": FRAMES}
    rest = {"address": 5120, "size": 2_096_128, "requested_size": 0, "state": "inactive", "frames": []}
    segment = {"address": 4096, "total_size": 2 << 20, "device": 0, "stream": 0, "segment_type": "small"}
    alloc = {"action": "alloc", "addr": 4096, "size": 1000, "stream": 0, "time_us": 10, "frames": FRAMES}
    return {
        "segments": [{**segment, "segment_pool_id": (0, 0), "blocks": [block, rest]}],
        "device_traces": [[alloc, {"action": "snapshot", "size": 0, "time_us": 20, "frames": []}]],
        "allocator_settings": {"expandable_segments": False},
    }


def pickled(data: Any, path: Path, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(data, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_is_known_by_its_content(tmp_path: Path, protocol: int) -> None:
    path = pickled(small(), tmp_path / "any.name", protocol)
    found = snapshot.load(path)
    assert [(block.address, block.bytes, block.active) for block in found.segments[0].blocks] == [
        (4096, 1000, True),
        (5120, 2_096_128, False),
    ]
    (event,) = found.events[0]
    assert (event.action, event.address, event.bytes, event.time_us) == ("alloc", 4096, 1000, 10)
    assert event.stack == (snapshot.Frame("/me/train.py", 3, "main"),)
    assert read(path).peak_bytes == 1000


def test_json_and_gzip_forms(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(small()))
    (tmp_path / "s.gz").write_bytes(gzip.compress(pickle.dumps(small())))
    assert read(tmp_path / "s.json").peak_bytes == read(tmp_path / "s.gz").peak_bytes == 1000


class Hostile:
    """What unpickles into a call."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "ran"
    path = pickled({**small(), "x": Hostile(target)}, tmp_path / "s.pickle", protocol)
    with pytest.raises(BadInput, match=r"system.*refused, nothing was run") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert not target.exists()
    pickle.loads(path.read_bytes())  # the file is what it claims to be
    assert target.exists()


def test_a_pickle_that_asks_for_a_huge_table_takes_no_memory(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "s.pickle"
    path.write_bytes(b"\x80\x02}r" + struct.pack("<I", 0xFFFFFFF0) + b".")
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(BadInput, match="far more memory"):
        read(path)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 << 20  # KiB


def test_one_list_named_many_times_is_read_once() -> None:
    data = small()
    events = data["device_traces"][0] * 1000
    data["device_traces"] = [events] * 1000
    data["segments"][0]["blocks"] *= 10
    data["segments"] = [dict(data["segments"][0]) for _ in range(10)]
    found = snapshot.parse(data)
    assert sum(map(len, found.events)) == 1000
    assert sum(len(segment.blocks) for segment in found.segments) == 20


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cut off"),
        (pickle.dumps(small())[:-20], "cut off|damaged"),
        (pickle.dumps(small())[:60], "cut off|damaged"),
        (pickle.dumps([1, 2, 3]), "is no memory snapshot"),
        (pickle.dumps({"model": 3}), "is no memory snapshot"),
        (pickle.dumps("words"), "is no memory snapshot"),
        (pickle.dumps({"segments": [{"address": "x"}]}), "none of its 1 entries can be read"),
        (pickle.dumps({"segments": [], "device_traces": []}), "holds no memory"),
        (b'{"segments": [', "damaged|cut off"),
        (b"\x80\x04K", "cut off|damaged"),
        (b"\x80\x02h\x07.", "damaged"),
    ],
)
def test_bad_files_get_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=words) as caught:
        snapshot.load(path) if not content else read(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match="cannot read"):
        read(tmp_path / "missing")


def test_what_is_damaged_is_counted_and_the_rest_is_kept() -> None:
    data = small()
    data["device_traces"][0] += [{"action": "alloc", "addr": -1, "size": 3}, 7, {"action": "alloc", "addr": 1}]
    found = snapshot.parse(data)
    assert len(found.events[0]) == 1
    assert found.lost == ("3 entries of the snapshot could not be read",)


def test_mutated_files_give_a_report_or_a_line(tmp_path: Path) -> None:
    whole = pickle.dumps(small())
    chance = random.Random(3)
    path = tmp_path / "s.pickle"
    kinds = set()
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(2, len(data))] = chance.randrange(256)
        path.write_bytes(data)
        try:
            assert 0 <= read(path).peak_bytes < 2**63
            kinds.add("report")
        except BadInput as error:
            assert "\n" not in str(error)
            kinds.add("line")
    assert kinds == {"report", "line"}

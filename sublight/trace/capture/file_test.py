"""What a capture does to the profiler's file."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from sublight.trace.capture import graphs


@pytest.mark.parametrize("at", [0, 50, 63, 64, 1000])
def test_a_replay_is_seen_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Pieces are read one by one, and a name may lie across two."""
    monkeypatch.setattr(graphs, "PIECE_BYTES", 64)
    file = tmp_path / "steps.json"
    file.write_bytes(b"x" * at + b'"cudaGraphLaunch"' + b"y" * 200)
    assert graphs.replays(file)
    file.write_bytes(b"x" * at + b'"cudaGraphLauncx"' + b"y" * 200)
    assert not graphs.replays(file)

"""The tuner times every candidate once and keeps the fastest."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import tune
from sublight.ops import tuning
from sublight.ops.rows import block_for

FAST = tuning.Tile(block=1024, warps=4)
SLOW = tuning.Tile(block=1024, warps=1)
BROKEN = tuning.Tile(block=1024, warps=32)


def test_the_fastest_tile_is_kept_and_a_broken_one_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(thunk: Any, **_: Any) -> Any:
        trial = tuning.TRIAL.get()
        assert trial is not None and trial[0] == "toy"
        if trial[1] is BROKEN:
            raise RuntimeError("out of resource: shared memory")
        return type("Samples", (), {"median_s": 1e-3 if trial[1] is SLOW else 1e-4})

    toy = tune.Choice(
        kernel="toy", candidates=lambda block: [SLOW, FAST, BROKEN], thunk=lambda cols: list, widths=(1024,)
    )
    monkeypatch.setattr(tune, "choices", lambda: (toy,))
    monkeypatch.setattr(tune.timing, "measure", measure)
    table, trials = tune.tune()
    assert table == {"toy 1024 full 2": FAST}
    assert [trial["seconds"] for trial in trials] == [1e-3, 1e-4, None]
    assert tuning.TRIAL.get() is None


def test_every_candidate_holds_its_rows() -> None:
    for choice, cols, tile in tune.trials(tune.choices()):
        assert tile.block == block_for(cols) and 1 <= tile.warps <= 32, (choice.kernel, cols, tile)
        assert tile.block * tile.rows >= 32 * tile.warps


def test_the_table_answers_for_every_width_that_was_tuned() -> None:
    rule = tuning.Tile(block=16, warps=1)
    for choice in tune.choices():
        for cols in choice.widths:
            facts = {"packable": True, "capability": tuning.TUNED_CAPABILITY, "rule": rule}
            found = tuning.tile_for(choice.kernel, cols, choice.itemsize, **facts)
            assert found.block == block_for(cols), (choice.kernel, cols)
            assert tuning.tile_for(choice.kernel, cols, choice.itemsize, **{**facts, "capability": 80}) is rule
            assert tuning.tile_for(choice.kernel, cols, choice.itemsize, **{**facts, "packable": False}) is rule

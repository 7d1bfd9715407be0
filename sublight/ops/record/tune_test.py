"""The tuner times every candidate once and keeps the fastest."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.ops.norm import ring
from sublight.ops.record import tune, tuning

FAST = tuning.Tile(block=1024, warps=4)
SLOW = tuning.Tile(block=1024, warps=1)
BROKEN = tuning.Tile(block=1024, warps=32)


@pytest.mark.parametrize(("rule_s", "kept"), [(5e-4, {"toy 1024 2": FAST}), (5e-5, {})])
def test_the_fastest_tile_is_kept_where_it_beats_the_rule(
    rule_s: float, kept: dict[str, tuning.Tile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(thunk: Any, **_: Any) -> Any:
        trial = tuning.TRIAL.get()
        assert trial is not None and trial[0] == "toy"
        if trial[1] is BROKEN:
            raise RuntimeError("out of resource: shared memory")
        return type("Samples", (), {"median_s": {FAST: 1e-4, SLOW: 1e-3}.get(trial[1], rule_s)})

    toy = tune.Choice(
        kernel="toy", candidates=lambda block: [SLOW, FAST, BROKEN], thunk=lambda cols: list, widths=(1024,)
    )
    monkeypatch.setattr(tune, "choices", lambda: (toy,))
    monkeypatch.setattr(tune.timing, "measure", measure)
    table, trials = tune.tune()
    assert table == kept
    assert [trial["seconds"] for trial in trials] == [rule_s, 1e-3, 1e-4, None]
    assert tuning.TRIAL.get() is None


def test_every_candidate_holds_its_rows() -> None:
    for choice, cols, tile in tune.trials(tune.choices()):
        if tile is not None:
            assert (tile.block + tile.tail) * max(1, tile.parts) >= cols, (choice.kernel, cols, tile)
            assert 1 <= tile.warps <= 32 and (tile.block + tile.tail) * tile.rows >= 32 * tile.warps


def test_the_table_answers_for_what_was_tuned_and_on_that_gpu_only() -> None:
    rule = tuning.Tile(block=16, warps=1)
    answered = 0
    for choice in tune.choices():
        for cols in choice.widths:
            facts = {"packable": True, "capability": tuning.TUNED_CAPABILITY, "rule": rule}
            found = tuning.tile_for(choice.kernel, cols, choice.itemsize, **facts)
            answered += found is not rule
            assert found is rule or (found.block + found.tail) * max(1, found.parts) >= cols, (choice.kernel, cols)
            assert tuning.tile_for(choice.kernel, cols, choice.itemsize, **{**facts, "capability": 80}) is rule
            assert tuning.tile_for(choice.kernel, cols, choice.itemsize, **{**facts, "packable": False}) is rule
    assert answered > 40


@pytest.mark.parametrize("kernel", ["rms_norm_backward", "layer_norm_backward", "add_rms_norm_backward"])
def test_a_width_that_was_not_tried_goes_by_the_nearest_that_was(kernel: str) -> None:
    rule = tuning.Tile(block=16, warps=1)
    facts = {"packable": True, "capability": tuning.TUNED_CAPABILITY, "rule": rule}
    for cols in tuning.WIDTHS:
        assert tuning.tile_for(kernel, cols, 2, **facts, near=True) is tuning.tile_for(kernel, cols, 2, **facts)
    streams = 3 if kernel.startswith("add") else 2
    answered = 0
    for cols in range(528, 2**16, 528):
        tile = tuning.tile_for(kernel, cols, 2, **facts, near=True)
        answered += tile is not rule
        if tile is not rule:
            assert tile.block * max(1, tile.parts) >= cols, (cols, tile)
        if tile.parts:  # rows that stream, and the weight
            held = sum(ring.blocks(cols, tile.parts, 1 if tile.rows > 1 else tile.warps))
            assert tile.programs * (streams * tile.stages * tile.rows + 1) * held * 2 <= 227 * 1024, (cols, tile)
    assert answered > 40

"""How rows are shared out: blocks that hold them, and programs that wait for none that starts after them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.op import Op
from sublight.ops import find
from sublight.ops.softmax import launch as softmax_launch

WAITING = ("softmax", "log_softmax", "online_softmax", "cross_entropy")  # parts of one row, for each other


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would be launched from now on, by the names of its arguments; nothing is."""
    found: list[dict[str, Any]] = []

    def note(self: Any, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        found.append({**dict(zip(self.arg_names, args, strict=False)), **options, "grid": grid[0]})

    monkeypatch.setattr(type(find("softmax").kernels[0].jit), "run", note)  # the compiled one or the interpreted one
    return found


def last_awaited(launch: dict[str, Any]) -> torch.Tensor:
    """For each program, the number of the last one whose part it waits for; less than 0 for none."""
    program, lag, parts = torch.arange(launch["grid"]), launch["lag"], launch["parts"]
    if "units" not in launch:  # cross_entropy counts its lag in rows
        lag = lag * parts
    return (program - lag) // parts * parts + parts - 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("cols", [100_003, 2**23])  # the second has more parts than the second pass trails by
@pytest.mark.parametrize("op", [find(name) for name in WAITING], ids=WAITING)
def test_no_program_waits_for_a_later_one(op: Op, cols: int, dtype: str, launches: list[dict[str, Any]]) -> None:
    inputs = op.inputs({"rows": 5, "cols": cols}, dtype, "meta", 0)
    results = op.launch(*inputs)
    grads = [torch.empty_like(y) for y in (results if isinstance(results, tuple) else (results,))]
    op.launch_backward(*grads, *inputs)
    waiting = [launch for launch in launches if "lag" in launch]
    assert len(waiting) >= 2  # forward and backward
    for launch in waiting:
        program = torch.arange(launch["grid"])
        assert (last_awaited(launch) <= program).all()
        assert launch["grid"] >= launch["parts"] * (5 + 1)  # all parts of all rows, and those that trail them


def test_the_check_finds_a_program_that_waits_for_a_later_one() -> None:
    awaited = last_awaited({"grid": 24, "lag": 3, "parts": 8, "units": 16})
    assert awaited[3] == 7  # for a part that a later program reduces
    assert (last_awaited({"grid": 24, "lag": 8, "parts": 8, "units": 16}) <= torch.arange(24)).all()


@pytest.mark.parametrize("cols", [2560, 5120, 8192, 12288, 32768])
def test_a_row_in_one_block_fits_it(cols: int) -> None:
    """Softmax's own kernel may split a row in two, and the table that they share says so."""
    for kernel, item in (("softmax", 2), ("softmax_backward", 4)):
        tile = softmax_launch.plan(kernel, cols, item, packed=True, capability=90)
        assert tile is None or (tile.block >= cols and not tile.tail)


def test_each_softmax_kernel_is_reached() -> None:
    shapes = find("softmax").test_shapes
    reached = {softmax_launch.plan("softmax", shape["cols"], 4, packed=False) for shape in shapes}
    assert None in reached  # trailing
    assert {tile.rows > 1 for tile in reached if tile} == {True, False}
    assert any(tile.block > softmax_launch.TILE_COLS for tile in reached if tile)

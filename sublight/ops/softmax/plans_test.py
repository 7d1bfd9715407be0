"""How rows are shared out: blocks that hold them, and programs that wait for none that starts after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend.device import PRETEND, Facts, is_interpreted
from sublight.backend.launch import WATCHERS, Step, watching
from sublight.op import Op

# CE
from sublight.ops.softmax import plans
from sublight.ops.softmax.log_softmax import LOG_SOFTMAX
from sublight.ops.softmax.online_softmax import ONLINE_SOFTMAX
from sublight.ops.softmax.softmax import SOFTMAX

WAITING = (SOFTMAX, LOG_SOFTMAX, ONLINE_SOFTMAX)  # their programs wait for other parts of their row
BY_WIDTH = (SOFTMAX, LOG_SOFTMAX)
EACH_BY_WIDTH = pytest.mark.parametrize("op", BY_WIDTH, ids=lambda op: op.name)


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are taken, but nothing is launched."""
    monkeypatch.setattr(Step, "_launch", _note)


def _note(self: Step, tensors: Any, free: Any) -> None:
    for steps in WATCHERS:
        steps.append(self)


def numbers_of(step: Step) -> dict[str, Any]:
    """The numbers of a launch by the names that its kernel has for them."""
    names = step.kernel.arg_names[len(step.on) :]
    return dict(zip(names, step.numbers, strict=False)) | {"grid": step.grid[0]}


def last_awaited(launch: dict[str, Any]) -> torch.Tensor:
    """For each program, the number of the last one whose part it waits for; less than 0 for none."""
    program, lag, parts = torch.arange(launch["grid"]), launch["lag"], launch["parts"]
    if "units" not in launch:  # cross_entropy counts its lag in rows
        lag = lag * parts
    return (program - lag) // parts * parts + parts - 1


@pytest.mark.usefixtures("unlaunched")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("cols", [100_003, 2**23])  # the second has more parts than the second pass trails by
@pytest.mark.parametrize("op", WAITING, ids=lambda op: op.name)
def test_no_program_waits_for_a_later_one(op: Op, cols: int, dtype: str) -> None:
    inputs = op.inputs({"rows": 5, "cols": cols}, dtype, "meta", 0)
    with watching() as steps:
        results = op.launch(*inputs)
        grads = [torch.empty_like(y) for y in (results if isinstance(results, tuple) else (results,))]
        op.launch_backward(*grads, *inputs)
    waiting = [numbers_of(step) for step in steps if "lag" in step.kernel.arg_names]
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
        tile = plans.tile_of(kernel, cols, item, packed=True, capability=90)
        assert tile is None or (tile.block >= cols and not tile.tail)


@pytest.fixture
def pretended() -> Iterator[None]:
    """Plans are made for an H200 that is not here."""
    token = PRETEND.set(Facts())
    yield
    PRETEND.reset(token)


def rows(*shape: int, dtype: str = "float16", device: str = "meta") -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


@pytest.mark.usefixtures("pretended")
@EACH_BY_WIDTH
def test_each_kernel_is_reached(op: Op) -> None:
    planned = {op.plan(*op.inputs(shape, "float16", "meta", 0)).kernel for shape in op.test_shapes}
    assert {kernel.name for kernel in op.kernels[:3]} <= planned


@pytest.mark.usefixtures("pretended")
@EACH_BY_WIDTH
def test_gaps_between_rows_are_skipped_and_turned_rows_are_copied(op: Op) -> None:
    whole, gapped, deep = rows(6, 4096), rows(6, 8192)[:, :4096], rows(2, 3, 8192)[..., :4096]
    for x, apart in ((whole, 4096), (gapped, 8192), (deep, 8192)):
        plan = op.plan(x)
        assert plan.copies == () and plan.grid == (6,) and plan.steps[0].numbers == (4096, apart, 4096)
        assert plan.buffers["y"].shape == tuple(x.shape)
    for x in (rows(4096, 6).T, rows(3, 2, 4096).transpose(0, 1)):  # columns apart, rows in no order
        assert op.plan(x).copies == ("x",) and op.plan(x).steps[0].numbers == (4096, 4096, 4096)
    assert op.plan(rows(4096)).grid == (1,)
    assert op.plan(rows(1, 4096).expand(5, 4096)).steps[0].numbers == (4096, 0, 4096)


@pytest.mark.usefixtures("pretended")
def test_rows_that_begin_anywhere_are_neither_packed_nor_split_into_vectors() -> None:
    assert SOFTMAX.plan(rows(6, 4096, device="cpu")).steps[0].constants["PACKED"] != is_interpreted()
    flat = rows(6 * 4096 + 1, device="cpu")[1:]
    assert flat.data_ptr() % 16 != 0
    assert not SOFTMAX.plan(flat.view(6, 4096)).steps[0].constants["PACKED"]
    odd = rows(6, 4099, device="cpu")
    assert LOG_SOFTMAX.plan(odd).steps[0].constants["VECTOR"] == 8  # 16 bytes of rows that begin anywhere
    moved = rows(6 * 4099 + 1, device="cpu")[1:].view(6, 4099)
    assert LOG_SOFTMAX.plan(moved).kernel == "_row_log_kernel"


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("cols", "dtype", "words"),
    [(4099, "float16", "odd widths"), (2**18 + 16, "float16", "wider"), (64, "float64", "no kernel of ours")],
)
def test_what_pytorch_gets(cols: int, dtype: str, words: str) -> None:
    plan = SOFTMAX.plan(rows(3, cols, dtype=dtype))
    assert plan.provider == "torch" and plan.kernel == "torch.softmax" and words in plan.reason

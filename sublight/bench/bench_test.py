"""Every row is checked, timed and set against its floor; what fails costs its own row and no other. On the CPU."""

from __future__ import annotations

import functools
import io
import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

torch = pytest.importorskip("torch")

from sublight import bench, gpus
from sublight.bench import limits_for, measure, run
from sublight.bench.case import providers
from sublight.errors import BadInput
from sublight.limits import busy
from sublight.limits import run as limits_run
from sublight.limits.run import Machine
from sublight.op import Op
from sublight.ops import find
from sublight.ops.record.library import peer
from sublight.report import bench as report
from sublight.results import Limit, Limits, Result, read_run, write_json
from sublight.timing import Thunk

CPU = Machine(kind="cpu", device="a CPU", uuid="cpu-1", driver="6.1", gpu=None)
RATES = {"host_copy": 1e10, "launch_eager": 1e-9}
LIMITS = Limits(
    device="a CPU",
    kind="cpu",
    date="2026-01-02",
    limits=tuple(Limit(name=name, unit="B/s", value=value) for name, value in RATES.items()),
)
SHAPE = "4x64"  # one thread's work
ADD, SOFTMAX = find("add"), find("softmax")
quickly = functools.partial(run, machine=CPU, limits=LIMITS, quick=True)


@pytest.fixture(autouse=True)
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here does not need caches to be cold."""
    monkeypatch.setattr(measure, "MAX_INPUT_SETS", 4)


@pytest.fixture(autouse=True)
def a_cpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on anybody's machine: the interpreter is for tests of kernels, and nothing to time."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def with_peer(call: Callable[..., Any], op: Op = SOFTMAX) -> Op:
    """The op with a peer of that name that computes this."""
    return replace(op, peers={"liger": lambda *inputs: functools.partial(call, *inputs)})


def only(rows: tuple[Result, ...], provider: str, direction: str = "fwd") -> Result:
    (row,) = (row for row in rows if (row.provider, row.direction) == (provider, direction))
    return row


# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize(
    ("op", "shape", "direction", "kernel"),
    [
        (ADD, "1000", "fwd", "aten::add"),
        (SOFTMAX, SHAPE, "fwd", "aten::_softmax"),
        (SOFTMAX, SHAPE, "bwd", "aten::_softmax_backward_data"),
        (find("rms_norm"), SHAPE, "bwd", ""),
    ],
    ids=lambda value: getattr(value, "name", value) or "any",
)
def test_a_row_has_its_time_floor_and_check(op: Op, shape: str, direction: Any, kernel: str) -> None:
    found = quickly([op], shapes=[shape], directions=[direction])
    assert [row.provider for row in found.rows] == ["sublight", "torch"]
    for row in found.rows:
        cost = op.cost(op.parse_shape(shape), "float32", direction)
        floor = LIMITS.floor(cost)
        assert row.unavailable is None, row.unavailable
        assert (row.op, row.direction, row.dtype) == (op.name, direction, "float32")
        assert row.shape == op.parse_shape(shape)
        assert floor is not None
        assert (row.floor_s, row.bound) == (floor.seconds, "memory")
        assert (row.bytes, row.flops) == (cost.bytes, cost.total_flops)
        assert row.median_s is not None and 0 < row.median_s < 1
        assert row.fraction == floor.seconds / row.median_s
        assert row.error is not None and row.error <= 2
        assert row.ours is False, "on a CPU the call goes to PyTorch, and the row must not claim otherwise"
        assert kernel in row.kernel and row.kernel.startswith("aten::")
        assert (row.n or 0) >= 3 and row.method == "wall" and row.call_s


@pytest.mark.parametrize(("against", "is_said"), [((), True), (("compile",), False)])
def test_a_run_beside_other_programs_says_so(
    monkeypatch: pytest.MonkeyPatch, against: tuple[str, ...], is_said: bool
) -> None:
    monkeypatch.setattr(busy.Watch, "share", lambda self: 0.84)
    monkeypatch.setattr(measure, "_compiled", lambda op: op.reference)
    made = quickly([SOFTMAX], shapes=[SHAPE], directions=["fwd"], against=against)
    assert ["84 % of the processors" in line for line in made.unwell] == [True] * is_said
    console = Console(width=200, file=io.StringIO())
    console.print(report.page(made))
    assert ("measured while other programs used" in console.file.getvalue()) == is_said


def test_a_run_says_where_it_comes_from_and_can_be_kept(tmp_path: Path) -> None:
    found = quickly([ADD], shapes=["1000"])
    assert (found.gpu, found.driver, found.limits, found.torch) == ("a CPU", "6.1", LIMITS, torch.__version__)
    write_json(found.to_json(), tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == found


def test_the_file_is_named_after_the_gpu_in_one_word() -> None:
    h200 = replace(CPU, device="NVIDIA H200", gpu=gpus.find("h200"))
    assert run([], machine=h200, limits=LIMITS).gpu == "h200"


def test_ours_is_what_the_profiler_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"sublight": ("_tile_kernel", "Memcpy"), "torch": ("softmax_warp_forward",)}
    order = iter(("sublight", "torch"))
    monkeypatch.setattr(measure.timing, "kernels_of", lambda *_, **__: seen[next(order)])
    found = quickly([SOFTMAX], shapes=[SHAPE], directions=["fwd"])
    assert [(row.ours, row.kernel) for row in found.rows] == [
        (True, "_tile_kernel, Memcpy"),
        (False, "softmax_warp_forward"),
    ]


def test_progress_counts_up() -> None:
    seen: list[tuple[str, int, int]] = []
    quickly([ADD], shapes=["10", "20"], progress=lambda *step: seen.append(step))
    assert seen == [
        ("add 10 fwd sublight", 0, 4),
        ("add 10 fwd torch", 1, 4),
        ("add 20 fwd sublight", 2, 4),
        ("add 20 fwd torch", 3, 4),
    ]


def test_ctrl_c_keeps_the_rows_that_are_done() -> None:
    def interrupt(_: str, done: int, __: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    try:
        found = quickly([ADD], shapes=["10", "20"], progress=interrupt)
    except KeyboardInterrupt:
        pytest.fail("the rows are lost")  # let through, it would end the tests
    assert [(row.shape["numel"], row.provider) for row in found.rows] == [
        (10, "sublight"),
        (10, "torch"),
        (20, "sublight"),
    ]
    assert all(row.median_s for row in found.rows)


# ------------------------------------------------------------------------------------------------ providers


def missing(*_: torch.Tensor) -> Thunk:
    return peer("no_such_module_anywhere", "softmax")  # type: ignore[no-any-return]


def broken(*_: torch.Tensor) -> Thunk:
    raise RuntimeError("no kernel image\nis available")


@pytest.mark.parametrize(
    ("peers", "reason"),
    [
        ({"liger": missing}, "not installed: no_such_module_anywhere"),
        ({"liger": broken}, "RuntimeError: no kernel image"),
        ({}, "NotImplementedError: liger has no softmax"),
    ],
    ids=["not installed", "broken", "not offered"],
)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_peer_that_fails_costs_its_own_row_alone(peers: Any, reason: str, direction: Any) -> None:
    op = replace(SOFTMAX, peers=peers)
    rows = quickly([op], shapes=[SHAPE], against=["liger"], directions=[direction]).rows
    row = only(rows, "liger", direction)
    assert (row.unavailable, row.median_s, row.fraction, row.error) == (reason, None, None, None)
    assert row.floor_s is not None
    assert only(rows, "sublight", direction).median_s and only(rows, "torch", direction).median_s


def test_unknown_provider_names_the_nearest() -> None:
    with pytest.raises(BadInput, match="unknown provider 'quak': did you mean quack") as error:
        quickly([ADD], against=["quak"])
    assert "\n" not in str(error.value)


def test_ours_and_pytorchs_are_always_there() -> None:
    assert providers(SOFTMAX, []) == ("sublight", "torch")
    assert providers(SOFTMAX, ["quack", "torch", "compile"]) == ("sublight", "torch", "compile", "quack")
    assert providers(ADD, ["liger"]) == ("sublight", "torch", "liger")  # whose row says that it has no add


def test_a_ladder_is_timed_step_by_step() -> None:
    steps = dict.fromkeys(("naive", "tiled"), SOFTMAX.best)
    op = replace(SOFTMAX, providers=steps)
    assert providers(op, ["ladder"]) == ("sublight", "naive", "tiled", "torch")
    assert providers(op, ["tiled"]) == ("sublight", "tiled", "torch")


def test_each_peer_is_asked_for_by_name() -> None:
    asked: list[str] = []

    def noting(name: str) -> Callable[..., Thunk]:
        return lambda x: asked.append(name) or functools.partial(torch.softmax, x, -1)  # type: ignore[func-returns-value]

    op = replace(SOFTMAX, peers={name: noting(name) for name in ("liger", "quack")})
    rows = quickly([op], shapes=[SHAPE], against=["quack"], directions=["fwd"]).rows
    assert set(asked) == {"quack"}
    assert only(rows, "quack").error == 1


# ------------------------------------------------------------------------------------------------ wrong answers


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return y * dy  # what should be subtracted is not


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: torch.softmax(x, -1) * 1.001,
        lambda x: torch.softmax(x, 0),
        lambda x: torch.cat((torch.softmax(x[:-1], -1), torch.zeros_like(x[-1:]))),
    ],
    ids=["scaled", "other dimension", "last row skipped"],
)
def test_a_wrong_answer_is_timed_and_marked(wrong: Callable[..., Any]) -> None:
    rows = quickly([with_peer(wrong)], shapes=[SHAPE], against=["liger"], directions=["fwd"]).rows
    row = only(rows, "liger")
    assert row.median_s and row.error is not None and row.error > 2
    assert only(rows, "torch").error == 1


def test_a_wrong_gradient_is_marked_where_the_values_are_right() -> None:
    rows = quickly([with_peer(WrongGradient.apply)], shapes=[SHAPE], against=["liger"]).rows
    assert only(rows, "liger", "fwd").error == 1
    assert (only(rows, "liger", "bwd").error or 0) > 2
    assert only(rows, "torch", "bwd").error == 1


def test_the_wrong_data_type_is_no_answer() -> None:
    op = with_peer(lambda x: torch.softmax(x.double(), -1))
    row = only(quickly([op], shapes=[SHAPE], against=["liger"], directions=["fwd"]).rows, "liger")
    assert row.median_s is None
    assert (row.unavailable or "").startswith("ValueError: output 0: torch.float64")


def test_a_run_with_a_nan_can_be_kept(tmp_path: Path) -> None:
    """A ratio to PyTorch's error is then infinite, which JSON has no word for; the other rows must not be lost."""
    op = with_peer(lambda x: torch.softmax(x, -1) * math.nan)
    found = quickly([op], shapes=[SHAPE], against=["liger"], directions=["fwd"])
    assert (only(found.rows, "liger").error or 0) > 2
    write_json(found.to_json(), tmp_path / "run.json")
    again = read_run(tmp_path / "run.json")
    assert (only(again.rows, "liger").error or 0) > 2


# ------------------------------------------------------------------------------------------------ the run


def test_commit_without_git_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", gone)
    assert bench.commit() == "unknown"


# ------------------------------------------------------------------------------------------------ limits


class Measuring:
    """Stands in for the measurement: notes what was asked for, finds it, and keeps it as the real one does."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.asked: list[list[str]] = []
        self.keeps = keeps

    def __call__(self, *, kind: str, quick: bool, only: Any, progress: Any) -> Limits:
        assert (kind, quick) == ("cpu", True)
        self.asked.append(list(only))
        found = replace(LIMITS, limits=tuple(limit for limit in LIMITS.limits if limit.name in only))
        if self.keeps:
            limits_run._keep(found, CPU.cache_path)
        return found


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measuring:
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path))
    stub = Measuring()
    monkeypatch.setattr(limits_run, "run", stub)
    return stub


def test_limits_come_from_the_cache_and_say_so(measuring: Measuring) -> None:
    write_json(LIMITS.to_json(), CPU.cache_path)
    found = limits_for(CPU)
    assert measuring.asked == []
    assert found == replace(LIMITS, source="cached, last measured 2026-01-02")


def test_only_what_is_missing_is_measured_and_kept(measuring: Measuring) -> None:
    other = Limit(name="disk_read", unit="B/s", value=1e9)
    write_json(replace(LIMITS, limits=(LIMITS.limits[0], other)).to_json(), CPU.cache_path)
    found = limits_for(CPU)
    assert measuring.asked == [["launch_eager"]]
    assert {limit.name: limit.value for limit in found.limits} == {**RATES, "disk_read": 1e9}
    assert found.source.startswith("measured")
    assert limits_for(CPU).source.startswith("cached")
    assert len(measuring.asked) == 1


def test_a_limit_that_could_not_be_measured_is_tried_again(measuring: Measuring) -> None:
    failed = Limit(name="host_copy", unit="B/s", unavailable="out of memory")
    write_json(replace(LIMITS, limits=(failed, LIMITS.limits[1])).to_json(), CPU.cache_path)
    assert limits_for(CPU).value("host_copy") == RATES["host_copy"]
    assert measuring.asked == [["host_copy"]]


def test_a_cache_that_cannot_be_written_costs_no_second_measurement(measuring: Measuring) -> None:
    measuring.keeps = False
    found = limits_for(CPU)
    assert {limit.name: limit.value for limit in found.limits} == RATES
    assert measuring.asked == [list(RATES)]


def test_a_cache_that_cannot_be_written_does_not_hide_what_was_measured(measuring: Measuring) -> None:
    """An old file in a folder that has become read-only is still read."""
    write_json(replace(LIMITS, limits=LIMITS.limits[:1]).to_json(), CPU.cache_path)
    measuring.keeps = False
    assert {limit.name: limit.value for limit in limits_for(CPU).limits} == RATES


def test_every_needed_limit_has_a_probe() -> None:
    from sublight.limits import LIMITS as PROBES

    for kind, names in bench.NEEDED.items():
        known = {name for probe in PROBES if kind in probe.kinds for name in probe.names}
        assert set(names) <= known


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_on_a_gpu_our_kernels_run_and_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path))
    machine = limits_run.this_machine("cuda")
    found = run([SOFTMAX], machine=machine, limits=limits_for(machine), shapes=["8192x4096"], quick=True)
    for direction in ("fwd", "bwd"):
        row = only(found.rows, "sublight", direction)
        assert row.unavailable is None, row.unavailable
        assert row.ours and "_row" in row.kernel
        assert row.method == "graph"
        assert row.error is not None and row.error <= 2
        assert row.fraction is not None and 0.3 < row.fraction <= 1.02
        assert not only(found.rows, "torch", direction).ours

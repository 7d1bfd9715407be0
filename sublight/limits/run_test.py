"""A run of the probes: what is kept, merged and marked, and what a damaged or read-only cache costs (nothing)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublight import gpus, nvml
from sublight.cli import output as cli_output
from sublight.errors import BadInput
from sublight.folder import cache_folder
from sublight.health.record import Clocks, GpuState
from sublight.limits import run as run_module
from sublight.limits.probe import Context, Kind, Probe
from sublight.limits.run import Machine, better_before, cached, run, this_machine
from sublight.results import UNWELL, Limit, Limits

CPU: tuple[Kind, ...] = ("cpu",)


def fake(
    name: str, values: dict[str, float], *, then: BaseException | None = None, missing: str = "", kinds: object = CPU
) -> Probe:
    """A probe that finds `values`, and then raises instead of finding `missing`."""

    def measure(context: Context) -> Iterator[Limit]:
        for limit, value in values.items():
            yield Limit(name=limit, unit="B/s", value=value, n=3, detail={"quick": context.quick})
        if then is not None:
            raise then

    names = (*values, *missing.split())
    return Probe(name=name, names=names, kinds=kinds, measure=measure)  # type: ignore[arg-type]


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path / "cache"))
    return lambda *chosen: monkeypatch.setattr(run_module, "LIMITS", chosen)


def values(limits: Limits | None) -> dict[str, float | None]:
    assert limits is not None
    return {limit.name: limit.value for limit in limits.limits}


def here() -> Machine:
    return this_machine("cpu")


def test_results_are_cached_and_say_so(probes: Callable[..., None]) -> None:
    probes(fake("host memory", {"host_copy": 4e10, "host_read": 3e10}))
    assert cached(here()) is None
    measured = run(kind="cpu", quick=True)
    again = cached(here())
    assert again is not None
    assert measured.source == "measured" and measured.device == here().device and measured.kind == "cpu"
    assert again.source == f"cached, last measured {measured.date}"
    assert again.limits == measured.limits
    assert again.limits[0].detail["quick"] is True and again.limits[0].verdict.startswith("unjudged: ")
    assert here().cache_path.parent == cache_folder() / "limits"
    assert [path.name for path in here().cache_path.parent.iterdir()] == [here().cache_path.name]


def test_what_was_better_before_and_stays_is_named(probes: Callable[..., None]) -> None:
    probes(fake("host memory", {"host_copy": 4.0, "host_read": 3.0}))
    assert better_before(run(kind="cpu")) == []
    probes(fake("host memory", {"host_copy": 5.0, "host_read": 2.0}))
    (better,) = better_before(run(kind="cpu", quick=True))
    assert (better.name, better.value) == ("host_read", 3.0)
    probes(fake("disk", {"disk_read": 2.0}))
    assert better_before(run(kind="cpu", quick=True)) == [], "what was not measured is no worse"


@pytest.mark.parametrize("only", ["disk_read", "disk"])
def test_only_measures_that_and_merges(probes: Callable[..., None], only: str) -> None:
    memory = fake("host memory", {"host_copy": 1.0})
    probes(memory, fake("disk", {"disk_read": 2.0}))
    run(kind="cpu")
    probes(memory, fake("disk", {"disk_read": 3.0}))
    part = run(kind="cpu", only=[only])
    assert values(part) == {"disk_read": 3.0}
    assert values(cached(here())) == {"host_copy": 1.0, "disk_read": 3.0}


def test_only_takes_what_the_names_begin_with(probes: Callable[..., None]) -> None:
    probes(fake("what the table does not show", {"host_copy": 1.0}), fake("disk", {"disk_read": 2.0}))
    assert values(run(kind="cpu", only=["host"])) == {"host_copy": 1.0}


def test_what_cannot_be_measured_now_leaves_what_was(probes: Callable[..., None]) -> None:
    probes(fake("disk", {"disk_read": 2.0}))
    run(kind="cpu")
    probes(fake("disk", {}, then=OSError("gone"), missing="disk_read"))
    assert values(run(kind="cpu")) == {"disk_read": None}
    assert values(cached(here())) == {"disk_read": 2.0}


def test_interrupt_keeps_what_was_measured(probes: Callable[..., None]) -> None:
    interrupted = fake("disk", {"disk_write": 2.0}, then=KeyboardInterrupt(), missing="disk_read")
    probes(fake("host memory", {"host_copy": 1.0}), interrupted, fake("last", {"last": 9.0}))
    limits = run(kind="cpu")
    assert values(limits) == {"host_copy": 1.0, "disk_write": 2.0}
    assert limits.source == "measured in part: interrupted after 2 of 4"
    assert values(cached(here())) == {"host_copy": 1.0, "disk_write": 2.0}


@pytest.mark.parametrize(
    "content",
    [b"", b'{"device": "x", "limits"', b"[1, 2]", b'{"limits": 3}', b'{"limits": [{"name": 1}]}', b"\xff\xfe\x00"],
    ids=["empty", "cut off", "a list", "no rows", "no unit", "no text"],
)
def test_corrupt_cache_is_set_aside_and_measured_again(probes: Callable[..., None], content: bytes) -> None:
    path = here().cache_path
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert cached(here()) is None
    aside = [other for other in path.parent.iterdir() if other != path]
    assert not path.exists() and [other.read_bytes() for other in aside] == [content]
    assert aside[0].name.startswith(f"{path.name}.corrupt-")
    probes(fake("disk", {"disk_read": 2.0}))
    run(kind="cpu")
    assert values(cached(here())) == {"disk_read": 2.0}


def test_corrupt_cache_does_not_cost_a_measurement(probes: Callable[..., None]) -> None:
    path = here().cache_path
    path.parent.mkdir(parents=True)
    path.write_text("{")
    probes(fake("disk", {"disk_read": 2.0}))
    assert values(run(kind="cpu")) == values(cached(here())) == {"disk_read": 2.0}


def test_corrupt_cache_that_cannot_be_moved_does_not_cost_the_measurement(
    probes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = here().cache_path
    path.parent.mkdir(parents=True)
    path.write_text("{")
    monkeypatch.setattr(Path, "rename", refuse)
    probes(fake("disk", {"disk_read": 2.0}))
    assert cached(here()) is None
    assert values(run(kind="cpu")) == {"disk_read": 2.0}


def test_a_cache_that_cannot_be_written_does_not_cost_the_measurement(
    probes: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    monkeypatch.setenv("SUBLIGHT_CACHE", str(blocker / "cache"))
    probes(fake("disk", {"disk_read": 2.0}))
    assert values(run(kind="cpu")) == {"disk_read": 2.0}
    assert cached(here()) is None
    assert blocker.read_text() == "not a folder"


@pytest.mark.parametrize(("asked", "meant"), [("host_cpy", "host_copy"), ("dsik_read", "disk_read"), ("dis", "disk")])
def test_unknown_limit_names_the_nearest(probes: Callable[..., None], asked: str, meant: str) -> None:
    def never(_: Context) -> Iterator[Limit]:
        raise AssertionError("measured although a name was wrong")

    families = (("host memory", "host_copy"), ("disk", "disk_read"))
    probes(*(Probe(name=family, names=(limit,), kinds=CPU, measure=never) for family, limit in families))
    with pytest.raises(BadInput, match=f"unknown limit '{asked}'") as error:
        run(kind="cpu", only=["host_copy", asked])
    message = str(error.value)
    assert f"did you mean {meant}" in message and "\n" not in message
    assert not here().cache_path.exists()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("out of luck\nin many lines"), "out of luck"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (ImportError("No module named 'torch'"), "No module named 'torch'"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_probe_that_fails_says_why_in_its_place(
    probes: Callable[..., None], error: BaseException, reason: str
) -> None:
    probes(fake("first", {"a": 1.0}, then=error, missing="b c"), fake("second", {"d": 4.0}))
    limits = run(kind="cpu")
    assert values(limits) == {"a": 1.0, "b": None, "c": None, "d": 4.0}
    assert [limit.unavailable for limit in limits.limits] == [None, reason, reason, None]
    assert {name: value for name, value in values(cached(here())).items() if value} == {"a": 1.0, "d": 4.0}


def test_probes_for_another_device_are_left_out(probes: Callable[..., None]) -> None:
    probes(fake("device memory", {"hbm_copy": 1.0}, kinds=("cuda",)), fake("disk", {"disk_read": 2.0}))
    assert values(run(kind="cpu")) == {"disk_read": 2.0}
    with pytest.raises(BadInput, match="unknown limit 'hbm_copy' on this device"):
        run(kind="cpu", only=["hbm_copy"])


def test_progress_counts_up(probes: Callable[..., None]) -> None:
    probes(fake("disk", {"disk_write": 1.0, "disk_read": 2.0}), fake("last", {"last": 3.0}))
    seen: list[tuple[str, int, int]] = []
    run(kind="cpu", progress=lambda *step: seen.append(step))
    assert seen == [("disk", 0, 3), ("disk_write", 1, 3), ("disk_read", 2, 3), ("last", 2, 3), ("last", 3, 3)]


def test_no_gpu_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "detect", lambda: None)
    with pytest.raises(BadInput, match="no GPU") as error:
        this_machine("cuda")
    assert "--device cpu" in str(error.value)
    assert this_machine().kind == "cpu"


def test_on_a_gpu_figures_are_judged_and_cached_by_device_and_driver(
    probes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "check_room", lambda machine: None)
    health = nvml.Health(uuid="GPU-1/2", driver="570.1")
    throttled = GpuState(
        index=0, name="NVIDIA H200", clocks=Clocks(sm_clock_hz=1.98e9, slowed_by=("hardware thermal",))
    )
    gpu = gpus.find("h200")
    monkeypatch.setattr(gpus, "detect", lambda: gpu)
    monkeypatch.setattr(nvml, "health", lambda: health)
    monkeypatch.setattr(run_module, "this_gpu", lambda: throttled)
    reached = gpu.reached["hbm_copy"]
    probes(fake("device memory", {"hbm_copy": reached, "hbm_read": reached / 2}, kinds=("cuda",)))
    limits = run()
    assert limits.device == gpu.name and limits.uuid == "GPU-1/2" and limits.driver == "570.1"
    assert [limit.verdict for limit in limits.limits] == [
        "normal",
        "low: throttled (hardware thermal) to 1.98 GHz",
    ]
    assert [limit.detail[UNWELL] for limit in limits.limits] == [["throttled (hardware thermal) to 1.98 GHz"]] * 2
    assert this_machine().cache_path.name == "GPU-1-2-570.1.json"
    assert values(cached(this_machine())) == values(limits)


@pytest.mark.parametrize(("found", "kind"), [(None, ""), ("cuda", ""), ("xpu", "xpu")])
def test_an_accelerator_that_is_not_measured_is_named(
    found: str | None, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    device = torch.device(found) if found else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    assert run_module.passed_over() == kind
    cli_output.say_what_is_passed_over("")
    assert capsys.readouterr().err == (
        "sublight: torch finds an xpu here, which is not measured yet: the CPU is\n" if kind else ""
    )
    cli_output.say_what_is_passed_over("cpu")  # who asks for the CPU need not be told
    assert capsys.readouterr().err == ""


def test_a_full_gpu_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 150 * 10**9))
    machine = Machine(kind="cuda", device="H200", uuid="x", driver="1", gpu=None)
    with pytest.raises(BadInput, match=r"only 1.00 GB of the GPU's 150 GB are free"):
        run_module.check_room(machine)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (140 * 10**9, 150 * 10**9))
    run_module.check_room(machine)

"""The check finds exactly the fault that was planted, and says nothing of a machine that is well."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pynvml")

from sublight.health import check, fakes, host, processes, read, xids
from sublight.health.record import Pressure, Snapshot, Unavailable, Versions, known, leaves

WELL: dict[str, Any] = {}
ECC, STATE = "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetNvLinkState"
FAULTS: list[tuple[dict[str, Any], str, str]] = [  # change of the driver's answers, kind, a part of the line
    ({"nvmlDeviceGetCurrentClocksThrottleReasons": 0x40}, "throttled", "hardware thermal) to 1.76 GHz at 61 °C, slow"),
    ({"nvmlDeviceGetCurrentClocksThrottleReasons": 0x81}, "throttled", "throttled (power brake)"),
    ({"nvmlDeviceGetCurrPcieLinkWidth": 8}, "link", "PCIe 5.0 x8, not PCIe 5.0 x16"),
    ({"nvmlDeviceGetCurrPcieLinkGeneration": 3}, "link", "PCIe 3.0 x16, not PCIe 5.0 x16"),
    ({"nvmlDeviceGetRemappedRows": [0, 1, 1, 0]}, "pages", "wait to be remapped; reset the GPU"),
    ({"nvmlDeviceGetRemappedRows": [0, 1, 1, 1]}, "pages", "could not be remapped; have the card replaced"),
    ({"nvmlDeviceGetRetiredPagesPendingStatus": 1}, "pages", "pages wait to be retired"),
    ({f"{ECC} 1 0": 3}, "ecc", "3 uncorrected ECC errors"),
    ({"nvmlDeviceGetEnforcedPowerLimit": 350_000}, "power-limit", "350 W, not 700 W"),
    ({f"{STATE} 4": 0}, "nvlink", "17 of 18 NVLinks are up"),
    ({"nvmlDeviceGetComputeRunningProcesses": [fakes.process(-7, 5 * 10**9)]}, "shared", "another process on it (-7;"),
    ({"nvmlDeviceGetTemperature 0": {"error": 15}}, "lost", "the GPU is lost"),
    ({"nvmlDeviceGetPowerUsage": {"error": 16}}, "lost", "the GPU needs a reset"),
]  # fmt: skip
NO_FAULTS: list[dict[str, Any]] = [
    WELL,
    {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x1},  # idle
    {"nvmlDeviceGetCurrPcieLinkGeneration": 1, "nvmlDeviceGetPerformanceState": 8},  # an idle GPU lowers it itself
    {"nvmlDeviceGetComputeRunningProcesses": [fakes.process(os.getpid(), 7)]},
    {f"{STATE} {link}": 0 for link in range(18)},  # alone in its machine
    {"nvmlDeviceGetRemappedRows": [2, 1, 0, 0]},  # remapped and done
    {"nvmlDeviceGetEnforcedPowerLimit": 690_000},
    {f"{ECC} 0 0": 12},  # corrected
    {"nvmlDeviceGetCurrPcieLinkWidth": {"error": 3}},
    {"nvmlDeviceGetComputeRunningProcesses": {"error": 4}},
    {"nvmlDeviceGetCurrentClocksThrottleReasons": {"error": 3}},
]


@pytest.fixture(autouse=True)
def no_kernel_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This machine's own log has no say."""
    log = tmp_path / "kmsg"
    log.write_text("")
    monkeypatch.setattr(xids, "KERNEL_LOG", log)
    monkeypatch.setattr(check, "of_host", lambda _: ())
    monkeypatch.setattr(read, "with_torch", lambda versions: versions)
    return log


def snapshot(*gpus: dict[str, Any], looks: int = 1, system: dict[str, Any] | None = None) -> Snapshot:
    reader = read.Reader(nvml=fakes.by_hand(*gpus, system=system), sleep=lambda _: None)
    return [reader.read() for _ in range(looks)][-1]


def wrong(state: Snapshot) -> list[check.Problem]:
    return [problem for problem in check.problems(state) if problem.weight == "wrong"]


@pytest.mark.parametrize(("change", "kind", "part"), FAULTS, ids=[kind for _, kind, _ in FAULTS])
def test_exactly_the_planted_fault_is_found(change: dict[str, Any], kind: str, part: str) -> None:
    found = wrong(snapshot(change))
    assert [problem.kind for problem in found] == [kind]
    assert part in found[0].line and found[0].line.startswith("GPU 0: ") and "\n" not in found[0].line


@pytest.mark.parametrize("change", NO_FAULTS, ids=[str(at) for at in range(len(NO_FAULTS))])
def test_a_well_gpu_has_no_fault(change: dict[str, Any]) -> None:
    assert check.problems(snapshot(change)) == ()


@pytest.mark.parametrize(("bits", "kind"), [(0x4, "power-cap"), (0x2, "clocks")])
def test_what_only_explains_a_figure_is_not_wrong(bits: int, kind: str) -> None:
    found = check.problems(snapshot({"nvmlDeviceGetCurrentClocksThrottleReasons": bits}))
    assert [(problem.kind, problem.weight) for problem in found] == [(kind, "worth knowing")]


def test_of_two_gpus_the_one_with_the_fault_is_named() -> None:
    state = snapshot(WELL, {"nvmlDeviceGetCurrPcieLinkWidth": 4})
    assert [gpu.index for gpu in state.gpus] == [0, 1]
    assert [problem.line.split(":")[0] for problem in wrong(state)] == ["GPU 1"]


def test_a_gpu_lost_in_the_middle_keeps_its_name_and_says_only_that() -> None:
    """Every question fails from then on, as the driver does it."""
    gone = {name: fakes.InTurn((answer, answer, {"error": 15})) for name, answer in fakes.answers().items()}
    gone |= {"nvmlDeviceGetUUID": fakes.InTurn(("GPU-0", "GPU-0", {"error": 15}))}
    before, after = snapshot(gone), snapshot(gone, looks=3)
    assert wrong(before) == [] and [problem.kind for problem in wrong(after)] == ["lost"]
    gpu = after.gpus[0]
    assert (gpu.name, gpu.uuid) == ("NVIDIA H200", "GPU-0")
    assert gpu.power.power_w == Unavailable("the GPU is lost") and gpu.processes == Unavailable("the GPU is lost")


def test_a_gpu_that_was_lost_before_is_named_and_hides_no_other() -> None:
    gone = {name: {"error": 15} for name in fakes.answers()}
    unreached = fakes.by_hand(WELL, WELL, WELL)
    for at, error in ((1, 15), (2, 4)):  # what NVML answers for one that fell off the bus, and for one not to be seen
        unreached._answers[f"nvmlDeviceGetHandleByIndex [{at}]"][0] = {"error": error}
    for nvml, indices in ((fakes.by_hand(WELL, gone), [0, 1]), (unreached, [0, 1])):
        state = read.Reader(nvml=nvml, sleep=lambda _: None).read()
        assert [gpu.index for gpu in state.gpus] == indices and not state.gpus[0].lost
        assert [problem.line.split(";")[0] for problem in wrong(state)] == ["GPU 1: the GPU is lost"]


@pytest.mark.parametrize("error", [2, 4, 15, 999])
def test_a_driver_that_gives_no_answer_is_not_well(error: int) -> None:
    state = snapshot(WELL, system={"nvmlInit": {"error": error}})
    assert state.gpus == () and [problem.kind for problem in wrong(state)] == ["driver"]


def test_memory_that_the_driver_does_not_tell_is_no_zero() -> None:
    for sizes, words in (
        ((None,), "on it (1000000000)"),
        ((None, 2 * 10**9), "at least 2.00 GB)"),
        ((10**9,), "; 1.00 GB)"),
    ):
        running = [fakes.process(10**9 + at, size) for at, size in enumerate(sizes)]
        (problem,) = wrong(snapshot({"nvmlDeviceGetComputeRunningProcesses": running}))
        assert words in problem.line, problem.line


def test_what_the_driver_does_not_support_is_unavailable_and_never_zero() -> None:
    nothing = {name: {"error": 3} for name in fakes.answers() if name not in ("nvmlDeviceGetUUID", "nvmlDeviceGetName")}
    state = snapshot(nothing, system={'nvmlGpmMetricsGet "metrics"': {"error": 3}})
    values = dict(leaves(state.gpus[0]))
    given = {name for name, value in values.items() if not isinstance(value, Unavailable)}
    assert given == {"index", "name", "uuid", "vendor", "lost", "xids_from"}
    assert wrong(state) == []


def test_mig_shows_its_parts() -> None:
    name = "nvmlDeviceGetMigDeviceHandleByIndex"
    parts = {
        "nvmlDeviceGetMigMode": [1, 1],
        "nvmlDeviceGetMaxMigDeviceCount": 7,
        f"{name} 0": {"handle": "GPU 1"},  # the answers of a second GPU serve as the part's
        "nvmlDeviceGetUtilizationRates": {"error": 3},  # as under MIG
    }
    second = {"nvmlDeviceGetMemoryInfo": {"fields": {"total": 18 * 10**9, "used": 10**9}}}
    gpu = snapshot(parts, second).gpus[0]
    assert gpu.is_mig is True
    assert [(part.mig_uuid, part.mig_used_bytes) for part in gpu.instances] == [("GPU-00000001-hand-made", 10**9)]
    assert isinstance(gpu.activity.gpu_share, Unavailable) and gpu.activity.engine_share == 0.97


def test_before_hopper_there_is_no_gpm_and_it_says_so() -> None:
    gpu = snapshot({"nvmlGpmQueryDeviceSupport": {"fields": {"isSupportedDevice": 0}}}).gpus[0]
    assert gpu.activity.gpu_share == 0.98
    assert snapshot(WELL).gpus[0].activity.nvlink_sent_bytes_per_s == Unavailable("not supported by this GPU or driver")
    assert gpu.activity.sm_share == Unavailable("needs GPM, which begins with Hopper")


@pytest.mark.parametrize(
    ("driver", "needed", "kinds"),
    [("12.8", "12.8", []), ("12.4", "12.8", []), ("13.0", "12.8", []), ("11.8", "12.8", ["driver"])],
)
def test_a_driver_older_than_torchs_cuda(driver: str, needed: str, kinds: list[str]) -> None:
    versions = Versions(driver="1", driver_cuda=driver, torch="2.11", torch_cuda=needed)
    assert [problem.kind for problem in check.of_versions(versions)] == kinds


def test_versions_that_are_not_known_are_no_problem() -> None:
    assert check.of_versions(Versions(driver_cuda="11.8", torch_cuda=Unavailable("torch is built for CPUs"))) == ()


def test_a_driver_that_was_renewed_without_a_reboot_is_said_so() -> None:
    state = snapshot(WELL, system={"nvmlInit": {"error": 18}})
    assert state.gpus == () and [problem.kind for problem in wrong(state)] == ["driver"]
    assert "different versions; reboot" in wrong(state)[0].line
    assert wrong(snapshot(WELL, system={"nvmlInit": {"error": 12}})) == []  # no driver at all is no fault


@pytest.mark.parametrize(("number", "weight"), [(79, "wrong"), (31, "worth knowing"), (143, "wrong")])
def test_xids_of_the_kernel_log(no_kernel_log: Path, number: int, weight: str) -> None:
    at = int((time.monotonic() - 600) * 1e6)
    line = f"4,1,{max(at, 1)},-;NVRM: Xid (PCI:0000:17:00): {number}, pid=3, something\n"
    no_kernel_log.write_text(
        "6,1,2,-;usb 1-1: new device\n" + line + line.replace(":17:", ":99:").replace(f": {number}", ": 48")
    )
    found = check.problems(snapshot(WELL))
    assert [(problem.kind, problem.weight) for problem in found] == [("xid", weight)]
    assert f"XID {number}: " in found[0].line and found[0].line.endswith(" ago")
    assert check.wrong_with(snapshot(WELL).gpus[0]) == []  # long ago: no mark on a figure that is taken now


def test_xids_of_events_where_the_kernel_log_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xids, "in_kernel_log", lambda: Unavailable("the kernel log needs root"))
    event = {"fields": {"device": "GPU 0", "eventData": 74}}
    events = {"nvmlEventSetWait_v2": fakes.InTurn((event, {"error": 10}))}
    state = snapshot(WELL, system=events)
    assert [problem.line for problem in wrong(state)] == ["GPU 0: XID 74: NVLink error"]
    assert state.gpus[0].xids_from == "NVML's events since this began; the kernel log needs root"
    neither = snapshot(WELL, system={"nvmlEventSetCreate": {"error": 3}}).gpus[0]
    assert isinstance(neither.xids, Unavailable) and "needs root; no events from NVML" in neither.xids.reason


def test_inside_a_container_one_unseen_process_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [fakes.process(-1, 10**9), fakes.process(-2, 5 * 10**9)]
    gpu = snapshot({"nvmlDeviceGetComputeRunningProcesses": two}).gpus[0]
    monkeypatch.setattr(check, "_uses_cuda", lambda: True)
    assert [process.pid for process in check.others(gpu)] == [-1]
    monkeypatch.setattr(check, "_uses_cuda", lambda: False)
    assert {process.pid for process in check.others(gpu)} == {-1, -2}


def test_a_process_is_shown_with_its_command_and_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "77").mkdir()
    (tmp_path / "77/cmdline").write_bytes(b"/usr/bin/python\0train.py\0--lr\0" + b"3\0")
    (tmp_path / "77/cgroup").write_text(f"0::/system.slice/docker-{'ab' * 32}.scope\n")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    running = {"nvmlDeviceGetComputeRunningProcesses": [fakes.process(77, None)]}
    (process,) = known(snapshot(running).gpus[0].processes) or ()
    assert (process.command, process.container) == ("/usr/bin/python train.py --lr 3", "docker abababababab")
    assert process.used_bytes == Unavailable("the driver does not tell")


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, []),
        ({"host_memory_available_bytes": 2 * 10**9}, ["memory"]),
        ({"disk_free_bytes": 10**9}, ["disk"]),
        ({"pressure": Pressure(memory_some_share=0.6)}, ["pressure"]),
        ({"pressure": Pressure(cpu_some_share=1.0)}, []),  # a machine that works is well
        ({"disk_free_bytes": Unavailable("gone"), "pressure": Pressure()}, []),
    ],
)
def test_the_host(change: dict[str, Any], kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    well = {
        "host_memory_total_bytes": 100 * 10**9,
        "host_memory_available_bytes": 50 * 10**9,
        "disk_total_bytes": 10**12,
        "disk_free_bytes": 10**11,
    }
    assert [problem.kind for problem in check.of_host(host.Host(**(well | change)))] == kinds


def test_what_a_recorder_wrote_replays_alike(tmp_path: Path) -> None:
    """Through the recorder, a file and the replay, every look is what it was."""
    changing = {"nvmlDeviceGetPowerUsage": fakes.InTurn((100_000, 200_000, 300_000))}
    recorder = fakes.Recorder(fakes.by_hand(changing, WELL))
    result = read.Reader(nvml=recorder, sleep=lambda _: None)
    first = [result.read().gpus for _ in range(3)]
    assert [gpus[0].power.power_w for gpus in first] == [100.0, 200.0, 300.0]
    recorder.write(tmp_path / "driver.json", "by hand")
    text = (tmp_path / "driver.json").read_text()
    assert json.loads(text)["source"] == "by hand" and "hand-made" not in text  # which machine it was is left out
    again = read.Reader(nvml=fakes.Replay.of(tmp_path / "driver.json"), sleep=lambda _: None)
    second = [again.read().gpus for _ in range(3)]
    strip = lambda looks: [[(gpu.power, gpu.activity, gpu.errors, gpu.link) for gpu in gpus] for gpus in looks]  # noqa: E731
    assert strip(second) == strip(first)


def test_faults_planted_in_the_recorded_h200_are_found() -> None:
    """Whose driver answers in its own way: what it does not support, which links it has, what it calls a handle."""
    links = {f"{STATE} {link}": 1 for link in range(18)}
    for change, kind, _ in [(WELL, "", ""), *FAULTS]:
        driver = fakes.recorded(links | change if kind == "nvlink" else change)
        found = wrong(read.Reader(nvml=driver, sleep=lambda _: None).read())
        assert [problem.kind for problem in found] == ([kind] if kind else []), change


def test_the_recorded_h200_is_well_and_its_load_shows() -> None:
    reader = read.Reader(nvml=fakes.Replay.of(fakes.RECORDED), sleep=lambda _: None)
    looks = [reader.read() for _ in range(6)]
    kinds = {problem.kind for each in looks for problem in wrong(each)}
    assert kinds <= {"shared"}  # the recorder itself was on it
    shares = [known(each.gpus[0].activity.tensor_share) for each in looks]
    assert (shares[0] or 0) < 0.01 and (shares[-1] or 0) > 0.5


def test_psutil_and_proc_agree_in_what_they_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of psutil, whose counters grow by known amounts in two seconds."""
    ticks = iter((0.0, 2.0))
    growing = iter((0, 1))

    class Times(tuple[float, ...]):
        idle = property(lambda self: self[1])

    def link(size: int) -> SimpleNamespace:
        return SimpleNamespace(bytes_recv=size, bytes_sent=2 * size)

    state = {"at": 0}

    def times() -> Times:
        state["at"] = next(growing)
        return Times((10.0 + 3 * state["at"], 50.0 + state["at"]))

    psutil = SimpleNamespace(
        cpu_times=times,
        disk_io_counters=lambda: SimpleNamespace(read_bytes=4_000 * state["at"], write_bytes=8_000 * state["at"]),
        net_io_counters=lambda pernic: {"lo0": link(10**9 * state["at"]), "en0": link(6_000 * state["at"])},
        virtual_memory=lambda: SimpleNamespace(total=8 * 10**9, available=3 * 10**9),
        swap_memory=lambda: SimpleNamespace(used=5),
    )
    machine = host.Reader(psutil=psutil, clock=lambda: next(ticks)).read()
    assert machine.cpu_share == 0.75
    assert (machine.disk_read_bytes_per_s, machine.disk_write_bytes_per_s) == (2_000, 4_000)
    assert (machine.net_received_bytes_per_s, machine.net_sent_bytes_per_s) == (3_000, 6_000)
    assert (machine.host_memory_total_bytes, machine.swap_used_bytes) == (8 * 10**9, 5)


def test_the_recorder_takes_what_nvml_really_gives() -> None:
    """Structures, arrays, unions and handles of ctypes, as pynvml hands them out."""
    import ctypes

    import pynvml

    device = ctypes.cast(4096, pynvml.c_nvmlDevice_t)
    rates = pynvml.c_nvmlUtilization_t(gpu=98, memory=41)
    field = (pynvml.c_nvmlFieldValue_t * 1)()
    field[0].value.uiVal = 74
    driver = SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetHandleByIndex=lambda at: device,
        nvmlDeviceGetUtilizationRates=lambda handle: rates,
        nvmlDeviceGetFieldValues=lambda handle, numbers: field,
    )
    recorder = fakes.Recorder(driver)
    handle = recorder.nvmlDeviceGetHandleByIndex(0)
    recorder.nvmlDeviceGetUtilizationRates(handle)
    recorder.nvmlDeviceGetFieldValues(ctypes.cast(4096, pynvml.c_nvmlDevice_t), [82])  # another object, the same GPU
    replay = fakes.Replay(json.loads(json.dumps(recorder.calls)))
    handle = replay.nvmlDeviceGetHandleByIndex(0)
    assert replay.nvmlDeviceGetUtilizationRates(handle).gpu == 98
    assert replay.nvmlDeviceGetFieldValues(handle, [82])[0].value.uiVal == 74


def test_counters_that_stand_still_or_fall() -> None:
    """The time that a core waits for a disk may be counted down again."""
    before = host._Counters(at_s=0, busy_s=5, idle_s=5, read_bytes=0, write_bytes=0, received_bytes=0, sent_bytes=0)
    assert host._rates(before, replace(before, at_s=1))["cpu_share"] == host.TOO_SOON
    assert host._rates(before, replace(before, at_s=1, busy_s=6, idle_s=4.5))["cpu_share"] == 1.0

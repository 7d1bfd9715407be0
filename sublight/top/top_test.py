"""A session written, read again, served and drawn; the load's verdict on GPUs that are made up."""

from __future__ import annotations

import csv
import dataclasses
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pynvml")

from sublight import gpus
from sublight.errors import BadInput
from sublight.health import fakes, read, xids
from sublight.health.record import Clocks, Errors, GpuState, Power, Process, Snapshot, Unavailable, known
from sublight.top import diagnose, prometheus, record, table
from sublight.top.history import History

H200 = gpus.find("h200")


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[Snapshot]:
    """Three looks at two GPUs by hand, at whole seconds."""
    monkeypatch.setattr(xids, "in_kernel_log", lambda: [])
    seconds = iter(range(1_700_000_000, 1_700_000_010))
    watts = {"nvmlDeviceGetPowerUsage": fakes.InTurn((100_000, 200_000, 300_000))}
    reader = read.Reader(nvml=fakes.by_hand(watts, {}), sleep=lambda _: None, clock=lambda: float(next(seconds)))
    return [reader.read() for _ in range(3)]


def test_a_session_comes_back_as_it_was(snapshots: list[Snapshot], tmp_path: Path) -> None:
    path = tmp_path / "session"
    writer = record.Writer(path)
    for each in snapshots:
        writer.add(each)
    writer.close()
    assert record.read(path) == snapshots
    with path.open("a") as file:
        file.write('{"time_s": 1')  # stopped in the middle of a line
    assert record.read(path) == snapshots


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no snapshot"),
        ("hello\n", "is no session"),
        ("{}\n{}\n", "is no session"),
        (b"\xff\xfe\x00", "is no session"),
        (json.dumps(record.HEAD) + "\n", "holds no snapshot"),
        (json.dumps(record.HEAD) + '\n{"time_s": 1, "later": 2}\n{"time_s": 2}\n', "line 2: Snapshot has no later"),
        (json.dumps(record.HEAD) + '\n{"time_s": "noon"}\n{"time_s": 2}\n', "line 2: 'noon' is no"),
    ],
)
def test_what_is_no_session_is_said_in_a_line(content: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "session"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput, match=message) as caught:
        record.read(path)
    assert "\n" not in str(caught.value)


def test_csv_has_a_row_for_each_gpu_and_look(snapshots: list[Snapshot], tmp_path: Path) -> None:
    writer = table.Writer(str(tmp_path / "out.csv"))
    for each in snapshots:
        writer.add(each)
    writer.close()
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [(row["time"], row["gpu_index"], row["power_w"]) for row in rows][:3] == [
        ("2023-11-14T22:13:20.000Z", "0", "100.0"),
        ("2023-11-14T22:13:20.000Z", "1", "612.4"),
        ("2023-11-14T22:13:21.000Z", "0", "200.0"),
    ]
    assert len(rows) == 6 and len(set(table.COLUMNS)) == len(table.COLUMNS)
    assert rows[0]["fan_share"] == "" and rows[0]["sm_share"] == "0.91"  # no fan is no zero
    alone = next(table.rows(dataclasses.replace(snapshots[0], gpus=())))
    assert len(alone) == len(table.COLUMNS) and alone[1] == ""


def test_history_has_gaps_where_there_was_no_value(snapshots: list[Snapshot]) -> None:
    history = History(looks=3)
    lost = dataclasses.replace(snapshots[1].gpus[0], power=Power(power_w=Unavailable("the GPU is lost")))
    for each in (snapshots[0], snapshots[0], dataclasses.replace(snapshots[1], gpus=(lost,)), snapshots[2]):
        history.add(each)
    assert history.series(snapshots[0].gpus[0].uuid, "power_w") == [100.0, None, 300.0]
    assert history.series("no such GPU", "power_w") == [None] * 3


def test_prometheus_has_dcgms_names_and_units(snapshots: list[Snapshot]) -> None:
    lines = prometheus.text(snapshots[0], "node1").splitlines()
    values = {line.split("{")[0]: line for line in lines if 'gpu="1"' in line}
    label = 'gpu="1",UUID="GPU-00000001-hand-made",pci_bus_id="00000000:18:00.0",modelName="NVIDIA H200"'
    label += ',Hostname="node1",DCGM_FI_DRIVER_VERSION="570.86.15"'
    assert values["DCGM_FI_DEV_SM_CLOCK"] == f"DCGM_FI_DEV_SM_CLOCK{{{label}}} 1755"
    for name, value in {
        "DCGM_FI_DEV_POWER_USAGE": "612.4",
        "DCGM_FI_DEV_GPU_UTIL": "98",
        "DCGM_FI_PROF_SM_ACTIVE": "0.91",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0.64",
        "DCGM_FI_DEV_FB_USED": "91300",
        "DCGM_FI_DEV_FB_FREE": str(143_771 - 91_300 - 600),
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "5000000",
        "DCGM_FI_PROF_PCIE_RX_BYTES": str(410 * 2**20),
        "DCGM_FI_DEV_XID_ERRORS": "0",
        "DCGM_FI_DEV_ROW_REMAP_FAILURE": "0",
    }.items():
        assert values[name].split()[-1] == value, name
    assert "DCGM_FI_DEV_FAN_SPEED" not in values  # there is none: no line, and no zero
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_prometheus_serves_this_machine_alone_unless_told(snapshots: list[Snapshot]) -> None:
    with prometheus.server(":0", lambda: snapshots[0]) as server:
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert "DCGM_FI_DEV_SM_CLOCK{" in answer.read().decode()
        head = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", method="HEAD")
        with urllib.request.urlopen(head, timeout=30) as answer:
            assert answer.status == 200 and int(answer.headers["Content-Length"]) > 1000 and answer.read() == b""
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=30)
        with pytest.raises(BadInput, match=r"cannot listen on 127\.0\.0\.1"):
            prometheus.server(f":{port}", lambda: snapshots[0])
        server.shutdown()


@pytest.mark.parametrize("words", ["", "x", ":", ":-1", ":99999", "host:"])
def test_a_bad_address_is_said_in_a_line(words: str) -> None:
    with pytest.raises(BadInput, match="write :9400"):
        prometheus.address(words)


class Clock:
    """Stands still until a load moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Work:
    """Does so much a second, in batches of a second; `rates` and `wrong` by the batch's number, the last stays."""

    def __init__(self, clock: Clock, *rates: float, limit: str = "matmul_bf16", wrong: tuple[int, ...] = ()) -> None:
        self.name, self.limit, self.unit, self.seconds = "work", limit, "FLOP/s", 20.0
        self._clock, self._rates, self._wrong, self.batches = clock, rates, wrong, 0

    def start(self) -> None:
        self.batches += 1

    def finish(self) -> float:
        self._clock.now_s += 1
        return self._rates[min(self.batches, len(self._rates)) - 1]

    def is_right(self) -> bool:
        return self.batches not in self._wrong


def gpu(slowed_by: tuple[str, ...] = (), temperature_c: float = 60.0, **changes: Any) -> GpuState:
    clocks = Clocks(sm_clock_hz=1.7e9, slowed_by=slowed_by)
    power = Power(power_w=600.0, temperature_c=temperature_c, power_limit_w=700.0, power_default_w=700.0)
    return GpuState(
        **({"index": 0, "name": "NVIDIA H200", "clocks": clocks, "power": power, "processes": ()} | changes)
    )


REACHED = H200.reached["matmul_bf16"]
OTHER = Process(pid=-5, used_bytes=10**9, command="python other.py")


@pytest.mark.parametrize(
    ("share", "states", "is_well", "words"),
    [
        (1.0, [gpu()], True, "this GPU does what its kind does"),
        (0.96, [gpu(("power cap",))], True, "this GPU does what its kind does"),
        (0.93, [gpu(("software thermal",), 83.0)], False,
         "this GPU is 7.0 % below its kind in work ({}) because it throttles at 83 °C (software thermal)"),
        (0.8, [gpu(("power cap",))], False,
         "this GPU is 20 % below its kind in work ({}) because its power cap holds it at 1.70 GHz"),
        (0.8, [gpu(processes=(OTHER,))], False,
         "this GPU is 20 % below its kind in work ({}): another process on it (-5 python; 1.00 GB)"),
        (0.8, [gpu()], False,
         "this GPU is 20 % below its kind in work ({}); its driver shows no cause (clock 1.70 GHz at 60 °C)"),
        (1.0, [gpu(("hardware thermal",), 88.0)], False,
         "this GPU is as fast as its kind, but GPU 0: throttled (hardware thermal) to 1.70 GHz at 88 °C; "
         "look at its cooling"),
        (1.0, [gpu(errors=Errors(ecc_uncorrected=0)), gpu(errors=Errors(ecc_uncorrected=2))], False,
         "this GPU made 2 uncorrected ECC errors under load; reset it, and have it replaced if they come back"),
        (1.0, [None], True, "this GPU does what its kind does"),
    ],
)  # fmt: skip
def test_the_verdict_names_the_cause(share: float, states: list[Any], is_well: bool, words: str) -> None:
    clock = Clock()
    looks: Iterator[Any] = iter([*states, *states[-1:] * 50])
    found = diagnose.run([Work(clock, share * REACHED)], lambda: next(looks), name="NVIDIA H200", clock=clock)
    from sublight import units

    assert found.verdict == words.format(units.part_of(share * REACHED, REACHED, "FLOP/s"))
    assert found.is_well is is_well
    assert found.levels[0].share == pytest.approx(share)


def test_a_wrong_result_weighs_more_than_a_slow_one() -> None:
    clock = Clock()
    found = diagnose.run([Work(clock, 0.5 * REACHED, wrong=(3, 7))], gpu, name="NVIDIA H200", clock=clock)
    assert found.levels[0].faults == 2 and not found.is_well
    assert found.verdict.startswith("this GPU computes wrongly: 2 of its batches")


def test_a_rate_that_falls_is_said_and_the_second_half_counts() -> None:
    clock = Clock()
    rates = [REACHED * 1.1] * 10 + [REACHED] * 10
    found = diagnose.run([Work(clock, *rates)], gpu, name="NVIDIA H200", clock=clock)
    assert found.levels[0].value == REACHED and found.levels[0].falls == pytest.approx(1 - 1 / 1.1)
    assert found.verdict == "this GPU does what its kind does; work falls by 9.1 % as it warms"


def test_a_kind_that_is_not_known_is_not_judged() -> None:
    clock = Clock()
    found = diagnose.run([Work(clock, 1.0)], gpu, name="NVIDIA X9000", clock=clock)
    assert found.is_well and found.levels[0].share is None and "is not known" in found.verdict


@pytest.mark.parametrize(("share", "is_well"), [(0.61, True), (0.59, False)])
def test_where_nobody_measured_a_share_of_the_vendors_figure_counts(share: float, is_well: bool) -> None:
    l4 = gpus.find("l4")
    assert "matmul_bf16" not in l4.reached
    clock = Clock()
    found = diagnose.run([Work(clock, share * l4.peak_flops["bf16"])], gpu, name="NVIDIA L4", clock=clock)
    assert found.is_well is is_well


def inside(launch: Callable[[], object], seconds: float) -> GpuState:
    """A look that counts from within a load to within it: all of the load is queued before, and the GPU has no gap."""
    torch = pytest.importorskip("torch")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first one compiles
        first.record()
        launch()
        last.record()
        torch.cuda.synchronize()
    count = int((seconds + 3.0) / (first.elapsed_time(last) * 1e-3))
    assert 10 < count < 900, "a launch that is too long to look into, or too many for the driver's queue"
    for _ in range(count):
        launch()
    last.record()
    time.sleep(0.7)
    reader = read.Reader()
    reader.read()
    time.sleep(seconds)
    look = reader.read().gpus[0]
    assert not last.query(), "the load ended before the look"
    torch.cuda.synchronize()
    if isinstance(look.activity.sm_share, Unavailable):
        pytest.skip(look.activity.sm_share.reason)
    return look


RUN_NS = 1_500_000_000
DUTY = "../../top/tensor_duty.cu"
PRODUCT_CYCLES = 128  # 64 x 256 x 16 multiplications and additions, of which an SM of Hopper does 2048 a clock
GROUP = 8  # products that are issued together
EIGHTH = 4  # groups: 4096 cycles
PERIOD_CYCLES = 8 * EIGHTH * GROUP * PRODUCT_CYCLES


@pytest.mark.gpu
@pytest.mark.gpu_alone
@pytest.mark.parametrize("eighths", [2, 4, 7])
def test_tensor_activity_is_what_a_kernel_of_known_duty_counts(eighths: int) -> None:
    """Of its cycles those of its products, within five points. A product's own FLOP/s over the peak at NVML's clock is
    no such count: under the power cap an H200's SMs ran at 1.55 GHz where NVML named 1.74."""
    torch = pytest.importorskip("torch")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel's instructions are Hopper's")
    from sublight.extensions.driver import OnGpu

    gpu = OnGpu(DUTY, torch.device("cuda", 0))
    seen = torch.zeros(gpu.multiprocessors, 3, dtype=torch.int64, device="cuda")
    ended = torch.cuda.Event()
    gpu.launch("tensor_duty", (gpu.multiprocessors,), (128,), seen, eighths * EIGHTH, PERIOD_CYCLES, RUN_NS)
    ended.record()
    time.sleep(0.3)
    reader = read.Reader()
    reader.read()
    time.sleep(0.6)
    look = reader.read().gpus[0]
    assert not ended.query(), "the load ended before the look"
    if isinstance(look.activity.tensor_share, Unavailable):
        pytest.skip(look.activity.tensor_share.reason)
    products, cycles, _ = seen.sum(0).tolist()
    counted = products * PRODUCT_CYCLES / cycles
    assert counted == pytest.approx(eighths / 8, abs=0.03)
    assert known(look.activity.tensor_share) == pytest.approx(counted, abs=0.05)
    assert known(look.activity.sm_share) == pytest.approx(1.0, abs=0.05)


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_sm_activity_of_a_kernel_on_half_the_sms_is_half() -> None:
    """Where NVML's own utilisation says that the GPU is busy all the time."""
    torch = pytest.importorskip("torch")
    from sublight.limits.kernels.vector import multiply_add

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    x = torch.zeros(2**20, device="cuda")
    look = inside(lambda: multiply_add(x, 100_000, sms // 2), 1.5)  # they are spread before any SM gets a second
    assert known(look.activity.sm_share) == pytest.approx(0.5, abs=0.05)
    assert (known(look.activity.gpu_share) or 0) > 0.9

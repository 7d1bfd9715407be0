"""A stand-in for NVML that replays what a driver answered, and the recorder that writes it down.

On a machine with a GPU, one call makes the file of the tests:

    python -m sublight.health.fakes sublight/health/h200.json

`recorded` is that H200 with answers changed, `by_hand` a machine whose answers are all made up: with NVLinks, several
GPUs, or parts of one (MIG), which the recorded machine did not have.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RECORDED = Path(__file__).with_name("h200.json")
Calls = list[tuple[str, list[Any], Any]]  # function, arguments, answer


class Recorder:
    """pynvml, with every call and its answer written down."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: list[Any] = []  # what NVML hands out to be handed back
        self.calls: Calls = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._nvml, name)
        if not name.startswith("nvml") or not callable(value) or isinstance(value, type):
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            key = [self._name(each) for each in (*arguments, *options.values())]
            try:
                answer = value(*arguments, **options)
            except self._nvml.NVMLError as error:
                self.calls.append((name, key, {"error": error.value}))
                raise
            self.calls.append((name, key, self._plain(answer)))
            return answer

        return call

    def write(self, path: Path, source: str) -> None:
        """Without what tells one machine from another."""
        text = json.dumps({"source": source, "calls": self.calls}, separators=(",", ":"))
        uuids = [answer for name, _, answer in self.calls if name == "nvmlDeviceGetUUID" and isinstance(answer, str)]
        for at, uuid in enumerate(dict.fromkeys(uuids)):
            text = text.replace(uuid, f"GPU-recorded-{at}")
        path.write_text(text + "\n", encoding="utf-8")

    def _name(self, argument: Any) -> Any:
        if hasattr(argument, "numMetrics"):
            return "metrics"
        if isinstance(argument, list):
            return [self._name(each) for each in argument]
        return argument if isinstance(argument, int | float | str | None) else self._handle(argument)

    def _handle(self, value: Any) -> str:
        """Its place among those that were handed out; a pointer may come in another object each time."""
        address = ctypes.cast(value, ctypes.c_void_p).value if isinstance(value, ctypes._Pointer) else value
        if address not in self._handles:
            self._handles.append(address)
        return f"handle {self._handles.index(address)}"

    def _plain(self, value: Any) -> Any:
        if isinstance(value, int | float | str | None):
            return value
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        if hasattr(value, "numMetrics"):
            used = [value.metrics[at] for at in range(value.numMetrics)]
            return {"metrics": [[int(each.metricId), int(each.nvmlReturn), float(each.value)] for each in used]}
        if isinstance(value, ctypes.Structure | ctypes.Union):
            return {"fields": {name: self._plain(getattr(value, name)) for name, *_ in value._fields_}}
        if isinstance(value, ctypes.Array | list | tuple):
            return [self._plain(each) for each in value]
        if isinstance(value, ctypes._Pointer) or not hasattr(value, "__dict__"):
            return {"handle": self._handle(value)}
        return {"fields": {name: self._plain(each) for name, each in vars(value).items()}}


class Replay:
    """Answers as the recorded driver did, in its order; the last answer of a question is given again and again."""

    def __init__(self, calls: Calls) -> None:
        self._answers: dict[str, deque[Any]] = {}
        for name, arguments, answer in calls:
            self._answers.setdefault(_key(name, arguments), deque()).append(answer)

    @classmethod
    def of(cls, path: Path) -> Replay:
        return cls(json.loads(path.read_text(encoding="utf-8"))["calls"])

    def __getattr__(self, name: str) -> Any:
        import pynvml

        value = getattr(pynvml, name)
        if not name.startswith("nvml") or not callable(value) or isinstance(value, type):
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            named = ["metrics" if hasattr(each, "numMetrics") else each for each in (*arguments, *options.values())]
            answers = self._answers.get(_key(name, named))
            if answers is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            answer = answers.popleft() if len(answers) > 1 else answers[0]
            if isinstance(answer, dict) and "error" in answer:
                raise pynvml.NVMLError(answer["error"])
            if name == "nvmlGpmSampleAlloc":
                return pynvml.c_nvmlGpmSample_t()  # goes into a structure, which takes nothing else
            if isinstance(answer, dict) and "metrics" in answer:
                for at, (number, status, value) in enumerate(answer["metrics"]):
                    metric = arguments[0].metrics[at]
                    metric.metricId, metric.nvmlReturn, metric.value = number, status, value
                return arguments[0]
            return _made(answer)

        return call


def _key(name: str, arguments: list[Any]) -> str:
    if name == "nvmlGpmSampleGet":
        arguments = arguments[:1]  # each sample is a new one
    elif name in ("nvmlGpmSampleFree", "nvmlEventSetWait_v2"):
        arguments = []
    return f"{name} {json.dumps(arguments)}"


def _made(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_made(each) for each in answer]
    if isinstance(answer, dict):
        if "handle" in answer:
            return answer["handle"]
        return SimpleNamespace(**{name: _made(each) for name, each in answer["fields"].items()})
    return answer


MIB = 2**20
METRICS = {1: 97.0, 2: 91.0, 3: 23.0, 5: 64.0, 10: 38.0, 11: 0.0, 12: 3.0, 13: 1.0, 20: 120.0, 21: 410.0}


def answers(at: int = 0) -> dict[str, Any]:
    """By hand: what the driver of a well H200 under load could answer of its GPU `at`; by function, or by function
    and further arguments."""
    threshold, ecc = "nvmlDeviceGetTemperatureThreshold", "nvmlDeviceGetTotalEccErrors"
    pages = "nvmlDeviceGetRetiredPages"
    return {
        "nvmlDeviceGetIndex": at,
        "nvmlDeviceGetUUID": f"GPU-0000000{at}-hand-made",
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetPciInfo": _fields(busId=f"00000000:{17 + at}:00.0"),
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlGpmQueryDeviceSupport": _fields(version=1, isSupportedDevice=1),
        "nvmlGpmSampleGet": None,
        'nvmlDeviceRegisterEvents 8 "events"': None,
        "nvmlDeviceGetUtilizationRates": _fields(gpu=98, memory=41),
        "nvmlDeviceGetEncoderUtilization": [0, 167000],
        "nvmlDeviceGetDecoderUtilization": [0, 167000],
        "nvmlDeviceGetClockInfo 1": 1755,
        "nvmlDeviceGetClockInfo 2": 3201,
        "nvmlDeviceGetMaxClockInfo 1": 1980,
        "nvmlDeviceGetMaxClockInfo 2": 3201,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        "nvmlDeviceGetPerformanceState": 0,
        "nvmlDeviceGetPowerUsage": 612_400,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
        "nvmlDeviceGetTotalEnergyConsumption": 5_000_000,
        "nvmlDeviceGetTemperature 0": 61,
        "nvmlDeviceGetFieldValues [82]": [_fields(nvmlReturn=0, value=_fields(uiVal=74))],
        f"{threshold} 0": 92,
        f"{threshold} 1": 87,
        "nvmlDeviceGetMemoryInfo 33554472": _fields(total=143_771 * MIB, used=91_300 * MIB, reserved=600 * MIB),
        "nvmlDeviceGetEccMode": [1, 1],
        f"{ecc} 0 0": 0, f"{ecc} 1 0": 0, f"{ecc} 0 1": 0, f"{ecc} 1 1": 0,
        f"{pages} 0": {"error": 3}, f"{pages} 1": {"error": 3},
        "nvmlDeviceGetRetiredPagesPendingStatus": {"error": 3},
        "nvmlDeviceGetRemappedRows": [0, 0, 0, 0],
        "nvmlDeviceGetCurrPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetPcieReplayCounter": 0,
        **{f"nvmlDeviceGetNvLinkState {link}": 1 for link in range(18)},
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetGraphicsRunningProcesses": [],
        "nvmlDeviceGetMPSComputeRunningProcesses": [],
    }  # fmt: skip


SYSTEM = {
    "nvmlInit": None,
    "nvmlSystemGetDriverVersion": "570.86.15",
    "nvmlSystemGetCudaDriverVersion": 12080,
    "nvmlEventSetCreate": {"handle": "events"},
    "nvmlEventSetWait_v2": {"error": 10},
    "nvmlGpmSampleAlloc": {"handle": "sample"},
    "nvmlGpmSampleFree": None,
    'nvmlGpmMetricsGet "metrics"': {
        "metrics": [[number, 0, METRICS[number]] for number in (1, 2, 3, 5, 10, 11, 12, 13, 20, 21)]
        + [[60, 3, 0.0], [61, 3, 0.0]]
    },
}


class InTurn(tuple[Any, ...]):
    """Answers that follow one another; the last stays."""


def by_hand(*changes: Mapping[str, Any], system: Mapping[str, Any] | None = None) -> Replay:
    """A driver with one GPU for each of these, which differ from `answers` in so much."""
    questions: list[tuple[str, list[Any], Any]]
    questions = [(words, [], answer) for words, answer in {**SYSTEM, **(system or {})}.items()]
    questions.append(("nvmlDeviceGetCount", [], len(changes)))
    for at, change in enumerate(changes):
        questions.append((f"nvmlDeviceGetHandleByIndex {at}", [], {"handle": f"GPU {at}"}))
        questions.append((f'nvmlDeviceGetHandleByUUID "GPU-{at}"', [], {"handle": f"GPU {at}"}))
        questions += [(words, [f"GPU {at}"], answer) for words, answer in {**answers(at), **change}.items()]
    calls: Calls = []
    for words, first, answer in questions:
        name, *arguments = words.split(" ")
        for one in answer if isinstance(answer, InTurn) else (answer,):
            calls.append((name, [*first, *map(json.loads, arguments)], one))
    return Replay(calls)


def recorded(change: Mapping[str, Any]) -> Replay:
    """The recorded H200 as it was at its last look, under load and with no other process; but for these answers."""
    last: dict[str, tuple[str, list[Any], Any]] = {}
    for name, arguments, answer in json.loads(RECORDED.read_text(encoding="utf-8"))["calls"]:
        last[_key(name, arguments)] = (name, arguments, answer)
    handle = next(answer["handle"] for name, _, answer in last.values() if name == "nvmlDeviceGetHandleByIndex")
    for words, answer in {"nvmlDeviceGetComputeRunningProcesses": [], **change}.items():
        name, *rest = words.split(" ")
        arguments = [handle, *map(json.loads, rest)]
        last[_key(name, arguments)] = (name, arguments, answer)
    return Replay(list(last.values()))


def process(pid: int, used_bytes: int | None) -> dict[str, Any]:
    return _fields(pid=pid, usedGpuMemory=used_bytes)


def _fields(**words: Any) -> dict[str, Any]:
    return {"fields": words}


def record(path: Path, *, looks: int = 6) -> None:
    """The driver's answers of this machine, idle first, then under matmuls."""
    import time

    import pynvml
    import torch

    from sublight.health import nvidia

    recorder = Recorder(pynvml)
    reader = nvidia.Reader(recorder)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for look in range(looks):
        begin = time.perf_counter()
        while time.perf_counter() - begin < 1.0:
            if look >= looks // 2:
                x @ x
                torch.cuda.synchronize()
        state = reader.read()[0]
        print(
            f"look {look}: SM {state.activity.sm_share}, tensor {state.activity.tensor_share}, {state.power.power_w} W"
        )
    reader.versions()
    recorder.write(path, f"recorded on an {state.name}, driver {pynvml.nvmlSystemGetDriverVersion()}")


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED)

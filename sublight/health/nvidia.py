"""NVIDIA's GPUs through NVML, without a daemon. From Hopper on GPM counts what SMs, tensor cores and memory really do;
NVML's own "utilisation" is the share of time in which some kernel ran, even one on a single SM.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from sublight import nvml as driver
from sublight.health import processes, xids
from sublight.health.ask import GONE, NEEDS_ROOT, NOT_SUPPORTED, REASONS, ask
from sublight.health.record import (
    Activity,
    Clocks,
    Errors,
    Flag,
    GpuState,
    Instance,
    Link,
    Memory,
    Number,
    Power,
    Process,
    Unavailable,
    Versions,
    Xid,
    known,
    leaves,
)

_T = TypeVar("_T")
GPM_SHARES = {  # field of Activity -> GPM's number of the metric, in percent
    "engine_share": 1,
    "sm_share": 2,
    "occupancy_share": 3,
    "tensor_share": 5,
    "memory_share": 10,
    "fp64_share": 11,
    "fp32_share": 12,
    "fp16_share": 13,
}
GPM_RATES = {  # in MiB/s
    "pcie_sent_bytes_per_s": 20,
    "pcie_received_bytes_per_s": 21,
    "nvlink_received_bytes_per_s": 60,
    "nvlink_sent_bytes_per_s": 61,
}
NO_GPM = Unavailable("needs GPM, which begins with Hopper")
SLOWED_BY = {**driver.THROTTLE, 0x2: "clocks set by a user", 0x10: "sync boost"}


class Reader:
    """Reads all GPUs again and again; GPM counts from one reading to the next."""

    def __init__(self, nvml: Any, handles: list[Any] | None = None) -> None:
        """`handles`: these GPUs alone, and once: nothing is counted. Raises NVML's error where there is no driver.

        A GPU that the driver counts and does not reach is lost; one that this user may not see is left out."""
        self._nvml = nvml
        nvml.nvmlInit()
        counts = handles is None
        if handles is None:
            count = nvml.nvmlDeviceGetCount()
            handles = [ask(nvml, functools.partial(_handle, at=at)) for at in range(count)]
        hidden = Unavailable(REASONS[NEEDS_ROOT])
        self._gpus = [_Gpu(nvml, one, at, counts=counts) for at, one in enumerate(handles) if one != hidden]
        self._events = self._watch() if counts else Unavailable("not watched")

    def versions(self) -> Versions:
        """The driver's own versions."""
        cuda = ask(self._nvml, lambda nvml: int(nvml.nvmlSystemGetCudaDriverVersion()))
        return Versions(
            driver=ask(self._nvml, lambda nvml: str(nvml.nvmlSystemGetDriverVersion())),
            driver_cuda=cuda if isinstance(cuda, Unavailable) else f"{cuda // 1000}.{cuda % 1000 // 10}",
        )

    def read(self) -> tuple[GpuState, ...]:
        """All GPUs now."""
        self._collect()
        logged = xids.in_kernel_log()
        return tuple(gpu.read(logged, self._events) for gpu in self._gpus)

    def _watch(self) -> Any:
        """NVML's set of events that tells of XIDs from now on, or why there is none."""

        def register(nvml: Any) -> Any:
            events = nvml.nvmlEventSetCreate()
            for gpu in (gpu for gpu in self._gpus if not isinstance(gpu.handle, Unavailable)):
                nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
            return events

        return ask(self._nvml, register) if self._gpus else Unavailable("no GPU")

    def _collect(self) -> None:
        if isinstance(self._events, Unavailable):
            return
        while not isinstance(
            event := ask(self._nvml, lambda nvml: nvml.nvmlEventSetWait_v2(self._events, 0)), Unavailable
        ):
            uuid = ask(self._nvml, functools.partial(_uuid, handle=event.device))
            for gpu in self._gpus:
                if len(self._gpus) == 1 or gpu.uuid == uuid:
                    gpu.events.append(Xid(number=int(event.eventData)))


def _handle(nvml: Any, at: int) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(at)


class _Gpu:
    def __init__(self, nvml: Any, handle: Any, at: int, *, counts: bool) -> None:
        """`handle`: NVML's, or why there is none."""
        self._nvml, self.handle = nvml, handle
        index = self._ask(lambda nvml, handle: int(nvml.nvmlDeviceGetIndex(handle)))
        self._index = at if isinstance(index, Unavailable) else index
        self.events: list[Xid] = []
        self.uuid = known(self._ask(_uuid)) or ""
        self._name = known(self._ask(lambda nvml, handle: str(nvml.nvmlDeviceGetName(handle)))) or "unknown GPU"
        self._bus_id = self._ask(lambda nvml, handle: _text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        self._is_mig: Flag = self._ask(lambda nvml, handle: bool(nvml.nvmlDeviceGetMigMode(handle)[0]))
        has_gpm = self._ask(lambda nvml, handle: bool(nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice))
        self._sample: Any = self._ask(_sample) if has_gpm is True and counts else NO_GPM  # GPM's last, to count from

    def read(self, logged: list[tuple[str, Xid]] | Unavailable, events: Any) -> GpuState:
        found, sources = self._xids(logged, events)
        state = GpuState(
            index=self._index,
            name=self._name,
            uuid=self.uuid,
            bus_id=self._bus_id,
            is_mig=self._is_mig,
            activity=self._activity(),
            clocks=self._clocks(),
            power=self._power(),
            memory=self._memory(),
            errors=self._errors(),
            link=self._link(),
            instances=self._instances(),
            processes=self._processes(),
            xids=found,
            xids_from=sources,
        )
        reasons = [value.reason for _, value in leaves(state) if isinstance(value, Unavailable)]
        unreached = self.handle.reason if isinstance(self.handle, Unavailable) else ""
        return replace(state, lost=next((reason for reason in reasons if reason in GONE), unreached))

    def _ask(self, question: Callable[[Any, Any], _T]) -> _T | Unavailable:
        if isinstance(self.handle, Unavailable):
            return self.handle
        return ask(self._nvml, lambda nvml: question(nvml, self.handle))

    def _activity(self) -> Activity:
        rates = self._ask(lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle))
        found: dict[str, Number] = {
            "gpu_share": rates if isinstance(rates, Unavailable) else rates.gpu / 100,
            "memory_controller_share": rates if isinstance(rates, Unavailable) else rates.memory / 100,
            "encoder_share": self._ask(lambda nvml, handle: nvml.nvmlDeviceGetEncoderUtilization(handle)[0] / 100),
            "decoder_share": self._ask(lambda nvml, handle: nvml.nvmlDeviceGetDecoderUtilization(handle)[0] / 100),
        }
        return Activity(**found, **self._counted())

    def _counted(self) -> dict[str, Number]:
        """What GPM counted since the last reading."""
        names = {**GPM_SHARES, **GPM_RATES}
        before, now = self._sample, self._sample
        if before is not NO_GPM:
            now = self._sample = self._ask(_sample)
        for sample in (now, before):
            if isinstance(sample, Unavailable):
                return dict.fromkeys(names, sample)
        try:
            metrics = self._ask(functools.partial(_metrics, before=before, now=now, numbers=tuple(names.values())))
        finally:
            self._ask(lambda nvml, _: nvml.nvmlGpmSampleFree(before))
        if isinstance(metrics, Unavailable):
            return dict.fromkeys(names, metrics)
        found: dict[str, Number] = {}
        for name, number in names.items():
            value = metrics[number]
            scale = 0.01 if name in GPM_SHARES else 2**20
            found[name] = value if isinstance(value, Unavailable) else value * scale
        return found

    def _clocks(self) -> Clocks:
        def clock(kind: int, *, most: bool = False) -> Number:
            name = "nvmlDeviceGetMaxClockInfo" if most else "nvmlDeviceGetClockInfo"
            return self._ask(lambda nvml, handle: getattr(nvml, name)(handle, kind) * 1e6)

        bits = self._ask(lambda nvml, handle: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
        words = bits if isinstance(bits, Unavailable) else tuple(name for bit, name in SLOWED_BY.items() if bits & bit)
        sm, memory = self._nvml.NVML_CLOCK_SM, self._nvml.NVML_CLOCK_MEM
        return Clocks(
            sm_clock_hz=clock(sm),
            sm_clock_max_hz=clock(sm, most=True),
            memory_clock_hz=clock(memory),
            memory_clock_max_hz=clock(memory, most=True),
            performance_state=self._ask(lambda nvml, handle: int(nvml.nvmlDeviceGetPerformanceState(handle))),
            slowed_by=words,
        )

    def _power(self) -> Power:
        def threshold(name: str) -> Number:
            return self._ask(
                lambda nvml, handle: float(nvml.nvmlDeviceGetTemperatureThreshold(handle, getattr(nvml, name)))
            )

        ask_ = self._ask
        return Power(
            power_w=ask_(lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) * 1e-3),
            power_limit_w=ask_(lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) * 1e-3),
            power_default_w=ask_(lambda nvml, handle: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) * 1e-3),
            energy_j=ask_(lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) * 1e-3),
            temperature_c=ask_(
                lambda nvml, handle: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            memory_temperature_c=ask_(_memory_temperature),
            slowdown_c=threshold("NVML_TEMPERATURE_THRESHOLD_SLOWDOWN"),
            shutdown_c=threshold("NVML_TEMPERATURE_THRESHOLD_SHUTDOWN"),
            fan_share=ask_(lambda nvml, handle: nvml.nvmlDeviceGetFanSpeed(handle) / 100),
        )

    def _memory(self) -> Memory:
        info = self._ask(lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
        if isinstance(info, Unavailable):
            return Memory(memory_total_bytes=info, memory_used_bytes=info, memory_reserved_bytes=info)
        return Memory(
            memory_total_bytes=int(info.total),
            memory_used_bytes=int(info.used),
            memory_reserved_bytes=int(info.reserved),
        )

    def _errors(self) -> Errors:
        def ecc(kind: str, counter: str) -> Any:
            return self._ask(
                lambda nvml, handle: int(
                    nvml.nvmlDeviceGetTotalEccErrors(
                        handle, getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}"), getattr(nvml, f"NVML_{counter}_ECC")
                    )
                )
            )

        def retired(cause: str) -> Any:
            name = f"NVML_PAGE_RETIREMENT_CAUSE_{cause}"
            return self._ask(lambda nvml, handle: len(nvml.nvmlDeviceGetRetiredPages(handle, getattr(nvml, name))))

        rows = self._ask(lambda nvml, handle: tuple(nvml.nvmlDeviceGetRemappedRows(handle)))
        correctable, uncorrectable, pending, failed = (rows,) * 4 if isinstance(rows, Unavailable) else rows
        return Errors(
            ecc_enabled=self._ask(lambda nvml, handle: bool(nvml.nvmlDeviceGetEccMode(handle)[0])),
            ecc_corrected=ecc("CORRECTED", "VOLATILE"),
            ecc_uncorrected=ecc("UNCORRECTED", "VOLATILE"),
            ecc_corrected_ever=ecc("CORRECTED", "AGGREGATE"),
            ecc_uncorrected_ever=ecc("UNCORRECTED", "AGGREGATE"),
            retired_single_bit=retired("MULTIPLE_SINGLE_BIT_ECC_ERRORS"),
            retired_double_bit=retired("DOUBLE_BIT_ECC_ERROR"),
            retirement_pending=self._ask(
                lambda nvml, handle: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
            ),
            remapped_correctable=correctable,
            remapped_uncorrectable=uncorrectable,
            remap_pending=pending if isinstance(pending, Unavailable) else bool(pending),
            remap_failed=failed if isinstance(failed, Unavailable) else bool(failed),
        )

    def _link(self) -> Link:
        def number(name: str) -> Any:
            return self._ask(lambda nvml, handle: int(getattr(nvml, f"nvmlDeviceGet{name}")(handle)))

        links = self._ask(_nvlinks)
        return Link(
            pcie_generation=number("CurrPcieLinkGeneration"),
            pcie_width=number("CurrPcieLinkWidth"),
            pcie_generation_max=number("MaxPcieLinkGeneration"),
            pcie_width_max=number("MaxPcieLinkWidth"),
            pcie_replays=number("PcieReplayCounter"),
            nvlinks=links if isinstance(links, Unavailable) else len(links),
            nvlinks_active=links if isinstance(links, Unavailable) else sum(links),
        )

    def _instances(self) -> tuple[Instance, ...]:
        if self._is_mig is not True:
            return ()
        count = known(self._ask(lambda nvml, handle: int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)))) or 0
        found = (self._ask(functools.partial(_instance, at=at)) for at in range(count))
        return tuple(each for each in found if isinstance(each, Instance))  # the others are places that are not taken

    def _processes(self) -> tuple[Process, ...] | Unavailable:
        kinds = {"compute": "Compute", "graphics": "Graphics", "mps": "MPSCompute"}
        answers = {
            kind: self._ask(lambda nvml, handle, name=name: list(getattr(nvml, name)(handle)))  # type: ignore[misc]
            for kind, name in ((kind, f"nvmlDeviceGet{word}RunningProcesses") for kind, word in kinds.items())
        }
        if isinstance(answers["compute"], Unavailable):
            return answers["compute"]
        running = [(kind, each) for kind, found in answers.items() for each in known(found) or ()]
        unique = {each.pid: (kind, each) for kind, each in reversed(running)}
        return tuple(_process(kind, each) for kind, each in unique.values())

    def _xids(
        self, logged: list[tuple[str, Xid]] | Unavailable, events: Any
    ) -> tuple[tuple[Xid, ...] | Unavailable, str]:
        """What both sources tell, and which they are; an event that the log holds, too, counts once."""
        watched = not isinstance(events, Unavailable)
        if isinstance(logged, Unavailable):
            if not watched:
                return Unavailable(f"{logged.reason}; no events from NVML: {events.reason}"), ""
            return tuple(self.events), f"NVML's events since this began; {logged.reason}"
        mine = [xid for bus_id, xid in logged if xids.same_bus(known(self._bus_id) or "", bus_id)]
        new = [] if mine else self.events
        return (*mine, *new), "kernel log" + (", NVML's events" if watched else "")


def _uuid(nvml: Any, handle: Any) -> str:
    return _text(nvml.nvmlDeviceGetUUID(handle))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _sample(nvml: Any, handle: Any) -> Any:
    sample = nvml.nvmlGpmSampleAlloc()
    try:
        nvml.nvmlGpmSampleGet(handle, sample)
    except nvml.NVMLError:
        nvml.nvmlGpmSampleFree(sample)
        raise
    return sample


def _metrics(nvml: Any, _: Any, *, before: Any, now: Any, numbers: tuple[int, ...]) -> dict[int, float | Unavailable]:
    request = nvml.c_nvmlGpmMetricsGet_t()
    request.version = nvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(numbers)
    request.sample1, request.sample2 = before, now
    for at, number in enumerate(numbers):
        request.metrics[at].metricId = number
    nvml.nvmlGpmMetricsGet(request)
    answers = [request.metrics[at] for at in range(len(numbers))]
    return {
        int(each.metricId): Unavailable(REASONS.get(each.nvmlReturn, f"NVML's error {each.nvmlReturn}"))
        if each.nvmlReturn
        else float(each.value)
        for each in answers
    }


def _memory_temperature(nvml: Any, handle: Any) -> float:
    value = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_MEMORY_TEMP])[0]
    if value.nvmlReturn:
        raise nvml.NVMLError(value.nvmlReturn)
    return float(value.value.uiVal)


def _nvlinks(nvml: Any, handle: Any) -> list[bool]:
    """Whether each link is up; a GPU has as many links as answer."""
    links: list[bool] = []
    for at in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = ask(nvml, lambda nvml, at=at: bool(nvml.nvmlDeviceGetNvLinkState(handle, at)))  # type: ignore[misc]
        if isinstance(state, Unavailable):
            if not links:
                raise nvml.NVMLError(NOT_SUPPORTED)
            break
        links.append(state)
    return links


def _instance(nvml: Any, handle: Any, *, at: int) -> Instance:
    part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, at)
    memory = ask(nvml, lambda nvml: nvml.nvmlDeviceGetMemoryInfo(part))
    return Instance(
        mig_uuid=_uuid(nvml, part),
        mig_name=ask(nvml, lambda nvml: str(nvml.nvmlDeviceGetName(part))),
        mig_used_bytes=memory if isinstance(memory, Unavailable) else int(memory.used),
        mig_total_bytes=memory if isinstance(memory, Unavailable) else int(memory.total),
    )


def _process(kind: Any, running: Any) -> Process:
    used = running.usedGpuMemory
    return Process(
        pid=int(running.pid),
        kind=kind,
        used_bytes=Unavailable("the driver does not tell") if used is None else int(used),
        command=processes.command(running.pid),
        container=processes.container(running.pid),
        is_own=running.pid == os.getpid(),
    )

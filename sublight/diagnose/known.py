"""Whose limits a trace is judged by: this machine's where it is such a device, else what is known of the one named."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sublight import gpus, nvml
from sublight.gpus import Gpu
from sublight.predict.known_limits import of_gpu
from sublight.results import Limits, read_limits_file
from sublight.trace.record import XLA_CPU, Trace

_MODEL = re.compile(r"\b(GB?H?\d{2,3}|[ABHLPTV]\d{1,3}S?|MI\d{3}[AX]?|RTX ?A?\d{4}|GTX ?\d{4})\b", re.IGNORECASE)


def limits_for(trace: Trace, *, gpu: str = "", file: str = "") -> tuple[Limits, str]:
    """The limits, and where they come from, in words."""
    if file:
        limits = read_limits_file(Path(file))
        return limits, f"from {file}: {limits.device}, measured {limits.date[:10]}"
    if gpu:
        return of_gpu(gpus.find(gpu))
    if not trace.on_gpu or device_name(trace) == XLA_CPU:
        return _of_cpu(trace)
    name = device_name(trace)
    if (measured := _measured_here(name)) is not None:
        return measured, _measured(measured)
    found = find(name, trace)
    if found is None:
        known = f"the trace's GPU, {name}, is not in the table" if name else "the trace does not name its GPU"
        limits = Limits(device=name or "unknown GPU", kind="cuda", source="none", limits=())
        return limits, f"none: {known}; --gpu NAME or --limits FILE gives floors"
    return of_gpu(found)


def _measured(limits: Limits) -> str:
    from sublight.limits import run

    beside = ", which was busy" if run.measured_busy(limits) else ""
    return f"measured on this machine{beside}, {limits.date[:10]}"


def _measured_here(name: str) -> Limits | None:
    """This machine's limits, if it has such a GPU and was measured; where it has none, the probes are not loaded."""
    if nvml.health() is None:
        return None
    from sublight.limits import run

    here = run.machine_by_driver()
    return (
        run.cached(here) if here is not None and here.gpu is not None and _same(here.device, here.gpu, name) else None
    )


def device_name(trace: Trace) -> str:
    """The name of the GPU that the events ran on."""
    used = {trace.lanes[lane].device for lane in set(trace.lane[trace.device_rows].tolist())}
    named = [device.name for device in trace.devices if device.name]
    return next((device.name for device in trace.devices if device.index in used and device.name), (named or [""])[0])


def find(name: str, trace: Trace) -> Gpu | None:
    """The GPU of the table that a trace's name means; boards of one model differ in their suffix and their memory."""
    if not name:
        return None
    try:
        return gpus.find(name)
    except gpus.UnknownGpu:
        pass
    model = _MODEL.search(name)
    if not model:
        return None
    word = model[0].replace(" ", "").lower()
    boards = [board for board in gpus.all_gpus() if board.key.startswith(word)]
    memory = next((device.memory_bytes for device in trace.devices if device.memory_bytes), None)
    if not boards:
        return None
    return min(boards, key=lambda board: abs((board.memory_bytes or 0) - (memory or board.memory_bytes or 0)))


def _same(device: str, gpu: Gpu, name: str) -> bool:
    if device == name:
        return True
    try:
        return gpus.find(name).key == gpu.key
    except gpus.UnknownGpu:
        return False


def device_of(trace: Trace, limits: Limits) -> str:
    """What the steps ran on, in words."""
    if trace.on_gpu:
        return device_name(trace) or limits.device
    return str(trace.meta.get("cpu") or limits.device)


def _of_cpu(trace: Trace) -> tuple[Limits, str]:
    """This machine's limits, if the trace is of this machine: a recording that does not name its CPU is of any."""
    cpu, cores = trace.meta.get("cpu"), trace.meta.get("cores")
    if not isinstance(cpu, str) or not cpu:
        limits = Limits(device="a CPU that the trace does not name", kind="cpu", source="none", limits=())
        return limits, "none: the trace does not say which CPU it is of; --limits FILE gives floors"
    from sublight.limits import run  # loads torch

    threads = trace.meta.get("threads")
    machine = run.this_machine("cpu", threads=threads if isinstance(threads, int) else None)
    if not machine.device.startswith(cpu) or cores not in (None, os.cpu_count()):
        limits = Limits(device=cpu, kind="cpu", source="none", limits=())
        return limits, f"none: the trace is of another CPU, {cpu}; --limits FILE gives floors"
    if cached := run.cached(machine):
        return cached, _measured(cached)
    if cached := run.cached(run.this_machine("cpu")):  # with as many threads as torch takes by itself
        return cached, f"{_measured(cached)}, by another number of threads than the script's {threads}"
    limits = Limits(device=machine.device, kind="cpu", source="none", limits=())
    return limits, "none: this CPU was never measured; `sublight limits --quick` gives floors"

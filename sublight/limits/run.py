"""Run the probes, judge what they found, keep it for the commands that need a floor."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from sublight import gpus, nvml, units
from sublight.errors import BadInput, nearest
from sublight.folder import cache_folder
from sublight.health import check
from sublight.health.read import this_gpu
from sublight.health.record import GpuState
from sublight.limits import LIMITS, busy
from sublight.limits.probe import Context, Kind, Probe
from sublight.limits.verdict import judge
from sublight.results import BUSY, UNWELL, Limit, Limits, read_limits, write_json

ROOM_BYTES = 5 * 10**9  # three buffers of a gigabyte, and what torch and the driver take
Progress = Callable[[str, int, int], None]  # what is being measured, how many are done, of how many


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device that is measured, and the name of its place in the cache."""

    kind: Kind
    device: str
    uuid: str
    driver: str
    gpu: gpus.Gpu | None

    @property
    def cache_bytes(self) -> int:
        """Bytes of the device's last-level cache; a usual size where that is not known."""
        return self.gpu.l2_bytes if self.gpu and self.gpu.l2_bytes else 32 * 2**20

    @property
    def cache_path(self) -> Path:
        return _cache_path(self.uuid, self.driver)


def _cache_path(uuid: str, driver: str) -> Path:
    safe = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{uuid}-{driver}")
    return cache_folder() / "limits" / f"{safe}.json"


def this_machine(kind: Kind | None = None, *, threads: int | None = None) -> Machine:
    """The GPU where there is one, else the CPU; `kind` insists on one of them. `threads`: how many a CPU's op uses, as
    torch would by itself unless given.
    """
    gpu = None if kind == "cpu" else gpus.detect()
    if gpu is None and kind == "cuda":
        raise BadInput("no GPU that torch can use here: `sublight doctor` says why, or use --device cpu")
    if gpu is None:
        model = _cpu_model()
        digest = hashlib.sha256(
            f"{platform.node()} {model} {os.cpu_count()} {threads or busy.threads()}".encode()
        ).hexdigest()[:12]
        return Machine(kind="cpu", device=model, uuid=f"cpu-{digest}", driver=platform.release(), gpu=None)
    health = nvml.health()
    uuid = health.uuid if health else re.sub(r"\W+", "-", gpu.name)
    return Machine(kind="cuda", device=gpu.name, uuid=uuid, driver=health.driver if health else "unknown", gpu=gpu)


def passed_over() -> str:
    """An accelerator here that torch could use and we do not measure, such as "xpu" (Intel's GPUs); else empty."""
    try:
        import torch

        accelerator = torch.accelerator.current_accelerator()
    except (ImportError, AttributeError, RuntimeError):  # an old torch knows no accelerators, a broken driver fails
        return ""
    return "" if accelerator is None or accelerator.type in ("cuda", "cpu") else accelerator.type


def machine_by_driver() -> Machine | None:
    """This machine's GPU as its driver names it, which needs no torch; None where there is none, or no NVML."""
    health = nvml.health()
    if health is None:
        return None
    try:
        gpu = gpus.find(health.name)
    except gpus.UnknownGpu:
        gpu = gpus.Gpu(key=health.name, name=health.name)
    return Machine(kind="cuda", device=health.name, uuid=health.uuid, driver=health.driver, gpu=gpu)


def check_room(machine: Machine) -> None:
    """Refuse a GPU whose memory another process fills, before anything is measured."""
    if machine.kind != "cuda":
        return
    import torch

    free, total = torch.cuda.mem_get_info()
    if free < ROOM_BYTES:
        here, all_of_it, needed = (units.text(size, "B") for size in (free, total, ROOM_BYTES))
        raise BadInput(
            f"only {here} of the GPU's {all_of_it} are free and {needed} are needed: another process fills it "
            "(nvidia-smi lists them); end it, or use --device cpu"
        )


def run(
    *, kind: Kind | None = None, quick: bool = False, only: Iterable[str] = (), progress: Progress | None = None
) -> Limits:
    """Measure this machine's limits. Ctrl-C keeps what was measured; a probe that fails says why in its place."""
    machine = this_machine(kind)
    chosen = _choose(machine.kind, tuple(only))
    check_room(machine)
    context = Context(kind=machine.kind, gpu=machine.gpu, quick=quick)
    measured: list[Limit] = []
    source = "measured"
    total = sum(len(probe.names_on(machine.kind)) for probe in chosen)
    try:
        for probe in chosen:
            if progress:
                progress(probe.name, len(measured), total)
            for limit in _marked(_measure(probe, context), machine.kind):
                state = this_gpu() if machine.kind == "cuda" else None
                measured.append(_with_health(judge(limit, machine.gpu, state), state))
                if progress:
                    progress(limit.name, len(measured), total)
    except KeyboardInterrupt:
        source = f"measured in part: interrupted after {len(measured)} of {total}"
    limits = Limits(
        device=machine.device,
        kind=machine.kind,
        uuid=machine.uuid,
        driver=machine.driver,
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        source=source,
        limits=tuple(measured),
    )
    _keep(limits, machine.cache_path, quick=quick)
    return limits


def cached(machine: Machine) -> Limits | None:
    """The limits measured earlier on this device with this driver, marked as cached; None if there are none."""
    limits = read_limits(machine.cache_path)
    return limits and dataclasses.replace(limits, source=f"cached, last measured {limits.date}")


def better_before(limits: Limits) -> list[Limit]:
    """The figures of earlier runs that other commands go on with, since these, just measured, are worse (`_keep`)."""
    known = read_limits(_cache_path(limits.uuid, limits.driver))
    measured = {limit.name: limit.value for limit in limits.limits if limit.value is not None}
    return [one for one in (known.limits if known else ()) if one.value != measured.get(one.name, one.value)]


def kept(kind: Kind | None = None) -> Limits:
    """The limits measured earlier on this machine."""
    machine = this_machine(kind)
    if (limits := cached(machine)) is None:
        raise BadInput(f"nothing was measured on {machine.device} yet: `sublight limits --quick` does, in 20 s")
    return limits


def _marked(limits: Iterable[Limit], kind: Kind) -> Iterable[Limit]:
    """The host's limits with a note of how busy other programs kept the processors meanwhile."""
    watch = busy.Watch()
    for limit in limits:
        share = watch.share()
        is_hosts = kind == "cpu" or limit.name.startswith(("launch", "host"))
        if is_hosts and share is not None and share >= busy.BUSY_SHARE:
            limit = dataclasses.replace(limit, detail={**limit.detail, BUSY: round(share, 3)})
        yield limit
        watch = busy.Watch()


def _with_health(limit: Limit, state: GpuState | None) -> Limit:
    """The limit with a note of what was wrong with the GPU while it was measured."""
    words = check.wrong_with(state)
    if not words or limit.value is None:
        return limit
    return dataclasses.replace(limit, detail={**limit.detail, UNWELL: words})


def measured_busy(limits: Limits) -> list[str]:
    """The limits that were measured while others used the machine."""
    return [limit.name for limit in limits.limits if limit.value is not None and limit.detail.get(BUSY)]


def _measure(probe: Probe, context: Context) -> Iterable[Limit]:
    done: set[str] = set()
    try:
        for limit in probe.measure(context):
            done.add(limit.name)
            yield limit
    except (RuntimeError, OSError, ImportError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, ImportError) and error.name:
            reason = f"needs {error.name}: pip install 'sublight[torch]'"
        for name in probe.names_on(context.kind):
            if name not in done:
                yield Limit(name=name, unit="", unavailable=reason)


def _choose(kind: Kind, only: tuple[str, ...]) -> list[Probe]:
    here = [probe for probe in LIMITS if kind in probe.kinds]
    matches = {probe.name: {probe.name, *probe.names_on(kind), *map(family, probe.names_on(kind))} for probe in here}
    known = list(dict.fromkeys(name for names in matches.values() for name in sorted(names)))
    for name in only:
        if name not in known:
            raise BadInput(f"unknown limit {name!r} on this device: did you mean {nearest(name, known)}?")
    return [probe for probe in here if not only or matches[probe.name] & set(only)]


def family(name: str) -> str:
    """What the names of limits that stand together begin with.

    >>> family("host_copy_1")
    'host'
    """
    return name.split("_")[0]


def _keep(limits: Limits, path: Path, *, quick: bool = False) -> None:
    """Merge into the cache: a partial or --only run replaces what it measured and leaves the rest.

    A quick run may see less than a long one did, and one on a busy machine, or on one that is not well, less than on
    another: such a run only ever raises a limit, unless that was measured on such a machine, too.
    """
    if not any(limit.value is not None for limit in limits.limits):
        return
    if before := read_limits(path):
        merged = {limit.name: limit for limit in before.limits}
        for limit in limits.limits:
            before_it = merged.get(limit.name)
            if before_it is None or before_it.value is None or _replaces(limit, before_it, quick):
                merged[limit.name] = limit
        limits = dataclasses.replace(limits, limits=tuple(merged.values()))
    with contextlib.suppress(BadInput):  # a read-only home must not lose the measurement: the caller has it in any case
        write_json(limits.to_json(), path)


def _replaces(limit: Limit, before: Limit, quick: bool) -> bool:
    if limit.value is None or before.value is None:
        return limit.value is not None
    is_better = limit.value < before.value if limit.unit == "s" else limit.value > before.value
    was_busy, is_busy = (bool(one.detail.get(BUSY) or one.detail.get(UNWELL)) for one in (before, limit))
    if was_busy != is_busy:
        return was_busy or is_better
    return is_better or not (quick or is_busy)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({len(os.sched_getaffinity(0))} cores)"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()} ({os.cpu_count()} cores)"

"""What is not well with a machine: one line a problem, and what to do about it.

A problem is `wrong` where somebody should act, `worth knowing` where it only explains a figure: a GPU under full load
is held at its power cap, and that is how it should be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from sublight import units
from sublight.health.ask import MISMATCH, NEEDS_ROOT, REASONS, is_failing
from sublight.health.processes import ELSEWHERE
from sublight.health.record import GpuState, Host, Process, Snapshot, Unavailable, Versions, known

Kind = Literal[
    "lost", "throttled", "power-cap", "power-limit", "clocks", "link", "nvlink", "pages", "ecc", "xid", "shared",
    "driver", "memory", "disk", "pressure",
]  # fmt: skip
Weight = Literal["wrong", "worth knowing"]
HARMLESS_SLOWDOWNS = {"power cap": "power-cap", "clocks set by a user": "clocks", "sync boost": "clocks"}
LOWERED = 0.95  # a power limit below this share of the default was set by somebody
LEAST_MEMORY, LEAST_DISK, MOST_PRESSURE = 0.03, 0.02, 0.4
APPLICATION_XIDS = {13, 31, 43, 45, 68}  # a program's own mistake, or its end: no fault of the GPU
XIDS = {  # what the gravest mean
    48: "double-bit ECC error",
    62: "the GPU's controller halted",
    63: "a row of memory was remapped: it waits for a reset",
    64: "a row of memory could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "contained ECC error",
    95: "uncontained ECC error: reset the GPU",
    119: "the GPU's system processor does not answer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is not as it should be."""

    kind: Kind
    where: str  # GPU 0, host
    words: str
    fix: str = ""
    weight: Weight = "wrong"

    @property
    def line(self) -> str:
        return f"{self.where}: {self.words}{f'; {self.fix}' if self.fix else ''}"


def problems(snapshot: Snapshot) -> tuple[Problem, ...]:
    """The whole machine's problems, the gravest first."""
    found = [each for gpu in snapshot.gpus for each in of_gpu(gpu)]
    found += [*of_driver(dict(snapshot.without)), *of_versions(snapshot.versions), *of_host(snapshot.host)]
    return tuple(sorted(found, key=lambda problem: problem.weight != "wrong"))


def of_gpu(gpu: GpuState) -> tuple[Problem, ...]:
    """One GPU's problems; for a lost GPU that alone, since nothing else is known."""
    rules: tuple[Callable[[GpuState], Iterator[Problem]], ...]
    rules = (_lost,) if gpu.lost else (_clocks, _power_limit, _link, _nvlink, _pages, _ecc, _xids, _shared)
    return tuple(problem for rule in rules for problem in rule(gpu))


def wrong_with(gpu: GpuState | None) -> list[str]:
    """What to note with a figure that was taken on it just now. An XID may be from days ago, and the GPU well since."""
    found = of_gpu(gpu) if gpu else ()
    return [problem.words for problem in found if problem.weight == "wrong" and problem.kind != "xid"]


def of_driver(without: Mapping[str, str]) -> tuple[Problem, ...]:
    """One that gives no answer shows no GPU: nothing is known to be well. One that is not there is no problem."""
    reason = without.get("NVIDIA", "")
    if not is_failing(reason):
        return ()
    fixes = {REASONS[MISMATCH]: "reboot, or load the new module", REASONS[NEEDS_ROOT]: "run it as root"}
    fix = fixes.get(reason, "look for its reason in dmesg, and reboot")
    return (Problem(kind="driver", where="driver", words=f"gives no answer: {reason}", fix=fix),)


def of_versions(versions: Versions) -> tuple[Problem, ...]:
    """Whether the driver runs what torch was built with: an older CUDA always, a newer one of the same major."""
    driver, needed = known(versions.driver_cuda), known(versions.torch_cuda)
    if not driver or not needed or _major(driver) >= _major(needed):
        return ()
    words = f"the driver runs CUDA up to {driver}, torch {known(versions.torch) or ''} needs {needed}"
    return (Problem(kind="driver", where="driver", words=words, fix="install a newer driver, or an older torch"),)


def of_host(host: Host) -> tuple[Problem, ...]:
    found = []
    for kind, name, part, whole, least in (
        ("memory", "memory", host.host_memory_available_bytes, host.host_memory_total_bytes, LEAST_MEMORY),
        ("disk", "the disk", host.disk_free_bytes, host.disk_total_bytes, LEAST_DISK),
    ):
        left, all_of_it = known(part), known(whole)
        if left is not None and all_of_it and left < least * all_of_it:
            words = f"{units.text(left, 'B')} of {units.text(all_of_it, 'B')} of {name} are left"
            found.append(Problem(kind=kind, where="host", words=words, fix="free some"))  # type: ignore[arg-type]
    for name, share in (
        ("memory", known(host.pressure.memory_some_share)),
        ("the disk", known(host.pressure.io_full_share)),
    ):
        if share is not None and share > MOST_PRESSURE:
            words = f"work waited for {name} in {units.percent(share)} of the last ten seconds"
            found.append(Problem(kind="pressure", where="host", words=words))
    return tuple(found)


def others(gpu: GpuState) -> list[Process]:
    """The processes on a GPU that are not this one. NVML counts them as the host does: inside a container our own
    number is another, so that where this process uses CUDA, one that is not seen here is taken for ours.
    """
    running = [each for each in known(gpu.processes) or () if not each.is_own]
    seen_own = any(each.is_own for each in known(gpu.processes) or ())
    unseen = [each for each in running if each.command == ELSEWHERE]
    if unseen and not seen_own and _uses_cuda():
        running.remove(max(unseen, key=lambda each: known(each.used_bytes) or 0))
    return running


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    try:
        return bool(torch and torch.cuda.is_initialized())
    except Exception:  # a torch that is half imported, or without CUDA
        return False


def _problem(gpu: GpuState, kind: Kind, words: str, fix: str = "", weight: Weight = "wrong") -> Problem:
    fix = "" if "nvidia-smi" in fix and gpu.vendor != "NVIDIA" else fix
    return Problem(kind=kind, where=f"GPU {gpu.index}", words=words, fix=fix, weight=weight)


def _lost(gpu: GpuState) -> Iterator[Problem]:
    yield _problem(gpu, "lost", gpu.lost, "reset it (nvidia-smi --gpu-reset) or reboot; look for its XID in dmesg")


def _clocks(gpu: GpuState) -> Iterator[Problem]:
    slowed_by = known(gpu.clocks.slowed_by) or ()
    harmful = [words for words in slowed_by if words not in HARMLESS_SLOWDOWNS]
    clock = units.text(known(gpu.clocks.sm_clock_hz), "Hz")
    if harmful:
        heat, least = known(gpu.power.temperature_c), known(gpu.power.slowdown_c)
        at = f" at {heat:.0f} °C" + (f", slowdown from {least:.0f} °C" if least else "") if heat is not None else ""
        fix = "look at its cooling" if any("thermal" in words for words in harmful) else "look at its power supply"
        yield _problem(gpu, "throttled", f"throttled ({', '.join(harmful)}) to {clock}{at}", fix)
    for words, kind in HARMLESS_SLOWDOWNS.items():
        if words in slowed_by:
            yield _problem(gpu, kind, f"clock held at {clock} ({words})", weight="worth knowing")  # type: ignore[arg-type]


def _power_limit(gpu: GpuState) -> Iterator[Problem]:
    limit, default = known(gpu.power.power_limit_w), known(gpu.power.power_default_w)
    if limit and default and limit < LOWERED * default:
        fix = f"nvidia-smi -i {gpu.index} -pl {default:.0f} sets it back"
        yield _problem(gpu, "power-limit", f"power limit is {limit:.0f} W, not {default:.0f} W", fix)


def _link(gpu: GpuState) -> Iterator[Problem]:
    """A narrow link is wrong at any time; a slow one only under load: an idle GPU lowers its generation by itself."""
    link = gpu.link
    width, width_max = known(link.pcie_width), known(link.pcie_width_max)
    generation, generation_max = known(link.pcie_generation), known(link.pcie_generation_max)
    is_narrow = bool(width and width_max and width < width_max)
    is_slow = bool(generation and generation_max and generation < generation_max)
    if is_narrow or (is_slow and known(gpu.clocks.performance_state) == 0):
        now, most = f"PCIe {generation or '?'}.0 x{width or '?'}", f"PCIe {generation_max or '?'}.0 x{width_max or '?'}"
        yield _problem(gpu, "link", f"link runs at {now}, not {most}", "reseat the card or its riser, check the BIOS")


def _nvlink(gpu: GpuState) -> Iterator[Problem]:
    links, active = known(gpu.link.nvlinks), known(gpu.link.nvlinks_active)
    if links and active and active < links:  # none at all is a GPU that is not wired to another
        yield _problem(gpu, "nvlink", f"{active} of {links} NVLinks are up", "nvidia-smi nvlink -s lists them")


def _pages(gpu: GpuState) -> Iterator[Problem]:
    if known(gpu.errors.remap_failed):
        yield _problem(gpu, "pages", "a row of memory could not be remapped", "have the card replaced")
    elif known(gpu.errors.remap_pending) or known(gpu.errors.retirement_pending):
        what = "rows of memory wait to be remapped" if known(gpu.errors.remap_pending) else "pages wait to be retired"
        yield _problem(gpu, "pages", what, f"reset the GPU: nvidia-smi -i {gpu.index} --gpu-reset")


def _ecc(gpu: GpuState) -> Iterator[Problem]:
    if count := known(gpu.errors.ecc_uncorrected):
        words = f"{count} uncorrected ECC error{'s' if count > 1 else ''} since the driver was loaded"
        yield _problem(gpu, "ecc", words, "results since then may be wrong; reset the GPU")


def _xids(gpu: GpuState) -> Iterator[Problem]:
    """The last of each number; a program's own mistakes are no fault of the GPU."""
    for xid in {each.number: each for each in known(gpu.xids) or ()}.values():
        words = XIDS.get(xid.number, "") or xid.words or "see NVIDIA's list of XIDs"
        age_s = known(xid.age_s)
        words += f", {units.ago(age_s)}" if age_s is not None else ""
        is_own_fault = xid.number in APPLICATION_XIDS
        yield _problem(gpu, "xid", f"XID {xid.number}: {words}", weight="worth knowing" if is_own_fault else "wrong")


def _shared(gpu: GpuState) -> Iterator[Problem]:
    """One line however many: who they are, `top` shows."""
    if running := others(gpu):
        sizes = [size for each in running if (size := known(each.used_bytes)) is not None]
        least = "at least " if len(sizes) < len(running) else ""
        used = f"; {least}{units.text(sum(sizes), 'B')}" if sizes else ""
        names = [f"{each.pid} {_short(each)}".strip() for each in running[:2]]
        more = f" and {len(running) - 2} more" if len(running) > 2 else ""
        many = "another process" if len(running) == 1 else f"{len(running)} other processes"
        yield _problem(gpu, "shared", f"{many} on it ({', '.join(names)}{more}{used})")


def _short(process: Process) -> str:
    command = process.command
    return "" if isinstance(command, Unavailable) else command.split(" ")[0].rpartition("/")[2][:24]


def _major(version: str) -> int:
    return int(version.split(".")[0])

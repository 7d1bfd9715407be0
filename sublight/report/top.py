"""The machine's state for people: what is not well, one GPU in detail or several in a table, the host, the processes.

Curves take the columns that values and notes leave, processes the lines that the rest leaves: at 80 × 24 all is there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.health.check import Problem, of_gpu, problems
from sublight.health.record import GpuState, Host, Number, Process, Snapshot, Unavailable, known
from sublight.report.draw.tables import note, plain
from sublight.report.limits import sparkline

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

    from sublight.top.diagnose import Diagnosis
    from sublight.top.history import History

NAME_COLUMNS, VALUE_COLUMNS, NOTE_COLUMNS, MOST_CURVE_COLUMNS = 9, 20, 28, 60
MOST_PROCESSES, TABLE_HEAD = 8, 2
Row = tuple[str, str, str, str]  # name, value now, curve, note


def page(snapshot: Snapshot, history: History, *, lines: int | None = None) -> RenderableType:
    """The whole view. `lines`: the terminal's height that it must fit; long lines are then cut, else wrapped."""
    from rich.console import Group
    from rich.text import Text

    wrong = problems(snapshot)
    title = heading(snapshot, "" if lines is None else "q quits")
    parts: list[RenderableType] = [Text(title, style="bold", no_wrap=True, overflow="ellipsis")]
    parts += [_line(problem, cut=lines is not None) for problem in wrong]
    rows: list[Row] = []
    if len(snapshot.gpus) == 1:
        rows = list(gpu_rows(snapshot.gpus[0], history))
    elif snapshot.gpus:
        parts.append(gpus_table(snapshot.gpus, history))
    rows += host_rows(snapshot.host, history, brief=bool(snapshot.gpus))
    parts.append(_Rows(tuple(rows)))
    if not snapshot.gpus:
        parts += [note(f"no GPU of {vendor}: {reason}") for vendor, reason in snapshot.without]
    if held := [(gpu, each) for gpu in snapshot.gpus for each in known(gpu.processes) or ()]:
        taken = 1 + len(wrong) + len(rows) + (len(snapshot.gpus) + TABLE_HEAD if len(snapshot.gpus) > 1 else 0)
        most = MOST_PROCESSES if lines is None else min(lines - taken - TABLE_HEAD, MOST_PROCESSES)
        if most > 0:
            parts.append(processes_table(held, most))
    return Group(*parts)


def heading(snapshot: Snapshot, keys: str = "") -> str:
    """
    >>> heading(Snapshot(time_s=0, host=Host(cpu="EPYC", cpus=2)))
    'EPYC, 2 CPUs · 00:00:00'
    """
    names = dict.fromkeys(gpu.name for gpu in snapshot.gpus)
    counts = {name: sum(gpu.name == name for gpu in snapshot.gpus) for name in names}
    devices = ", ".join(name if counts[name] == 1 else f"{counts[name]} × {name}" for name in names)
    versions = snapshot.versions
    cuda = f" (CUDA {known(versions.driver_cuda)})" if known(versions.driver_cuda) else ""
    parts = (
        devices or f"{snapshot.host.cpu}, {snapshot.host.cpus} CPUs",
        time.strftime("%H:%M:%S", time.gmtime(snapshot.time_s)),
        keys,
        f"driver {versions.driver}{cuda}" if known(versions.driver) else "",
        f"torch {versions.torch}" if snapshot.gpus and isinstance(versions.torch, str) else "",
    )
    return " · ".join(part for part in parts if part)


def gpu_rows(gpu: GpuState, history: History) -> Iterator[Row]:
    """One GPU in detail; the last column says why a value is not available."""
    activity, clocks, power, link, errors = gpu.activity, gpu.clocks, gpu.power, gpu.link, gpu.errors

    def curve(name: str, top: float | None = 1.0) -> str:
        return _curve(history.series(gpu.uuid, name), top)

    def share(name: str, label: str, words: str = "") -> Row:
        value: Number = getattr(activity, name)
        return label, _share(value), curve(name), _reason(value) or words

    if known(activity.sm_share) is None:
        yield share("gpu_share", "busy", "of the time a kernel ran, however small")
    yield share("sm_share", "SM", f"occupancy {_share(activity.occupancy_share)}")
    if known(activity.sm_share) is not None:
        vector = f"fp32 {_share(activity.fp32_share)}, fp16 {_share(activity.fp16_share)}"
        yield share("tensor_share", "tensor", vector)
        yield share("memory_share", "bandwidth", "of the memory's")
    both = (activity.pcie_received_bytes_per_s, activity.pcie_sent_bytes_per_s)
    yield "PCIe", _both(both), curve("pcie_received_bytes_per_s", None), _link_words(gpu)
    both = (activity.nvlink_received_bytes_per_s, activity.nvlink_sent_bytes_per_s)
    if known(link.nvlinks_active):
        words = f"{link.nvlinks_active} of {link.nvlinks} links up"
        yield "NVLink", _both(both), curve("nvlink_received_bytes_per_s", None), words
    slowed_by, most = clocks.slowed_by, known(clocks.sm_clock_max_hz)
    held = _reason(slowed_by) if isinstance(slowed_by, Unavailable) else ", ".join(slowed_by) or "nothing slows it"
    yield "clock", _of(clocks.sm_clock_hz, clocks.sm_clock_max_hz, "Hz"), curve("sm_clock_hz", most), held
    words = _reason(power.power_w) or f"limit by default {units.text(known(power.power_default_w), 'W')}"
    yield "power", _of(power.power_w, power.power_limit_w, "W"), curve("power_w", known(power.power_limit_w)), words
    yield "heat", _celsius(power.temperature_c), curve("temperature_c", known(power.slowdown_c)), _heat_words(gpu)
    used, total = gpu.memory.memory_used_bytes, gpu.memory.memory_total_bytes
    yield "memory", _of(used, total, "B"), curve("memory_used_bytes", known(total)), _reason(used) or ""
    for part in gpu.instances:
        yield "  MIG", _of(part.mig_used_bytes, part.mig_total_bytes, "B"), "", str(known(part.mig_name) or "")
    if (known(activity.encoder_share) or 0) + (known(activity.decoder_share) or 0) > 0:
        video = f"{_share(activity.encoder_share)} / {_share(activity.decoder_share)}"
        yield "video", video, curve("decoder_share"), "encoder / decoder"
    yield "errors", _ecc_words(gpu), "", _reason(errors.ecc_uncorrected) or _pages_words(gpu)
    yield "XIDs", _xid_words(gpu), "", _reason(gpu.xids) or gpu.xids_from


def host_rows(host: Host, history: History, *, brief: bool) -> Iterator[Row]:
    """The host: three lines below GPUs, all of its lines where there is no GPU."""

    def curve(name: str, top: float | None = 1.0) -> str:
        return _curve(history.series("host", name), top)

    pressure = host.pressure
    load = f"{host.cpus} CPUs, load {known(host.load_1min) or 0:.1f}"
    yield "CPU", _share(host.cpu_share), curve("cpu_share"), _reason(host.cpu_share) or load
    total, available = known(host.host_memory_total_bytes), known(host.host_memory_available_bytes)
    used: Number = host.host_memory_available_bytes  # type: ignore[assignment]
    if total is not None and available is not None:
        used = total - available
    swap = known(host.swap_used_bytes)
    words = f"swap {units.text(swap, 'B')}" if swap else ""
    free = [total - value if total and value is not None else None for value in
            history.series("host", "host_memory_available_bytes")]  # fmt: skip
    label = "host mem" if brief else "memory"
    yield label, _of(used, host.host_memory_total_bytes, "B"), _curve(free, total), _reason(used) or words
    waits = f"memory {_share(pressure.memory_some_share)}, disk {_share(pressure.io_some_share)}"
    yield (
        "waited",
        f"CPU {_share(pressure.cpu_some_share)}",
        curve("cpu_some_share"),
        _reason(pressure.cpu_some_share) or waits,
    )
    if not brief:
        disk = (host.disk_read_bytes_per_s, host.disk_write_bytes_per_s)
        left = f"read, written; {units.text(known(host.disk_free_bytes), 'B')} free here"
        yield "disk", _both(disk), curve("disk_write_bytes_per_s", None), _reason(disk[0]) or left
        net = (host.net_received_bytes_per_s, host.net_sent_bytes_per_s)
        yield "network", _both(net), curve("net_received_bytes_per_s", None), _reason(net[0]) or "received, sent"


def gpus_table(gpus: Sequence[GpuState], history: History) -> Table:
    """Several GPUs, one line each."""
    names = ("GPU", "SM", "", "tensor", "bandw.", "clock", "power", "heat", "memory")
    out = plain(names, right=("SM", "tensor", "bandw.", "clock", "power", "heat", "memory"))
    for gpu in gpus:
        busy = "sm_share" if known(gpu.activity.sm_share) is not None else "gpu_share"
        out.add_row(
            f"[bold red]{gpu.index}[/]" if any(each.weight == "wrong" for each in of_gpu(gpu)) else str(gpu.index),
            _share(getattr(gpu.activity, busy)),
            _curve(history.series(gpu.uuid, busy), 1.0)[-12:],
            _share(gpu.activity.tensor_share),
            _share(gpu.activity.memory_share),
            units.text(known(gpu.clocks.sm_clock_hz), "Hz"),
            units.text(known(gpu.power.power_w), "W"),
            _celsius(gpu.power.temperature_c),
            units.text(known(gpu.memory.memory_used_bytes), "B"),
        )
    return out


def processes_table(held: Sequence[tuple[GpuState, Process]], most: int) -> Table:
    """Who holds memory, the largest first; the last line may say how many more there are."""
    out = plain(("GPU", "pid", "holds", "container", "command"), right=("GPU", "pid", "holds"), fold=("command",))
    largest = sorted(held, key=lambda pair: known(pair[1].used_bytes) or 0, reverse=True)
    shown = largest if len(largest) <= most else largest[: most - 1]
    for gpu, process in shown:
        words = process.command.reason if isinstance(process.command, Unavailable) else process.command
        size = units.text(known(process.used_bytes), "B")
        container = known(process.container) or "–"
        out.add_row(str(gpu.index), str(process.pid), size, container, note(words))
    if len(shown) < len(held):
        out.add_row("", "", "", "", note(f"… and {len(held) - len(shown)} more"))
    return out


def check_lines(wrong: Sequence[Problem], snapshot: Snapshot) -> list[str]:
    """What `--check` prints: a line a problem, or one that says what was looked at."""
    if wrong:
        return [problem.line for problem in wrong]
    gpus = f"{len(snapshot.gpus)} GPU{'s' if len(snapshot.gpus) > 1 else ''} and " if snapshot.gpus else ""
    return [f"well: {gpus}the host"]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Name, value, curve and note under one another; the curve shows as many of the last looks as there is room for."""

    rows: tuple[Row, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        from rich.table import Table

        room = options.max_width - NAME_COLUMNS - VALUE_COLUMNS - NOTE_COLUMNS - 3
        longest = max((len(curve) for _, _, curve, _ in self.rows), default=0)
        columns = min(longest, max(room, 8), MOST_CURVE_COLUMNS)
        out = Table.grid(padding=(0, 1))
        out.add_column(min_width=NAME_COLUMNS, no_wrap=True, style="bold")
        out.add_column(min_width=VALUE_COLUMNS, no_wrap=True)
        out.add_column(min_width=columns if longest > 1 else 0, no_wrap=True, style="cyan")
        out.add_column(no_wrap=True, overflow="ellipsis", style="dim")
        for name, value, curve, words in self.rows:
            out.add_row(name, value, curve[-columns:] if longest > 1 else "", note(words))  # one look is no curve
        yield out


def diagnosis(result: Diagnosis) -> RenderableType:
    """The levels of `--diagnose`, and its verdict."""
    from rich.console import Group
    from rich.text import Text

    names = ("level", "reached", "of its kind", "clock", "power", "heat", "slowed by")
    out = plain(names, right=names[1:6], fold=("slowed by",))
    for level in result.levels:
        out.add_row(
            level.name,
            units.text(level.value, level.unit),
            units.percent(level.share),
            units.text(level.clock_hz, "Hz"),
            units.text(level.power_w, "W"),
            "–" if level.temperature_c is None else f"{level.temperature_c:.0f} °C",
            note(", ".join(level.slowed_by)),
        )
    lines = [_line(problem, cut=False) for problem in result.problems]
    verdict = Text(result.verdict, style="bold green" if result.is_well else "bold red")
    return Group(Text(result.name, style="bold"), out, *lines, verdict)


def _line(problem: Problem, *, cut: bool) -> Text:
    from rich.text import Text

    style = "bold red" if problem.weight == "wrong" else "yellow"
    words = f"{'✗' if problem.weight == 'wrong' else '·'} {problem.line}"
    return Text(words, style=style, no_wrap=cut, overflow="ellipsis" if cut else None)


def _curve(series: Sequence[float | None], top: float | None) -> str:
    """The last values, a gap where there was none. Without a top, the highest of them is it.

    >>> _curve([0.0, 0.5, None, 1.0], 1.0), _curve([None], 1.0), _curve([2.0, 8.0], None)
    ('▁▄ █', '', '▂█')
    """
    values = [value for value in series if value is not None]
    highest = top or max(values, default=0.0)
    if not values or highest <= 0:
        return ""
    return "".join(" " if value is None else sparkline([value], highest) for value in series[-MOST_CURVE_COLUMNS:])


def _reason(value: Any) -> str:
    return value.reason if isinstance(value, Unavailable) else ""


def _share(value: Number) -> str:
    return units.percent(known(value))


def _of(part: Number, whole: Number, unit: str) -> str:
    now, most = known(part), known(whole)
    return units.part_of(now, most, unit) if now is not None and most else units.text(now, unit)


def _both(rates: tuple[Number, Number]) -> str:
    """
    >>> _both((2.5e6, 1.25e9)), _both((0.0, Unavailable("no counter")))
    ('2.50 MB/s, 1.25 GB/s', '0 B/s, –')
    """
    if all(known(rate) is None for rate in rates):
        return "–"
    return ", ".join(units.text(known(rate), "B/s") for rate in rates)


def _celsius(value: Number) -> str:
    degrees = known(value)
    return "–" if degrees is None else f"{degrees:.0f} °C"


def _heat_words(gpu: GpuState) -> str:
    power = gpu.power
    parts = (
        f"slows at {_celsius(power.slowdown_c)}" if known(power.slowdown_c) is not None else "",
        f"memory {_celsius(power.memory_temperature_c)}" if known(power.memory_temperature_c) is not None else "",
        f"fan {_share(power.fan_share)}" if known(power.fan_share) is not None else "",
    )
    return _reason(power.temperature_c) or ", ".join(part for part in parts if part)


def _link_words(gpu: GpuState) -> str:
    link = gpu.link
    if known(link.pcie_generation) is None or known(link.pcie_width) is None:
        return _reason(link.pcie_generation) or _reason(link.pcie_width)
    most = f" of {known(link.pcie_generation_max) or '?'}.0 x{known(link.pcie_width_max) or '?'}"
    return f"{link.pcie_generation}.0 x{link.pcie_width}{most}; in, out"


def _ecc_words(gpu: GpuState) -> str:
    if known(gpu.errors.ecc_enabled) is False:
        return "ECC is off"
    count = known(gpu.errors.ecc_uncorrected)
    return "ECC –" if count is None else f"ECC {count} uncorrected"


def _pages_words(gpu: GpuState) -> str:
    errors = gpu.errors
    rows = known(errors.remapped_uncorrectable)
    if rows is not None:
        return f"{rows + (known(errors.remapped_correctable) or 0)} rows remapped"
    pages = known(errors.retired_double_bit)
    return "" if pages is None else f"{pages + (known(errors.retired_single_bit) or 0)} pages retired"


def _xid_words(gpu: GpuState) -> str:
    xids = known(gpu.xids)
    if xids is None:
        return "–"
    return ", ".join(str(number) for number in dict.fromkeys(xid.number for xid in xids)) or "none"

"""The table of known GPUs, one GPU's figures with their sources, and the arithmetic behind its peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sublight import gpus, units
from sublight.gpus import Gpu
from sublight.report.draw.tables import Fitting, plain

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

OVERVIEW_PEAKS = ("fp32", "fp16", "fp8")  # bf16 runs at fp16's rate where there is one
_UNITS = {"_bytes_per_s": "B/s", "_transfers_per_s": "T/s", "_bytes": "B", "_bytes_per_sm": "B", "_hz": "Hz", "_w": "W"}
_TABLES = {"peak_flops": "peak", "flops_per_clock_per_sm": "per clock and SM", "reached": "reached"}
_BINARY = {"memory_bytes", "l2_bytes", "l3_bytes", "shared_bytes_per_sm", "register_bytes_per_sm"}
_TEXT = {"key", "name", "aliases", "vendor", "notes", "sources", "max_clock_dtypes"}


def figure_text(figure: str, value: Any) -> str:
    """A figure as people read it: capacities in binary units, everything else in decimal ones.

    >>> figure_text("l2_bytes", 62914560), figure_text("memory_bytes_per_s", 4.8e12), figure_text("sms", 132)
    ('60 MiB', '4.80 TB/s', '132')
    >>> figure_text("peak_flops.int8", 1979e12), figure_text("reached.hbm_copy", 4.27e12)
    ('1.98 POP/s', '4.27 TB/s')
    """
    if value is None:
        return "–"
    table, _, entry = figure.rpartition(".")
    if table == "peak_flops":
        return units.text(value, "OP/s" if entry.startswith("int") else "FLOP/s")
    if table == "reached":
        return units.text(value, _reached_unit(entry))
    if table:
        return f"{value:g}"
    if figure in _BINARY:
        return _binary_text(value)
    unit = next((unit for suffix, unit in _UNITS.items() if figure.endswith(suffix)), "")
    return units.text(value, unit) if unit else _plain(value)


def _reached_unit(limit: str) -> str:
    if limit.startswith(("matmul", "vector")):
        return "OP/s" if "int" in limit else "FLOP/s"
    return "s" if limit.startswith(("launch", "latency", "sync")) else "B/s"


def _binary_text(value: int) -> str:
    for power, prefix in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if value >= 1 << power:
            return f"{value / (1 << power):.3g} {prefix}B"
    return f"{value} B"


def _plain(value: Any) -> str:
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)


def table(known: Sequence[Gpu], *, without: Collection[str] = ()) -> Table:
    """The overview: one line for each GPU."""
    lines = [_line(gpu) for gpu in known]
    names = [name for name in lines[0] if name not in without]
    out = plain(names, right=[name for name in names if name not in ("GPU", "architecture")])
    for line in lines:
        out.add_row(*(line[name] for name in names))
    return out


def _line(gpu: Gpu) -> dict[str, str]:
    cores = f" TC{gpu.tensor_core_generation}" if gpu.tensor_core_generation else ""
    return {
        "GPU": gpu.key,
        "year": figure_text("year", gpu.year),
        "architecture": f"{gpu.architecture or '–'}{cores}",
        "SMs": figure_text("sms", gpu.sms),
        "clock": units.text(gpu.boost_clock_hz, "Hz"),
        "memory": figure_text("memory_bytes", gpu.memory_bytes).removesuffix("iB"),
        "bandwidth": units.text(gpu.memory_bytes_per_s, "B/s"),
        "L2": figure_text("l2_bytes", gpu.l2_bytes).removesuffix("iB"),
        **{dtype: units.text(gpu.peak_flops.get(dtype), "").rstrip() for dtype in OVERVIEW_PEAKS},
        "W": "–" if gpu.power_w is None else f"{gpu.power_w:.0f}",
    }


def overview(known: Sequence[Gpu]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    notes = (
        "Peaks are dense, in FLOP/s. TC4: tensor cores of the fourth generation. Memory in GiB, L2 in MiB.",
        "All figures with their sources: `sublight gpus NAME`; the arithmetic: `sublight gpus --explain NAME`.",
    )
    shown = Fitting((table(known), table(known, without=("clock", "L2", "W"))))
    return Group(shown, Text(""), *(Text(note, style="dim") for note in notes))


def figures(gpu: Gpu) -> Iterator[tuple[str, Any]]:
    """The names of all known figures; those of inner tables as `peak_flops.bf16`."""
    for item in dataclasses.fields(gpu):
        value = getattr(gpu, item.name)
        if item.name in _TABLES:
            yield from ((f"{item.name}.{entry}", figure) for entry, figure in value.items())
        elif item.name not in _TEXT and value is not None:
            yield item.name, value


def figure_name(figure: str) -> str:
    """
    >>> figure_name("peak_flops.bf16"), figure_name("memory_bytes_per_s"), figure_name("reached.hbm_copy")
    ('peak bf16', 'memory rate', 'reached hbm_copy')
    """
    table, _, entry = figure.rpartition(".")
    if table:
        return f"{_TABLES[table]} {entry}" if table != "flops_per_clock_per_sm" else f"{entry} {_TABLES[table]}"
    for suffix, words in (("_bytes_per_sm", " per SM"), ("_bytes_per_s", " rate"), ("_transfers_per_s", " transfers")):
        figure = figure.replace(suffix, words)
    figure = figure.replace("sms", "SMs").replace("l2", "L2").replace("l3", "L3").replace("pcie", "PCIe")
    return figure.removesuffix("_bytes").removesuffix("_hz").removesuffix("_w").replace("_", " ")


def sheet(known: Sequence[Gpu]) -> RenderableType:
    """All figures of one GPU with their sources, or of several side by side."""
    from rich.console import Group
    from rich.text import Text

    names = [gpu.name for gpu in known]
    out = plain(["figure", *names, *(["source"] if len(known) == 1 else [])], right=[*names, "source"])
    values = [dict(figures(gpu)) for gpu in known]
    sources: dict[str, int] = {}
    order = [item.name for item in dataclasses.fields(Gpu)]
    seen = dict.fromkeys(figure for gpu in values for figure in gpu)
    for figure in sorted(seen, key=lambda figure: order.index(figure.split(".")[0])):
        cells = [figure_text(figure, gpu.get(figure)) for gpu in values]
        if len(known) == 1 and (source := known[0].sources.get(figure)):
            cells.append(str(sources.setdefault(source, len(sources) + 1)))
        out.add_row(figure_name(figure), *cells)
    lines = [f"{number:2} {source}" for source, number in sources.items()]
    notes = [f"{gpu.name}, {figure_name(figure)}: {note}" for gpu in known for figure, note in gpu.notes.items()]
    return Group(out, *(Text(line, style="dim") for line in ["", *lines, *notes]))


def explain(gpu: Gpu) -> RenderableType:
    """The peaks' arithmetic, the share of each that was reached, and how much arithmetic each byte must feed."""
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    headings = ("peak", "arithmetic", "vendor", "reached", "FLOP/B")
    out = plain(headings, right=("vendor", "reached", "FLOP/B"), fold=("arithmetic",))
    memory = _peak(gpu, "memory")
    out.add_row("memory", *_explained(memory, gpu.memory_bytes_per_s, "B/s", gpu.reached.get("hbm_copy")), "")
    for dtype in gpu.flops_per_clock_per_sm:
        peak = _peak(gpu, dtype)
        vendor = None if gpu.sources.get(f"peak_flops.{dtype}", "").startswith("derived") else gpu.peak_flops.get(dtype)
        ridge = f"{peak.value / memory.value:.0f}" if peak and memory else "–"
        cells = _explained(peak, vendor, _reached_unit(f"matmul_{dtype}"), _reached(gpu, dtype))
        out.add_row(dtype.replace("_tensor", " TC"), *map(escape, cells), ridge)
    title = Text(f"{gpu.name}: SMs × FLOP per clock and SM × clock", style="bold")
    lines = (
        "reached: what was measured on one, as a share of the arithmetic's peak",
        "FLOP/B: a kernel that does less arithmetic than this for each byte is bound by memory",
    )
    notes = [Text(line, style="dim") for line in lines]
    notes += [Text(f"{figure_name(figure)}: {note}", style="dim") for figure, note in gpu.notes.items()]
    return Group(title, out, Text(""), *notes)


def _reached(gpu: Gpu, dtype: str) -> float | None:
    """The rate measured on the unit of this peak: fp64 products run on tensor cores where there are any."""
    if dtype == "fp64_tensor":
        return gpu.reached.get("matmul_fp64")
    vector = gpu.reached.get(f"vector_{dtype}")
    return vector if vector or dtype == "fp64" else gpu.reached.get(f"matmul_{dtype}")


def _peak(gpu: Gpu, what: str) -> gpus.Peak | None:
    try:
        return gpus.memory_peak(gpu) if what == "memory" else gpus.theoretical_peak(gpu, what)
    except gpus.UnknownFigure:
        return None


def _explained(peak: gpus.Peak | None, vendor: float | None, unit: str, reached: float | None) -> tuple[str, str, str]:
    share = units.percent(reached / peak.value if reached and peak else None)
    arithmetic = peak.arithmetic.replace(" x ", " × ") if peak else "its clock or its rate is not known"
    return arithmetic, units.text(vendor, unit), share


def to_json(known: Sequence[Gpu], *, explained: bool = False) -> list[dict[str, Any]]:
    """Every figure and its source; with the arithmetic where it was asked for."""
    out = []
    for gpu in known:
        row = dataclasses.asdict(gpu)
        if explained:
            peaks = {dtype: _peak(gpu, dtype) for dtype in ("memory", *gpu.flops_per_clock_per_sm)}
            row["theoretical"] = {name: dataclasses.asdict(peak) for name, peak in peaks.items() if peak}
        out.append(row)
    return out

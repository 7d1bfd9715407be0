"""Known GPUs, each figure with its source, and the peaks that follow: SMs x FLOP per clock per SM x clock.

The figures are in gpus.toml. A GPU that is not there is derived from device properties and its architecture's rates.
"""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

DERIVED = "derived from device properties"
_STRUCTURE = {"key", "name", "aliases", "vendor", "architecture", "like", "source", "notes"}  # the rest are figures
_STRUCTURE |= {"compute_capability", "gfx", "max_clock_dtypes"}
_NOISE = {"nvidia", "amd", "intel", "tesla", "geforce", "instinct", "graphics", "gpu", "corporation", "r", "tm"}
_UNITS = {"NVIDIA": "SM", "AMD": "CU", "Intel": "Xe core"}  # what a vendor calls its multiprocessors
_PCIE_TRANSFERS_PER_S = {"3.0": 8e9, "4.0": 16e9, "5.0": 32e9}  # per lane; 128 of 130 bits are data

_Figures = dict[str, tuple[Any, str]]  # figure -> value, citation


class UnknownGpu(ValueError):
    """No GPU of that name is in the table; the message names the nearest ones."""


class UnknownFigure(ValueError):
    """The figure asked for is not known for this GPU; the message says which are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU in SI units; None or an absent key is "not known". Peaks are dense, link rates are one direction."""

    key: str  # one lowercase word: h200
    name: str
    aliases: tuple[str, ...] = ()
    vendor: str = "NVIDIA"
    year: int | None = None
    architecture: str | None = None
    compute_capability: tuple[int, int] | None = None
    gfx: str | None = None  # AMD's name of the instruction set: gfx942
    tensor_core_generation: int | None = None
    sms: int | None = None  # compute units on AMD, Xe cores on Intel
    base_clock_hz: float | None = None
    boost_clock_hz: float | None = None  # the clock behind the vendor's peaks
    max_clock_hz: float | None = None  # the highest clock where it differs: behind the peaks in max_clock_dtypes
    max_clock_dtypes: tuple[str, ...] = ()
    memory_bytes: int | None = None
    memory_kind: str | None = None
    memory_bytes_per_s: float | None = None
    memory_bus_bits: int | None = None
    memory_transfers_per_s: float | None = None  # per pin
    l2_bytes: int | None = None
    l3_bytes: int | None = None
    shared_bytes_per_sm: int | None = None
    register_bytes_per_sm: int | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)  # the vendor's; where it gives none, the arithmetic's
    flops_per_clock_per_sm: Mapping[str, float] = field(default_factory=dict)
    copy_engines: int | None = None
    encoders: int | None = None
    decoders: int | None = None
    pcie: str | None = None  # "5.0 x16"
    pcie_bytes_per_s: float | None = None
    nvlink_bytes_per_s: float | None = None
    c2c_bytes_per_s: float | None = None
    power_w: float | None = None
    reached: Mapping[str, float] = field(default_factory=dict)  # by limit: hbm_copy, matmul_bf16, h2d_pinned, ...
    notes: Mapping[str, str] = field(default_factory=dict)  # figure -> what to know about it
    sources: Mapping[str, str] = field(default_factory=dict)  # figure, such as peak_flops.bf16 -> citation

    def clock_hz(self, dtype: str) -> float | None:
        """The clock behind the peak of this data type."""
        return self.max_clock_hz if dtype in self.max_clock_dtypes and self.max_clock_hz else self.boost_clock_hz


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A theoretical rate and the arithmetic that gives it."""

    value: float  # FLOP/s, OP/s or bytes/s
    arithmetic: str


def all_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the table, oldest architecture first.

    >>> [gpu.key for gpu in all_gpus()][:3]
    ['p4', 'v100', 'v10032']
    """
    return tuple(_table().values())


def find(name: str) -> Gpu:
    """The GPU of that name, as people or as torch and nvidia-smi write it.

    >>> find("h200").name, find("NVIDIA GeForce RTX 4090").key, find("Tesla V100-SXM2-16GB").key
    ('H200 SXM', 'rtx4090', 'v100')
    >>> find("h220")
    Traceback (most recent call last):
    sublight.gpus.UnknownGpu: unknown GPU 'h220': nearest are h200, gh200, h100; `sublight gpus` lists every known one
    """
    spellings = _spellings()
    word = _one_word(name)
    if word in spellings:
        return _table()[spellings[word]]
    close = difflib.get_close_matches(word, spellings, n=8, cutoff=0.5)
    nearest = list(dict.fromkeys(spellings[spelling] for spelling in close))[:3]
    near = f"nearest are {', '.join(nearest)}; " if nearest else ""
    raise UnknownGpu(f"unknown GPU {name!r}: {near}`sublight gpus` lists every known one")


def theoretical_peak(gpu: Gpu, dtype: str) -> Peak:
    """SMs x FLOP per clock per SM x clock.

    >>> theoretical_peak(find("h200"), "bf16").arithmetic
    '132 SMs x 4096 FLOP/clock/SM x 1.830 GHz = 989.4 TFLOP/s'
    """
    rate, clock_hz = gpu.flops_per_clock_per_sm.get(dtype), gpu.clock_hz(dtype)
    if rate is None or clock_hz is None or gpu.sms is None:
        raise UnknownFigure(f"no {dtype} peak is known for {gpu.name}: known are {', '.join(gpu.peak_flops) or 'none'}")
    value = gpu.sms * rate * clock_hz
    unit, work = _UNITS[gpu.vendor], ("OP" if dtype.startswith("int") else "FLOP")
    factors = f"{gpu.sms} {unit}s x {rate:.0f} {work}/clock/{unit} x {clock_hz / 1e9:.3f} GHz"
    return Peak(value=value, arithmetic=f"{factors} = {_tera(value)}{work}/s")


def memory_peak(gpu: Gpu) -> Peak:
    """Bus width x transfers per second where both are known, else the vendor's figure.

    >>> memory_peak(find("h200")).arithmetic
    '6016 bit x 6.402 GT/s / 8 bit/B = 4.814 TB/s'
    """
    if gpu.memory_bus_bits and gpu.memory_transfers_per_s:
        value = gpu.memory_bus_bits * gpu.memory_transfers_per_s / 8
        factors = f"{gpu.memory_bus_bits} bit x {gpu.memory_transfers_per_s / 1e9:.3f} GT/s / 8 bit/B"
        return Peak(value=value, arithmetic=f"{factors} = {_tera(value, digits=3)}B/s")
    if gpu.memory_bytes_per_s is None:
        raise UnknownFigure(f"no memory bandwidth is known for {gpu.name}: measure it with `sublight limits`")
    value = gpu.memory_bytes_per_s
    source = ", ".join(gpu.sources["memory_bytes_per_s"].split(", ")[:2])  # author and title; `sources` has all of it
    return Peak(value=value, arithmetic=f"{_tera(value, digits=3)}B/s ({source})")


def derive(
    name: str,
    compute_capability: tuple[int, int] | None,
    sms: int,
    clock_hz: float | None,
    memory_bytes: int,
    l2_bytes: int | None = None,
    memory_clock_hz: float | None = None,
    bus_bits: int | None = None,
    *,
    gfx: str | None = None,
    shared_bytes_per_sm: int | None = None,
    register_bytes_per_sm: int | None = None,
) -> Gpu:
    """A GPU that is not in the table, from what its driver reports and its architecture's rates.

    clock_hz is the highest clock; memory_clock_hz as CUDA reports it, two transfers a clock. Of an architecture that is
    not in the table, only the properties themselves are known.

    >>> nvl = derive("NVIDIA H100 NVL", (9, 0), 132, 1.785e9, 94 << 30, 60 << 20, 2.619e9, 6144)
    >>> theoretical_peak(nvl, "bf16").arithmetic
    '132 SMs x 4096 FLOP/clock/SM x 1.650 GHz = 891.9 TFLOP/s'
    >>> derive("NVIDIA X1", (99, 0), 100, 2e9, 64 << 30).peak_flops
    {}
    """
    capability = ".".join(map(str, compute_capability)) if compute_capability and not gfx else None
    target = {"gfx": gfx} if gfx else {"compute_capability": capability}
    matches = (entry for entry in _data()["architecture"].values() if target.items() <= entry.items())
    architecture: dict[str, Any] = next(matches, target)
    figures = _architecture_figures(architecture, geforce="geforce" in name.lower())
    ratio = figures.pop("tensor_clock_ratio", (None, ""))[0]
    transfers_per_s = 2 * memory_clock_hz if memory_clock_hz else None
    properties = {
        "sms": sms,
        "boost_clock_hz": clock_hz * ratio if clock_hz and ratio else clock_hz,
        "max_clock_hz": clock_hz if ratio else None,
        "memory_bytes": memory_bytes,
        "memory_bus_bits": bus_bits,
        "memory_transfers_per_s": transfers_per_s,
        "memory_bytes_per_s": bus_bits * transfers_per_s / 8 if bus_bits and transfers_per_s else None,
        "l2_bytes": l2_bytes,
        "shared_bytes_per_sm": shared_bytes_per_sm,
        "register_bytes_per_sm": register_bytes_per_sm,
    }
    figures |= {figure: (value, DERIVED) for figure, value in properties.items() if value is not None}
    text = {"key": _one_word(name), "name": name, "vendor": "AMD" if gfx else "NVIDIA"}
    return _gpu(text, architecture, figures)


def detect() -> Gpu | None:
    """The first GPU of this machine: from the table if its name is known, else derived; None without torch or a GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(0)
    try:
        return find(properties.name)
    except UnknownGpu:
        return _from_torch(properties, on_amd=torch.version.hip is not None)


def _from_torch(properties: Any, *, on_amd: bool) -> Gpu:
    def scaled(attribute: str, scale: int) -> int | None:
        value = getattr(properties, attribute, None)  # older torch reports fewer properties
        return value * scale if value else None

    return derive(
        properties.name,
        None if on_amd else (properties.major, properties.minor),
        properties.multi_processor_count,
        scaled("clock_rate", 1000),
        properties.total_memory,
        scaled("L2_cache_size", 1),
        None if on_amd else scaled("memory_clock_rate", 1000),  # AMD's has another number of transfers a clock
        scaled("memory_bus_width", 1),
        gfx=properties.gcnArchName.split(":")[0] if on_amd else None,
        shared_bytes_per_sm=scaled("shared_memory_per_multiprocessor", 1),
        register_bytes_per_sm=scaled("regs_per_multiprocessor", 4),
    )


@functools.cache
def _data() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))


@functools.cache
def _table() -> dict[str, Gpu]:
    rows = {row["key"]: row for row in _data()["gpu"]}
    return {key: _known(row, rows.get(row.get("like"), {})) for key, row in rows.items()}


@functools.cache
def _spellings() -> dict[str, str]:
    return {_one_word(word): gpu.key for gpu in all_gpus() for word in (gpu.key, gpu.name, *gpu.aliases)}


def _known(row: dict[str, Any], like: dict[str, Any]) -> Gpu:
    both = like | row
    architecture = _data()["architecture"][both["architecture"]]
    figures = _architecture_figures(architecture, geforce="geforce" in row["name"].lower())
    figures.pop("tensor_clock_ratio", None)  # the table gives both clocks
    figures |= {figure: cited for figure, cited in _figures(like) if not figure.startswith("reached.")}
    figures |= dict(_figures(row))
    text = {"key": row["key"], "name": row["name"], "vendor": both.get("vendor", "NVIDIA")}
    notes = {**like.get("notes", {}), **row.get("notes", {})}
    return replace(_gpu(text, architecture, figures), aliases=tuple(row.get("aliases", ())), notes=notes)


def _architecture_figures(architecture: dict[str, Any], *, geforce: bool) -> _Figures:
    figures = dict(_figures(architecture))
    halved = {figure: figures.pop(figure) for figure in list(figures) if figure.startswith("geforce_")}
    if geforce:  # GeForce cards halve the tensor rates that accumulate in fp32
        figures |= {figure.removeprefix("geforce_"): cited for figure, cited in halved.items()}
    return figures


def _figures(table: dict[str, Any], prefix: str = "", source: str = "") -> Iterator[tuple[str, tuple[Any, str]]]:
    """Every figure of a table as (sms, (132, citation)); those of inner tables as (peak_flops.bf16, ...)."""
    source = table.get("source", source)
    for name, entry in table.items():
        if name in _STRUCTURE:
            continue
        if isinstance(entry, dict):
            yield from _figures(entry, f"{prefix}{name}.", source)
        else:
            value, key = entry if isinstance(entry, list) else (entry, source)
            yield prefix + name, (value, _data()["sources"][key])


def _gpu(text: dict[str, str], architecture: dict[str, Any], figures: _Figures) -> Gpu:
    if "pcie" in figures:
        link, citation = figures["pcie"]
        generation, lanes = link.split(" x")
        rate = _PCIE_TRANSFERS_PER_S[generation] * int(lanes) / 8 * 128 / 130
        figures["pcie_bytes_per_s"] = rate, f"PCIe {link} ({citation})"
    values: dict[str, Any] = {**text, "peak_flops": {}, "flops_per_clock_per_sm": {}, "reached": {}}
    for figure, (value, _) in figures.items():
        table, _, entry = figure.rpartition(".")
        (values[table] if table else values)[entry] = value
    major, _, minor = (architecture.get("compute_capability") or "").partition(".")
    gpu = Gpu(
        architecture=architecture.get("name"),
        compute_capability=(int(major), int(minor)) if major else None,
        gfx=architecture.get("gfx"),
        max_clock_dtypes=tuple(architecture.get("max_clock_dtypes", ())),
        sources={figure: citation for figure, (_, citation) in figures.items()},
        **values,
    )
    missing = [dtype for dtype in gpu.flops_per_clock_per_sm if dtype not in gpu.peak_flops and gpu.clock_hz(dtype)]
    peaks = {dtype: theoretical_peak(gpu, dtype) for dtype in missing}
    citations = {f"peak_flops.{dtype}": f"derived: {peak.arithmetic}" for dtype, peak in peaks.items()}
    flops = {dtype: peak.value for dtype, peak in peaks.items()}
    return replace(gpu, peak_flops={**gpu.peak_flops, **flops}, sources={**gpu.sources, **citations})


def _one_word(name: str) -> str:
    """NVIDIA A100-SXM4-80GB -> a100sxm480gb."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in _NOISE)


def _tera(value: float, digits: int = 1) -> str:
    # More digits than a table prints: the reader checks the arithmetic with them.
    return f"{value / 1e12:.{digits}f} T"

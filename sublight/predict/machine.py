"""The GPU that a prediction is for: one of the table, a user's own file of figures, or one with a figure changed."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sublight import gpus
from sublight.cost.dtypes import matmul_limit
from sublight.errors import BadInput, nearest
from sublight.gpus import Gpu
from sublight.predict import known_limits, table
from sublight.predict.table import Table
from sublight.results import Limit, Limits

KNOBS = {  # what --what-if may scale, and the figures behind it
    "bandwidth": ("memory_bytes_per_s", "memory_transfers_per_s"),
    "flops": (),
    "l2": ("l2_bytes",),
    "links": ("nvlink_bytes_per_s", "pcie_bytes_per_s"),
    "memory": ("memory_bytes",),
    "power": ("power_w",),
}
_NEEDED = ("memory_bytes", "memory_bytes_per_s", "sms", "peak_flops")
_LEAST, _MOST = 1.0, 1e21  # of a figure: anything else is a slip
_LEAST_CLOCK = 1e7  # hertz
_MOST_SMS = 10_000  # a tile is one SM's: of more of them each would be so slow that the prediction is of nothing
_LEAST_REACHED, _MOST_LAUNCH_S = 1e-9, 1e-3  # seconds of a launch are among these
_LEAST_IN_UNITS = {"bytes_per_s": 1e6, "transfers_per_s": 1e6, "_bytes": 1e3, "memory_bytes": 1e6}  # by a name's end
_LEAST_FLOPS = 1e6  # a second
_INTEGERS = ("sms", "memory_bytes", "l2_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A GPU and its limits."""

    gpu: Gpu
    limits: Limits
    changed: bool = False  # by --what-if or a user's file: what was measured on such a GPU is not of this one
    factors: Mapping[str, float] = field(default_factory=dict)  # of --what-if
    network_bytes_per_s: float | None = None  # of one GPU to other machines
    tables: tuple[Table, ...] = ()  # of --calibrate, which come before the project's

    @property
    def key(self) -> str:
        return self.gpu.key

    @property
    def label(self) -> str:
        """The machine in a word or two: h100, or h100 bandwidth x2."""
        return " ".join([self.key, *(f"{knob} x{factor:g}" for knob, factor in self.factors.items())])

    @property
    def link_bytes_per_s(self) -> float | None:
        """One way to the other GPUs: NVLink, else PCIe."""
        return self.gpu.nvlink_bytes_per_s or self.gpu.pcie_bytes_per_s

    def rate(self, dtype: str) -> float:
        """FLOP/s of products; one line where this GPU has none of that data type."""
        limit = matmul_limit(dtype)
        value = self.limits.value(limit)
        if value is None:
            names = (row.name.removeprefix("matmul_") for row in self.limits.limits if "matmul_" in row.name)
            have = sorted(name for name in names if name not in ("fp64", "tf32"))  # nobody serves a model in these
            kind = limit.removeprefix("matmul_")
            use = f"use --dtype {' or '.join(have)}, or another GPU" if have else f"its peak_flops could give {kind}"
            raise BadInput(f"{self.gpu.name} has no {kind} products: {use}")
        return value

    def reached(self, dtype: str) -> float:
        """FLOP/s that products reach: as somebody measured, else the share of the vendor's figure that is usual."""
        limit = matmul_limit(dtype)
        is_known = known_limits.matmul_reached(self.gpu, limit.removeprefix("matmul_")) is not None
        return self.rate(dtype) * (1.0 if is_known else usual_share())

    def peak(self, dtype: str) -> float:
        """The vendor's figure, which MFU is a share of; where there is none, what was reached."""
        return self.gpu.peak_flops.get(matmul_limit(dtype).removeprefix("matmul_")) or self.rate(dtype)


@functools.cache
def usual_share() -> float:
    """Of the vendors' bf16 figures, what somebody reached, over the table's NVIDIA GPUs: the median.

    >>> 0.75 < usual_share() < 0.9
    True
    """
    known_rates = [
        (gpu.reached.get("matmul_bf16"), gpu.peak_flops.get("bf16"))
        for gpu in gpus.all_gpus()
        if gpu.vendor == "NVIDIA"
    ]
    return statistics.median(reached / peak for reached, peak in known_rates if reached and peak)


def of_gpu(gpu: Gpu, *, changed: bool = False, tables: tuple[Table, ...] = ()) -> Machine:
    for figure in _NEEDED:
        if not getattr(gpu, figure):
            raise BadInput(f"{gpu.name} lacks {figure}: a prediction needs {', '.join(_NEEDED)}")
    return Machine(gpu=gpu, limits=known_limits.of_gpu(gpu)[0], changed=changed, tables=tables)


def find(words: str) -> Machine:
    """A known GPU's, or that of a file: figures in my.toml, or a machine's own that --calibrate wrote to mine.json."""
    if words.endswith(".toml"):
        return of_gpu(read_gpu(Path(words)), changed=True)
    if words.endswith(".json"):
        return read_calibration(Path(words))
    return of_gpu(gpus.find(words))


CALIBRATION = 2  # the format of its file
_PLAIN = ("key", "name", "vendor", "architecture", "sms", "boost_clock_hz", "memory_bytes", "memory_bytes_per_s",
          "l2_bytes", "pcie_bytes_per_s", "nvlink_bytes_per_s", "power_w", "peak_flops", "reached")  # fmt: skip


def gpu_to_json(gpu: Gpu) -> dict[str, Any]:
    """The figures that a prediction reads."""
    return {name: value for name in _PLAIN if (value := getattr(gpu, name)) not in (None, {}, "")}


def read_calibration(path: Path) -> Machine:
    """The machine that --calibrate measured."""
    again = "write it with `sublight predict --calibrate mine.json`"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["calibration"] != CALIBRATION:
            raise BadInput(f"{path} was written by another version of sublight: {again} again")
        gpu = Gpu(**{name: value for name, value in data["gpu"].items() if name in _PLAIN})
        return of_gpu(gpu, tables=tuple(table.of_json(row) for row in data["tables"]))
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}: {again}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadInput(f"{path} is no calibration: {again}") from None


def read_gpu(path: Path) -> Gpu:
    """A GPU from a user's file: figures by the table's names, `like` takes over those of a known one."""
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}: a GPU's file gives {', '.join(_NEEDED)}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}") from None
    fields = {field.name for field in dataclasses.fields(Gpu)} - {"sources", "notes", "aliases"}
    like = data.pop("like", None)
    if not isinstance(like, str | None):
        raise BadInput(f"{path}: like = {like!r} must be text: the name of a known GPU")
    if unknown := next((name for name in data if name not in fields), ""):
        raise BadInput(
            f"{path} has {unknown!r}, which is no figure of a GPU: did you mean {nearest(unknown, list(fields))}?"
        )
    for name, value in data.items():
        _check(path, name, value)
    for name in _INTEGERS:
        if name in data:
            data[name] = int(data[name])
    if "compute_capability" in data:
        data["compute_capability"] = tuple(int(part) for part in data["compute_capability"].split("."))
    source = f"given in {path.name}"
    sources = dict.fromkeys(data, source)
    base = gpus.find(like) if like else None
    tables = {
        name: {**getattr(base, name), **data.pop(name)} if base else data.pop(name) for name in _TABLES if name in data
    }
    if base:
        reached = {name: rate for name, rate in base.reached.items() if name in data.get("reached", {})}
        kept = {"reached": tables.pop("reached", reached), "sources": {**base.sources, **sources}}
        gpu = replace(base, **{"key": path.stem, "name": path.stem, **data, **tables, **kept})
    else:
        gpu = Gpu(**{"key": path.stem, "name": path.stem, **data, **tables}, sources=sources)
    if missing := [name for name in _NEEDED if not getattr(gpu, name)]:
        raise BadInput(f'{path} lacks {", ".join(missing)}: add it, or like = "h100" for that GPU\'s figures')
    for name, rate in gpu.reached.items():
        most = gpu.memory_bytes_per_s if name.startswith("hbm_") else gpu.peak_flops.get(name.removeprefix("matmul_"))
        if most and rate > most and name != "matmul_fp64":  # whose tensor cores have a peak of their own
            raise BadInput(f"{path}: reached has {name} = {rate:g}, more than the GPU's peak of {most:g}")
    return gpu


_TABLES = ("peak_flops", "flops_per_clock_per_sm", "reached")
_TEXTS = ("key", "name", "vendor", "architecture", "gfx", "memory_kind", "pcie")


def _check(path: Path, name: str, value: Any) -> None:
    if name in _TEXTS:
        if not isinstance(value, str):
            raise BadInput(f"{path}: {name} = {value!r} must be text")
    elif name == "compute_capability":
        if not isinstance(value, str) or not re.fullmatch(r"\d{1,2}\.\d", value):
            raise BadInput(f'{path}: {name} = {value!r} must be text, as in "9.0"')
    elif name == "max_clock_dtypes":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise BadInput(f"{path}: {name} = {value!r} must be a list of data types")
    elif name.endswith("clock_hz") and not _is_rate(value, _LEAST_CLOCK):
        raise BadInput(f"{path}: {name} = {value!r} must be a number of hertz, as in 1.8e9")
    elif name in _TABLES:
        least = _LEAST_REACHED if name == "reached" else _LEAST
        if not isinstance(value, dict) or not all(_is_rate(rate, least) for rate in value.values()):
            raise BadInput(f"{path}: {name} must be a table of rates, as in {{ bf16 = 1e15 }}")
        names = {known for gpu in gpus.all_gpus() for known in getattr(gpu, name)}
        names |= set(known_limits.NAMES) if name == "reached" else set()
        if unknown := next((each for each in value if each not in names), ""):
            near = nearest(unknown, sorted(names))
            raise BadInput(f"{path}: {name} has {unknown!r}, which is no rate of a GPU: did you mean {near}?")
        for each, rate in value.items():
            _check_unit(path, f"{each} of {name}", each, rate, name)
    elif name == "sms" and _is_rate(value) and value > _MOST_SMS:
        raise BadInput(f"{path}: sms = {value!r} must be a number from 1 to {_MOST_SMS}")
    elif not _is_rate(value):
        is_slip = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        range_ = f"from {_LEAST:g} to {_MOST:g}" if is_slip else "above 0"
        raise BadInput(f"{path}: {name} = {value!r} must be a number {range_}")
    elif name == "sms" and value != int(value):
        raise BadInput(f"{path}: sms = {value!r} must be a whole number")
    else:
        _check_unit(path, name, name, value)


def _check_unit(path: Path, what: str, name: str, value: float, table: str = "") -> None:
    """Refuse TB/s where bytes a second are meant, and their like."""
    if name == "launch_graph_node":
        if value > _MOST_LAUNCH_S:
            raise BadInput(f"{path}: {what} = {value!r} must be in seconds, as in 1e-6")
    elif table in ("peak_flops", "reached") and value < _LEAST_FLOPS:
        is_bytes = name.startswith("hbm_") or name.endswith(("_pinned", "_copy"))
        unit = "bytes a second, as in 3e12" if is_bytes else "FLOP/s, as in 1e15"
        raise BadInput(f"{path}: {what} = {value!r} must be in {unit}")
    elif not table and value < max((least for end, least in _LEAST_IN_UNITS.items() if name.endswith(end)), default=0):
        unit = "bytes, as in 80e9" if name.endswith("bytes") else "bytes a second, as in 3.35e12"
        raise BadInput(f"{path}: {what} = {value!r} must be in {unit}")


def _is_rate(value: Any, least: float = _LEAST) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= _MOST


def parse_changes(words: list[str]) -> dict[str, float]:
    """bandwidth=2x as a factor.

    >>> parse_changes(["bandwidth=2x", "flops=0.5"])
    {'bandwidth': 2.0, 'flops': 0.5}
    """
    found = {}
    for word in words:
        name, _, factor = word.partition("=")
        if name not in KNOBS:
            raise BadInput(f"unknown --what-if {name!r}: use {', '.join(KNOBS)}, as in bandwidth=2x")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)x?", factor.strip())
        if not match or not 0 < float(match[1]) <= 1000:
            raise BadInput(f"--what-if {word}: give a factor, as in {name}=2x")
        found[name] = float(match[1])
    return found


def change(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The same GPU with some figures scaled: limits that were reached scale with them."""
    if not factors:
        return machine
    gpu, limits = machine.gpu, list(machine.limits.limits)
    for knob, factor in factors.items():
        figures = {name: getattr(gpu, name) * factor for name in KNOBS[knob] if getattr(gpu, name)}
        if knob == "l2" and (not figures or factor < 1):
            lacks = (
                f"the table has no l2_bytes of the {gpu.name}" if not figures else "what a smaller one costs is unknown"
            )
            raise BadInput(f"--what-if l2={factor:g}x: {lacks}: " + ("leave it out" if not figures else "give l2=2x"))
        figures = {name: int(value) if name in _INTEGERS else value for name, value in figures.items()}
        if knob == "flops":
            figures = {"peak_flops": {dtype: peak * factor for dtype, peak in gpu.peak_flops.items()}}
        gpu = replace(gpu, **figures)
        limits = [_scaled(limit, factor) if _belongs(limit.name, knob) else limit for limit in limits]
    name = f"{gpu.name}, " + ", ".join(f"{knob} x{factor:g}" for knob, factor in factors.items())
    return Machine(
        gpu=replace(gpu, name=name),
        limits=replace(machine.limits, device=name, limits=tuple(limits)),
        changed=True,
        factors=dict(factors),
        network_bytes_per_s=(machine.network_bytes_per_s or 0) * factors.get("links", 1.0) or None,
        tables=machine.tables,
    )


def _belongs(limit: str, knob: str) -> bool:
    prefixes = {"bandwidth": ("hbm_",), "flops": ("matmul_", "vector_"), "links": ("peer_", "h2d_", "d2h_")}
    return limit.startswith(prefixes.get(knob, ("none",)))


def _scaled(limit: Limit, factor: float) -> Limit:
    value, spec = limit.value, limit.spec
    return replace(limit, value=value * factor if value else value, spec=spec * factor if spec else spec)

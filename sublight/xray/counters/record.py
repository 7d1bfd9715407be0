"""What the hardware counted while one kernel ran, in our words and in SI units, whichever way a report told it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sublight.errors import BadInput

Kind = Literal["seconds", "bytes", "share", "count"]
Values = Mapping[str, tuple[float, str]]  # metric, or its label on the details page -> number, unit

_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_PER_SECOND |= {"second": 1.0, "msecond": 1e3, "usecond": 1e6, "nsecond": 1e9}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}  # decimal: Nsight Compute's Kbyte has 1000 bytes
_COUNTED = re.compile(r"([KMGT]?)(byte|inst|sector|request|warp|thread|block|register|cycle)s?")
_STALL_RATIO = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_STALL_SAMPLES = re.compile(r"smsp__pcsamp_warps_issue_stalled_(\w+)")
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure of ours, and what Nsight Compute calls it: the first name that a report has is taken."""

    field: str
    kind: Kind
    names: tuple[str, ...]
    label: str = ""  # on the details page


def _global(ours: str, theirs: str, *, sass: bool = False) -> tuple[Metric, ...]:
    unit = "sm__sass_l1tex_t" if sass else "l1tex__t"
    return tuple(
        Metric(field=f"{ours}_{what}", kind="count", names=(f"{unit}_{what}_pipe_lsu_mem_global_op_{theirs}.sum",))
        for what in ("requests", "sectors")
    )


def _shared(ours: str, theirs: str) -> tuple[Metric, ...]:
    """Counted by address (sass) before counted by the pipe: the pipe also counts passes lost to other clients, and
    matrix loads among the loads. Conflicts of loads and stores by address ncu 2025.3.1 does not have."""
    pairs = (("wavefronts", "data_pipe_lsu_wavefronts_mem"), ("conflicts", "data_bank_conflicts_pipe_lsu_mem"))
    return tuple(
        Metric(
            field=f"shared_{ours}_{what}",
            kind="count",
            names=(f"smsp__sass_l1tex_{stem}_shared_op_{theirs}.sum", f"l1tex__{stem}_shared_op_{theirs}.sum"),
        )
        for what, stem in pairs
    )


METRICS = (
    Metric(field="duration_s", kind="seconds", names=("gpu__time_duration.sum", "gpu__time_duration.avg"),
           label="Duration"),
    Metric(field="occupancy", kind="share", names=("sm__warps_active.avg.pct_of_peak_sustained_active",),
           label="Achieved Occupancy"),
    Metric(field="theoretical_occupancy", kind="share", names=("sm__maximum_warps_per_active_cycle_pct",),
           label="Theoretical Occupancy"),
    Metric(field="sm_throughput", kind="share", names=("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
           label="Compute (SM) Throughput"),
    Metric(field="memory_throughput", kind="share", label="Memory Throughput",
           names=("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",)),
    Metric(field="dram_throughput", kind="share", label="DRAM Throughput",
           names=("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
                  "dram__throughput.avg.pct_of_peak_sustained_elapsed")),
    Metric(field="dram_read_bytes", kind="bytes", names=("dram__bytes_read.sum", "dram__bytes_op_read.sum")),
    Metric(field="dram_write_bytes", kind="bytes", names=("dram__bytes_write.sum", "dram__bytes_op_write.sum")),
    Metric(field="registers", kind="count", names=("launch__registers_per_thread",), label="Registers Per Thread"),
    Metric(field="static_shared_bytes", kind="bytes", names=("launch__shared_mem_per_block_static",),
           label="Static Shared Memory Per Block"),
    Metric(field="dynamic_shared_bytes", kind="bytes", names=("launch__shared_mem_per_block_dynamic",),
           label="Dynamic Shared Memory Per Block"),
    Metric(field="limit_blocks", kind="count", names=("launch__occupancy_limit_blocks",), label="Block Limit SM"),
    Metric(field="limit_registers", kind="count", names=("launch__occupancy_limit_registers",),
           label="Block Limit Registers"),
    Metric(field="limit_shared", kind="count", names=("launch__occupancy_limit_shared_mem",),
           label="Block Limit Shared Mem"),
    Metric(field="limit_warps", kind="count", names=("launch__occupancy_limit_warps",), label="Block Limit Warps"),
    Metric(field="limit_barriers", kind="count", names=("launch__occupancy_limit_barriers",),
           label="Block Limit Barriers"),
    *_global("load", "ld"),  # cp.async among them
    *_global("store", "st"),
    *_global("atomic", "atom"),
    *_global("reduction", "red"),  # an atomic whose result nobody reads
    *_global("cached_copy", "ldgsts_cache_access", sass=True),  # cp.async through the L1
    *_global("copy", "ldgsts_cache_bypass", sass=True),  # cp.async past it
    *_shared("load", "ld"),
    *_shared("store", "st"),
    *_shared("copy", "ldgsts"),
    *_shared("matrix_load", "ldsm"),
    Metric(field="shared_load_passes", kind="count",
           names=("smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",)),
    Metric(field="shared_store_passes", kind="count",
           names=("smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum",)),
    # not smsp__inst_executed_op_shared_ld: it counts what no lane executes, such as the @!PT LDS behind a fence
    Metric(field="shared_load_requests", kind="count",
           names=("smsp__sass_inst_executed_op_shared_ld.sum", "sass__inst_executed_shared_loads")),
    Metric(field="shared_store_requests", kind="count",
           names=("smsp__sass_inst_executed_op_shared_st.sum", "sass__inst_executed_shared_stores")),
    Metric(field="shared_matrix_load_requests", kind="count",
           names=("smsp__sass_inst_executed_op_ldsm.sum", "smsp__inst_executed_op_ldsm.sum")),
    Metric(field="shared_wavefronts", kind="count", names=("memory_l1_wavefronts_shared",)),
    Metric(field="ideal_shared_wavefronts", kind="count", names=("memory_l1_wavefronts_shared_ideal",)),
    Metric(field="global_sectors", kind="count", names=("memory_l2_theoretical_sectors_global",)),
    Metric(field="ideal_global_sectors", kind="count", names=("memory_l2_theoretical_sectors_global_ideal",)),
)  # fmt: skip

_SHARES = frozenset(metric.label for metric in METRICS if metric.kind == "share")
_NAMES = frozenset(
    (
        *(name for metric in METRICS for name in (*metric.names, metric.label) if name),
        *(f"launch__{what}_{part}" for what in ("grid", "block") for part in ("dim_x", "dim_y", "dim_z", "size")),
        "Grid Size",
        "Block Size",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """One launch of one kernel, as counted; None: the report does not say.

    A share is of 1, not of 100. *Conflicts* are shared-memory passes beyond those that the bytes asked for need.
    """

    kernel: str  # as the report names it: with its parameters, where it has them
    grid: tuple[int, ...] = ()  # one number: only the blocks in all are known
    block: tuple[int, ...] = ()
    gpu: str = ""
    capability: int | None = None  # 90 for sm_90
    duration_s: float | None = None
    occupancy: float | None = None  # achieved, a share of the warps that an SM holds
    theoretical_occupancy: float | None = None
    sm_throughput: float | None = None
    memory_throughput: float | None = None
    dram_throughput: float | None = None
    dram_read_bytes: float | None = None
    dram_write_bytes: float | None = None
    registers: float | None = None
    static_shared_bytes: float | None = None
    dynamic_shared_bytes: float | None = None
    limit_blocks: float | None = None  # blocks an SM could hold, were this the only limit
    limit_registers: float | None = None
    limit_shared: float | None = None
    limit_warps: float | None = None
    limit_barriers: float | None = None
    load_requests: float | None = None
    load_sectors: float | None = None
    store_requests: float | None = None
    store_sectors: float | None = None
    atomic_requests: float | None = None
    atomic_sectors: float | None = None
    reduction_requests: float | None = None
    reduction_sectors: float | None = None
    cached_copy_requests: float | None = None
    cached_copy_sectors: float | None = None
    copy_requests: float | None = None
    copy_sectors: float | None = None
    shared_load_requests: float | None = None
    shared_load_wavefronts: float | None = None
    shared_load_conflicts: float | None = None
    shared_load_passes: float | None = None  # wavefronts by address, whatever counted the conflicts
    shared_store_requests: float | None = None
    shared_store_wavefronts: float | None = None
    shared_store_conflicts: float | None = None
    shared_store_passes: float | None = None
    shared_copy_wavefronts: float | None = None
    shared_copy_conflicts: float | None = None
    shared_matrix_load_requests: float | None = None
    shared_matrix_load_wavefronts: float | None = None
    shared_matrix_load_conflicts: float | None = None
    shared_wavefronts: float | None = None  # of all shared accesses, by address
    ideal_shared_wavefronts: float | None = None
    global_sectors: float | None = None
    ideal_global_sectors: float | None = None
    has_matrix_loads: bool = False  # shared_load_wavefronts and its conflicts are the pipe's: matrix loads among them
    stalls: Mapping[str, float] = field(default_factory=dict)  # reason -> share of the warps' time; selected: issuing

    @property
    def name(self) -> str:
        return short_name(self.kernel)

    @property
    def sectors_per_load(self) -> float | None:
        """Of loads proper, where cp.async, which is counted among them, was also counted on its own."""
        copied = (
            (self.copy_sectors or 0) + (self.cached_copy_sectors or 0),
            (self.copy_requests or 0) + (self.cached_copy_requests or 0),
        )
        if self.load_sectors is None or self.load_requests is None:
            return None
        return ratio(max(0.0, self.load_sectors - copied[0]), self.load_requests - copied[1])

    @property
    def sectors_per_store(self) -> float | None:
        return ratio(self.store_sectors, self.store_requests)

    @property
    def passes_per_shared_load(self) -> float | None:
        passes = self.shared_load_wavefronts if self.shared_load_passes is None else self.shared_load_passes
        return ratio(passes, self.shared_load_requests)

    @property
    def passes_per_shared_store(self) -> float | None:
        passes = self.shared_store_wavefronts if self.shared_store_passes is None else self.shared_store_passes
        return ratio(passes, self.shared_store_requests)

    @property
    def shared_load_conflict(self) -> float | None:
        """n of an n-way conflict: 1 is none."""
        return _n_way(self.shared_load_wavefronts, self.shared_load_conflicts)

    @property
    def shared_store_conflict(self) -> float | None:
        return _n_way(self.shared_store_wavefronts, self.shared_store_conflicts)

    @property
    def shared_matrix_load_conflict(self) -> float | None:
        return _n_way(self.shared_matrix_load_wavefronts, self.shared_matrix_load_conflicts)

    @property
    def shared_conflict(self) -> float | None:
        """Over all shared accesses; by address where the report has that, else from what the pipe counted."""
        if by_address := ratio(self.shared_wavefronts, self.ideal_shared_wavefronts):
            return by_address
        pairs = (
            (self.shared_load_wavefronts, self.shared_load_conflicts),
            (self.shared_store_wavefronts, self.shared_store_conflicts),
        )
        known = [(passes, conflicts) for passes, conflicts in pairs if passes is not None and conflicts is not None]
        return _n_way(sum(passes for passes, _ in known), sum(conflicts for _, conflicts in known)) if known else None

    def to_json(self) -> dict[str, Any]:
        row = {**dataclasses.asdict(self), "name": self.name, "sectors_per_load": self.sectors_per_load}
        row |= {"sectors_per_store": self.sectors_per_store, "shared_load_conflict": self.shared_load_conflict}
        row |= {"shared_store_conflict": self.shared_store_conflict, "shared_conflict": self.shared_conflict}
        return {key: value for key, value in row.items() if value is not False and value not in (None, "", (), {})}


def counters(
    kernel: str,
    values: Values,
    *,
    grid: tuple[int, ...] = (),
    block: tuple[int, ...] = (),
    gpu: str = "",
    capability: int | None = None,
) -> Counters:
    """From the metrics that a report has to the figures that we keep."""
    found = {metric.field: _first(metric, values) for metric in METRICS}
    for metric in METRICS:
        if metric.field.endswith("_wavefronts") and len(metric.names) > 1:
            found |= _one_source(metric.field.removesuffix("_wavefronts"), values)
    load = next(metric for metric in METRICS if metric.field == "shared_load_conflicts")
    return Counters(
        kernel=kernel,
        grid=grid or _dims(values, "grid", "Grid Size"),
        block=block or _dims(values, "block", "Block Size"),
        gpu=gpu,
        capability=capability,
        has_matrix_loads=load.names[0] not in values and load.names[1] in values,
        stalls=_stalls(values),
        **found,  # type: ignore[arg-type]
    )


def wanted() -> tuple[str, ...]:
    """The metrics to ask ncu for: every name in the table, and the reasons why warps wait."""
    stalls = (f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio" for reason in STALLS)
    return (*dict.fromkeys(name for metric in METRICS for name in metric.names), *stalls)


def knows(name: str, unit: str = "") -> bool:
    """Whether a metric, or a label of the details page, is one that we read; some labels have two metrics.

    >>> knows("Memory Throughput", "%"), knows("Memory Throughput", "Gbyte/s"), knows("launch__stream_id")
    (True, False, False)
    """
    if name in _SHARES:
        return unit == "%"
    return name in _NAMES or bool(_STALL_RATIO.fullmatch(name) or _STALL_SAMPLES.fullmatch(name))


def short_name(kernel: str) -> str:
    """What its author called it: without the return type, namespaces, template arguments and parameters.

    >>> short_name("void (anonymous namespace)::mine::copy<float, (int)4>(float const*, float*)"), short_name("_add")
    ('copy', '_add')
    """
    bare, depth = "", 0
    for letter in kernel.replace("(anonymous namespace)::", ""):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and bare:
            break
        if depth == 0 and letter != ">":
            bare += letter
    return bare.split("::")[-1].split(" ")[-1] or kernel


def scaled(value: float, unit: str, kind: Kind, what: str) -> float:
    """In SI units, a share of 1.

    >>> scaled(2.5, "usecond", "seconds", "t"), scaled(50, "%", "share", "o"), scaled(1.5, "Kbyte/block", "bytes", "s")
    (2.5e-06, 0.5, 1500.0)
    """
    first = unit.split("/")[0].strip()
    if kind == "seconds" and first in _PER_SECOND:
        return value / _PER_SECOND[first]
    if kind == "share" and first in ("%", ""):
        return value / 100
    counted = _COUNTED.fullmatch(first)
    if kind == "bytes" and counted and counted[2] == "byte":
        return value * _PREFIXES[counted[1]]
    if kind == "count":  # a unit that we do not know names what is counted
        return value * (_PREFIXES[counted[1]] if counted else 1)
    raise BadInput(f"{what} is in {unit or 'no unit'!r}, which is no unit of {kind}: export with --print-units base")


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _n_way(wavefronts: float | None, conflicts: float | None) -> float | None:
    if wavefronts is None or conflicts is None:
        return None
    return ratio(wavefronts, wavefronts - conflicts)


def _first(metric: Metric, values: Values) -> float | None:
    for name in metric.names:
        if name in values:
            return scaled(*values[name], metric.kind, name)
    if metric.label in values:
        return scaled(*values[metric.label], metric.kind, metric.label)
    return None


def _one_source(stem: str, values: Values) -> dict[str, float | None]:
    """Passes and conflicts as the same source counted them; nothing to change where none has both."""
    pair = [metric for metric in METRICS if metric.field in (f"{stem}_wavefronts", f"{stem}_conflicts")]
    for names in zip(*(metric.names for metric in pair), strict=True):
        if all(name in values for name in names):
            return {metric.field: values[name][0] for metric, name in zip(pair, names, strict=True)}
    return {}


def _dims(values: Values, what: str, label: str) -> tuple[int, ...]:
    names = [f"launch__{what}_dim_{axis}" for axis in "xyz"]
    if all(name in values for name in names):
        return tuple(int(values[name][0]) for name in names)
    total = values.get(f"launch__{what}_size") or values.get(label)
    return (int(total[0]),) if total else ()


def _stalls(values: Values) -> dict[str, float]:
    """Shares of the warps' time, largest first; from averages, else from samples."""
    for pattern in (_STALL_RATIO, _STALL_SAMPLES):
        matches = [(pattern.fullmatch(name), value) for name, (value, _) in values.items()]
        stalls = {match[1]: value for match, value in matches if match and not match[1].endswith("_not_issued")}
        if total := sum(stalls.values()):
            return {reason: value / total for reason, value in sorted(stalls.items(), key=lambda row: -row[1]) if value}
    return {}

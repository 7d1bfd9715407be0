"""A GPU's own figures: its limits, a minute of measured ops, and what `fit` makes of them, in one file.

`sublight predict --calibrate mine.json` writes it, `--gpu mine.json` predicts with it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sublight.errors import BadInput
from sublight.gpus import Gpu, detect
from sublight.limits import run as limits_run
from sublight.predict import fit, machine, memory_ops, rows
from sublight.predict.machine import Machine
from sublight.results import Limits

MEASURE_S = 45.0  # of ops; limits take some 10 s more
LEAST_ROWS = 16  # of one kind, for a table
LIMITS = ("hbm_read", "hbm_write", "hbm_copy", "hbm_triad", "matmul_bf16", "launch_graph_node")
SOURCE = "--calibrate"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured, and how far its predictions are off on rows that were held out."""

    gpu: Gpu
    tables: tuple[dict[str, Any], ...]
    checks: tuple[dict[str, Any], ...]
    missing: tuple[str, ...]  # kinds with too few rows for a table
    rows: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "calibration": machine.CALIBRATION,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "gpu": machine.gpu_to_json(self.gpu),
            "rows": self.rows,
            "seconds": round(self.seconds, 1),
            "checks": list(self.checks),
            "missing": list(self.missing),
            "tables": list(self.tables),
        }


def run(name: str, *, seconds: float = MEASURE_S, progress: Progress | None = None) -> Calibration:
    """Measure this machine's GPU; `name` is what predictions call it."""
    known = detect()
    if known is None:
        raise BadInput(
            "--calibrate measures a GPU, and torch has none here: `sublight doctor` says why; run it where the GPU is, "
            "and take its file with you"
        )
    began = time.monotonic()
    limits = limits_run.run(kind="cuda", quick=True, only=LIMITS, progress=progress)
    here = machine.of_gpu(described(name, known, limits))
    measured: list[dict[str, Any]] = []
    drawn = list(rows.cases(0, streams=memory_ops.BASIC))
    until = time.monotonic() + seconds
    for kind, shape in drawn:
        if time.monotonic() > until:
            break
        if progress:
            progress(kind, len(measured), len(drawn))
        measured.append(rows.measured(kind, shape, "cuda"))
    tables, checks = fitted(here, measured)
    made = {check["kind"] for check in checks}
    return Calibration(
        gpu=here.gpu,
        tables=tuple(tables),
        checks=tuple(checks),
        missing=tuple(kind for kind in rows.COUNTS if kind not in made),
        rows=len(measured),
        seconds=time.monotonic() - began,
    )


def fitted(here: Machine, measured: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tables of every kind that has rows enough, and the errors on the half of each that was held out."""
    tables: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    for kind, of_kind in fit.rows_of_run(here, measured, LEAST_ROWS).items():
        parameters, table, check = fit.checked(kind, here, of_kind, SOURCE)
        tables.append(table | {"parameters": parameters})
        checks.append(check | {"kind": kind})
    light = [row | {"bound": "memory"} for row in measured if row["op"] in {each.op for each in memory_ops.BASIC}]
    if len(light) >= LEAST_ROWS:
        parameters, of_ops, (check, *_) = fit.streams(here, light, SOURCE)
        flat = {"values": [0.0] * len(of_ops[0]["values"]), "rows": len(light), "parameters": parameters}
        tables += [*of_ops, of_ops[0] | {"kind": "stream"} | flat]  # the last stands for ops that were not measured
        checks.append(check | {"kind": "memory-bound op"})
    return tables, checks


def described(name: str, known: Gpu, limits: Limits) -> Gpu:
    """The GPU with the rates that it reached here; a GPU that the table does not know has these alone."""
    rates = {each.name: each.value for each in limits.limits if each.value and each.name in LIMITS}
    reached = {**known.reached, **rates}
    memory_bytes, sms, l2_bytes = known.memory_bytes, known.sms, known.l2_bytes
    if not (memory_bytes and sms):
        import torch

        about = torch.cuda.get_device_properties(0)
        memory_bytes, sms, l2_bytes = about.total_memory, about.multi_processor_count, about.L2_cache_size
    return dataclasses.replace(
        known,
        key=name,
        memory_bytes=memory_bytes,
        sms=sms,
        l2_bytes=l2_bytes,
        memory_bytes_per_s=known.memory_bytes_per_s or rates.get("hbm_copy"),
        peak_flops=known.peak_flops or {"bf16": rates.get("matmul_bf16", 0.0)},
        reached=reached,
    )

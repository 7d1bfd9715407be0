"""Nsight Systems: the SQLite export of a report becomes one Trace a process.

A report covers every process of a launch, so a `torchrun` of two ranks gives two. What an export holds differs by
version and by what was recorded: no table and no column is taken for granted.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from sublight.errors import BadInput
from sublight.trace.assemble import assemble
from sublight.trace.intervals import distinct
from sublight.trace.read.nsight_database import Database
from sublight.trace.read.nsight_devices import Gpus, describe
from sublight.trace.read.nsight_tables import TABLES, Book, Events, read
from sublight.trace.record import ON_DEVICE, Ints, Kind, Lane, Mask, Trace

EXPORT_TIMEOUT_S = 1800.0


def load(path: Path) -> list[Trace]:
    """The processes of a `.sqlite` export, or of a `.nsys-rep` where `nsys` is installed; ranks first, in order."""
    if path.suffix != ".nsys-rep":
        return _load(path, source=str(path))
    exported = export(path)
    try:
        return _load(exported, source=str(path))
    finally:
        shutil.rmtree(exported.parent, ignore_errors=True)


def export(path: Path) -> Path:
    """The SQLite export of a report, in a new temporary folder that is the caller's to remove."""
    if not path.is_file():
        raise BadInput(f"{path} is not a file")
    nsys = shutil.which("nsys")
    if nsys is None:
        raise BadInput(
            f"{path} needs nsys, which is not on PATH: run `nsys export --type sqlite {path.name}` where it is, "
            "and pass the .sqlite file"
        )
    folder = Path(tempfile.mkdtemp(prefix="sublight-nsys-"))
    target = folder / f"{path.stem}.sqlite"
    command = [nsys, "export", "--type", "sqlite", "--output", str(target), str(path.resolve())]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=EXPORT_TIMEOUT_S)
        output = (done.stderr.strip() or done.stdout.strip()).decode("utf-8", errors="replace").splitlines()
        failed = (output[-1] if output else f"exit code {done.returncode}") if done.returncode else ""
    except subprocess.TimeoutExpired:
        failed = f"no end after {EXPORT_TIMEOUT_S:.0f} s"
    except OSError as error:
        failed = str(error)
    except BaseException:  # Ctrl-C: leave nothing behind
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if failed or not target.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        raise BadInput(f"nsys could not export {path}: {failed or 'it wrote no file'}")
    return target


def _load(path: Path, source: str) -> list[Trace]:
    with Database(path) as database:
        if not any(table in database.columns for table in TABLES):
            raise BadInput(f"{source} holds no table of CUDA or NVTX events: is it an export of Nsight Systems?")
        events, book = read(database)
        gpus = describe(database)
    lost = database.lost
    events = _attributed(events, lost)
    order = np.argsort(events.process, kind="stable")
    processes, first = np.unique(events.process[order], return_index=True)
    ends = [*first[1:].tolist(), len(order)]
    parts = {}
    for process, start, end in zip(processes.tolist(), first.tolist(), ends[: len(first)], strict=True):
        part = events.rows(order[start:end])
        if (part.kind != Kind.OVERHEAD).any():  # else: only the profiler was at work there
            parts[process] = part
    if not parts:
        raise BadInput(f"{source} holds no CUDA or NVTX events{': ' + lost[0] if lost else ''}")
    return _traces(parts, book, gpus, source=source, lost=lost)


def _attributed(events: Events, lost: list[str]) -> Events:
    """Every event with a process: its own; else that of the call that launched it; else the only one there is."""
    process = events.process.copy()
    unknown = process < 0
    known = distinct(process[~unknown])
    if len(known) > 1 and unknown.any():
        process[unknown] = _launcher(events, unknown)
        if left := int(np.count_nonzero(process < 0)):
            lost.append(f"{left} event{'s' * (left > 1)} could be of any of {len(known)} processes.")
    elif unknown.any():
        process[unknown] = known[0] if len(known) else 0
    return replace(events, process=process).rows(np.flatnonzero(process >= 0))


def _launcher(events: Events, unknown: Mask) -> Ints:
    """The process whose API call has the same correlation; NONE where none has, or more than one."""
    calls = np.flatnonzero((events.kind == Kind.RUNTIME) & ~unknown & (events.correlation >= 0))
    pairs = np.unique(np.stack([events.correlation[calls], events.process[calls]]), axis=1)
    numbers, at, count = np.unique(pairs[0], return_index=True, return_counts=True)
    numbers, owners = numbers[count == 1], pairs[1][at[count == 1]]
    wanted = events.correlation[unknown]
    if not len(numbers):
        return np.full(len(wanted), -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return np.where(numbers[place] == wanted, owners[place], -1)


def _traces(parts: dict[int, Events], book: Book, gpus: Gpus, *, source: str, lost: list[str]) -> list[Trace]:
    lanes = tuple(book.lanes)
    names = tuple(book.names)
    used = {process: _devices(part, lanes) for process, part in parts.items()}
    # the launcher and the data loaders of a job may touch CUDA or NVTX as well: where some processes had work for a
    # device, those alone are its ranks
    ranks = [process for process in parts if used[process]] or list(parts)
    ranks.sort(key=lambda process: (used[process][:1], process))  # torchrun: rank i has device i
    ordered = [*ranks, *(process for process in parts if process not in set(ranks))]
    traces = []
    for at, process in enumerate(ordered):
        part, pid = parts[process], process & 0xFFFFFF
        ranked = len(ranks) > 1 and at < len(ranks)
        traces.append(
            assemble(
                source=source,
                tool="nsight",
                kind=part.kind,
                name_ids=part.name,
                names=names,
                lane_ids=part.lane,
                lanes=lanes,
                detail_ids=part.detail,
                details=book.details,
                start_ns=part.start_ns,
                end_ns=part.end_ns,
                correlation=part.correlation,
                sequence=part.sequence,
                bytes=part.bytes,
                graph_node=part.graph_node,
                devices=[gpus.device(pid, index) for index in sorted(used[process])],
                rank=at if ranked else None,
                world_size=len(ranks) if ranked else None,
                lost=lost,
                meta={"pid": pid, "process": book.processes.get(process, "")},
            )
        )
    return traces


def _devices(events: Events, lanes: tuple[Lane, ...]) -> list[int]:
    """The devices that ran something, the one with the most events first."""
    of_lane = np.array([lane.device for lane in lanes], dtype=np.int64)
    devices = of_lane[events.lane[np.isin(events.kind, ON_DEVICE)]]
    values, counts = np.unique(devices[devices >= 0], return_counts=True)
    return [int(value) for value in values[np.argsort(-counts, kind="stable")]]

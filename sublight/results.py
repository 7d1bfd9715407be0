"""What was measured, as records that go to JSON and come back: samples, results, limits."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from sublight.cost import Cost, Shape, shape_text
from sublight.errors import BadInput, refuse_device

BUSY = "busy"  # key in a limit's detail: share of the processors that other programs used meanwhile
UNWELL = "unwell"  # key in a limit's detail: what was wrong with the GPU meanwhile
TOO_GOOD = 1.02  # a fraction of the limit above this means that the cost or the limit is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Repeated timings of one call, and the state of the machine around them."""

    times_s: tuple[float, ...]
    method: Literal["graph", "events", "wall"]
    clock_mhz: tuple[int, int] | None = None  # before, after
    throttle: tuple[str, ...] = ()
    energy_j: float | None = None  # of one call
    note: str = ""

    @property
    def n(self) -> int:
        return len(self.times_s)

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def spread_s(self) -> float:
        """Half the distance between the quartiles."""
        if self.n < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.times_s, n=4)
        return (high - low) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One ceiling of this machine: a rate, a latency or a cost."""

    name: str
    unit: str
    value: float | None = None
    spec: float | None = None  # the vendor's figure
    verdict: str = ""  # "normal", "low: likely cause" or "unjudged: why"
    unavailable: str | None = None
    spread: float | None = None  # half the distance between the quartiles, in the unit
    n: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)  # the shape that gave it, the curve and its knee, …

    @property
    def fraction_of_spec(self) -> float | None:
        return self.value / self.spec if self.value is not None and self.spec else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The time below which no implementation goes, and which limit sets it."""

    seconds: float
    bound: str  # "memory", "launch", or the name of the limit of arithmetic, of a link or of a transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one device can reach, and where the figures come from."""

    device: str  # "NVIDIA H200"
    kind: Literal["cuda", "cpu"]
    uuid: str = ""
    driver: str = ""
    date: str = ""
    source: str = "measured"  # or "vendor figures", "cached on …"
    limits: tuple[Limit, ...] = ()

    def value(self, name: str) -> float | None:
        return next((limit.value for limit in self.limits if limit.name == name), None)

    def memory_rate(self, read_bytes: float, write_bytes: float) -> float | None:
        """Bytes per second for this mix of reads and writes.

        Time per byte is interpolated over the share of reads between what was measured: writes alone, copy (half),
        triad (two thirds), reads alone. A copy's rate is then exactly the measured copy rate.
        """
        prefix = "hbm" if self.kind == "cuda" else "host"
        known = [(share, self.value(f"{prefix}_{name}")) for share, name in _READ_SHARE]
        points = [(share, 1 / rate) for share, rate in known if rate]
        total = read_bytes + write_bytes
        if not points or not total:
            return None
        share = read_bytes / total
        at = bisect.bisect_left([point[0] for point in points], share)
        if at == 0 or at == len(points):
            return 1 / points[min(at, len(points) - 1)][1]
        (left, left_cost), (right, right_cost) = points[at - 1], points[at]
        return 1 / (left_cost + (right_cost - left_cost) * (share - left) / (right - left))

    def link_rate(self) -> float | None:
        """Bytes per second, each way, between this GPU and all others.

        A copy to one peer may use a part of the links alone: where the vendor's figure for all of them is higher, it
        is the limit, because a floor must not be above what is possible.
        """
        peer = next((limit for limit in self.limits if limit.name == "peer_copy" and limit.value), None)
        return max(peer.value or 0.0, peer.spec or 0.0) if peer else None

    def floor(self, cost: Cost) -> Floor | None:
        """The largest of cost over limit; None where no limit that the cost needs is known."""
        times = {}
        rate = self.memory_rate(cost.read_bytes, cost.write_bytes)
        if rate:
            times["memory"] = cost.bytes / rate
        carried = {
            "h2d_pinned": (cost.from_host_bytes, self.value("h2d_pinned")),
            "d2h_pinned": (cost.to_host_bytes, self.value("d2h_pinned")),
            "peer_copy": (cost.link_bytes, self.link_rate()),
        }
        times |= {name: size / rate for name, (size, rate) in carried.items() if size and rate}
        for name, flops in cost.flops.items():
            if peak := self.value(name):
                times[name] = flops / peak
        if launch := self.value("launch_graph_node" if self.kind == "cuda" else "launch_eager"):
            times["launch"] = cost.launches * launch
        if not times:
            return None
        bound = max(times, key=lambda name: times[name])
        return Floor(seconds=times[bound], bound=bound)

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "kind": self.kind,
            "uuid": self.uuid,
            "driver": self.driver,
            "date": self.date,
            "source": self.source,
            "limits": [
                {**dataclasses.asdict(limit), "fraction_of_spec": limit.fraction_of_spec} for limit in self.limits
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Limits:
        rows = [{key: value for key, value in row.items() if key != "fraction_of_spec"} for row in data["limits"]]
        rest = {key: value for key, value in data.items() if key != "limits"}
        return cls(**rest, limits=tuple(Limit(**row) for row in rows))


_READ_SHARE = ((0.0, "write"), (1 / 2, "copy"), (2 / 3, "triad"), (1.0, "read"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One op, shape, data type, direction and provider: its time beside its floor, or why there is none."""

    op: str
    direction: str
    shape: Shape
    dtype: str
    provider: str
    ours: bool = False  # the kernel that ran is this project's
    kernel: str = ""  # what really ran, as the profiler saw it
    median_s: float | None = None
    floor_s: float | None = None
    bound: str = ""
    spread_s: float | None = None
    n: int | None = None
    method: str = ""
    cache: str = ""  # cold: the buffer sets together exceed the last-level cache; else warm
    clock_mhz: int | None = None
    energy_j: float | None = None
    call_s: float | None = None  # wall time of one eager call, Python included
    error: float | None = None  # largest over outputs of (our error) / (PyTorch's error); at most 2 is correct
    bytes: int = 0
    flops: float = 0.0
    note: str = ""
    commit: str = ""  # the commit of this row, where it is another than the run's
    unavailable: str | None = None

    @property
    def fraction(self) -> float | None:
        """The share of the limit reached; above 1.02 the cost or the limit is wrong."""
        return self.floor_s / self.median_s if self.floor_s and self.median_s else None

    @property
    def key(self) -> tuple[str, ...]:
        return (self.op, self.direction, shape_text(self.shape), self.dtype, self.provider)

    def to_json(self) -> dict[str, Any]:
        row = {**dataclasses.asdict(self), "fraction": self.fraction}
        return {key: value for key, value in row.items() if value not in (None, "")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A benchmark of one machine: what `bench --json` and benchmarks/<gpu>.json hold."""

    gpu: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str
    limits: Limits
    rows: tuple[Result, ...]
    unwell: tuple[str, ...] = ()  # what was wrong with the machine meanwhile

    def merged(self, newer: Run) -> Run:
        """The newer run with this one's other rows, each with the commit that it was measured at."""
        if newer.gpu != self.gpu:
            raise BadInput(f"these are results of {self.gpu}, those of {newer.gpu}: keep them apart")
        measured = {row.key: dataclasses.replace(row, commit=row.commit or newer.commit) for row in newer.rows}
        kept = {row.key: dataclasses.replace(row, commit=row.commit or self.commit) for row in self.rows}
        return dataclasses.replace(newer, rows=tuple((kept | measured).values()))

    def to_json(self) -> dict[str, Any]:
        head = {name: getattr(self, name) for name in ("gpu", "driver", "torch", "triton", "commit", "date")}
        unwell = {"unwell": list(self.unwell)} if self.unwell else {}
        return {**head, **unwell, "limits": self.limits.to_json(), "rows": [row.to_json() for row in self.rows]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        rows = tuple(Result(**{key: value for key, value in row.items() if key != "fraction"}) for row in data["rows"])
        head = {name: data[name] for name in ("gpu", "driver", "torch", "triton", "commit", "date")}
        return cls(**head, limits=Limits.from_json(data["limits"]), rows=rows, unwell=tuple(data.get("unwell", ())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How one row moved between two runs, beyond what their spreads explain."""

    key: tuple[str, ...]
    before_s: float
    after_s: float
    noise: float  # the relative change below which nothing is said

    @property
    def ratio(self) -> float:
        return self.after_s / self.before_s

    @property
    def verdict(self) -> Literal["slower", "faster", "same"]:
        if self.ratio > 1 + self.noise:
            return "slower"
        return "faster" if self.ratio < 1 - self.noise else "same"


def compare(before: Iterable[Result], after: Iterable[Result], *, least: float = 0.02) -> list[Change]:
    """Rows that both runs have. Noise: four times the two spreads in quadrature, and at least 2 %."""
    old = {row.key: row for row in before if row.median_s}
    changes = []
    for row in after:
        was = old.get(row.key)
        if was is None or not was.median_s or not row.median_s:
            continue
        spread = math.hypot((was.spread_s or 0) / was.median_s, (row.spread_s or 0) / row.median_s)
        changes.append(Change(key=row.key, before_s=was.median_s, after_s=row.median_s, noise=max(least, 4 * spread)))
    return changes


def write_json(data: Any, path: Path) -> None:
    """JSON that others can read: no NaN, no infinity; all of it or nothing."""
    write_file(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", path)


def write_file(content: str | bytes, path: Path) -> None:
    """Write a whole file or nothing, as `writing` does."""
    with writing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside the target, then a rename: nobody finds half a file.

    A link's target is written, and what is no regular file (/dev/null, a pipe) is written to, never replaced.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        try:
            with path.open("wb") as file:
                yield file
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror}; name another file") from None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}; name another file") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from None
    finally:
        Path(name).unlink(missing_ok=True)


def read_run(path: Path) -> Run:
    """Read a results file; a `BadInput` of one line where it is missing or is no results file."""
    refuse_device(path)
    try:
        return Run.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadInput(f"{path} is not a results file: make one with `sublight bench --json FILE`") from None


def read_limits_file(path: Path) -> Limits:
    """Read limits from a file that the user named; a `BadInput` where that fails, and the file is left as it is."""
    refuse_device(path)
    try:
        return Limits.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; `sublight limits --json FILE` makes one") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadInput(f"{path} is not a file of limits: make one with `sublight limits --json FILE`") from None


def read_limits(path: Path) -> Limits | None:
    """Cached limits, or None; a corrupt file is renamed aside so that the next measurement can take its place."""
    try:
        return Limits.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        with contextlib.suppress(OSError):  # a folder that cannot be written is not the reader's problem
            path.rename(path.with_name(f"{path.name}.corrupt-{time.strftime('%Y%m%d-%H%M%S')}"))
        return None

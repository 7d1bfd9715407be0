"""Half a minute of load in three levels, the GPU watched meanwhile: is it as fast as its kind, and if not, why?

A level queues work for a fraction of a second, looks at the GPU while it works, waits for the end, and so on; what it
reaches is the rate of its second half, when clocks and heat have settled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sublight import gpus, units
from sublight.errors import BadInput
from sublight.health import check
from sublight.health.record import GpuState, known
from sublight.limits.verdict import NORMAL_SHARE_OF_REACHED, NORMAL_SHARE_OF_SPEC

BATCH_S = 0.3
FALLS = 0.03  # a rate that falls by more than this within a level is worth a word
Look = Callable[[], GpuState | None]


class Load(Protocol):
    """Work for a GPU."""

    name: str
    limit: str  # that it is held against: matmul_bf16
    unit: str
    seconds: float

    def start(self) -> None:
        """Queue a batch."""

    def finish(self) -> float:
        """Wait for it; how much it was, in the unit's numerator."""

    def is_right(self) -> bool:
        """Whether the last batch gave what it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One load: what it reached, and how the GPU was meanwhile."""

    name: str
    limit: str
    unit: str
    value: float
    expected: float | None  # what its kind reaches
    expected_from: str
    falls: float  # share that the rate lost from the first quarter to the last
    clock_hz: float | None  # lowest
    power_w: float | None  # highest
    temperature_c: float | None  # highest
    slowed_by: tuple[str, ...]
    faults: int  # batches that gave a wrong result

    @property
    def share(self) -> float | None:
        return self.value / self.expected if self.expected else None

    @property
    def is_low(self) -> bool:
        return self.share is not None and self.share < NORMAL_SHARE_OF_REACHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The levels, and the sentence that they come to."""

    name: str
    levels: tuple[Level, ...]
    problems: tuple[check.Problem, ...]  # seen before, during or after
    is_well: bool
    verdict: str


@dataclass(frozen=True, slots=True)
class _Sample:
    rate: float
    state: GpuState | None
    is_right: bool


def run(
    loads: Sequence[Load],
    look: Look,
    *,
    name: str,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str, int, int], None] | None = None,
) -> Diagnosis:
    """All levels, and the verdict."""
    gpu = _kind(name)
    seen: dict[tuple[str, str], check.Problem] = {}
    before = look()
    levels = []
    for at, load in enumerate(loads):
        if progress:
            progress(load.name, at, len(loads))
        samples = list(_samples(load, look, clock))
        for state in (before, *(sample.state for sample in samples)):
            seen |= {(each.kind, each.where): each for each in (check.of_gpu(state) if state else ())}
        levels.append(_level(load, samples, gpu))
    found = tuple(seen.values())
    well, verdict = judge(levels, found, before, look())
    return Diagnosis(name=name, levels=tuple(levels), problems=found, is_well=well, verdict=verdict)


def judge(
    levels: Sequence[Level], found: Sequence[check.Problem], before: GpuState | None, after: GpuState | None
) -> tuple[bool, str]:
    """Whether the GPU is well, and the sentence for it; wrong results weigh more than slow ones."""
    if faults := sum(level.faults for level in levels):
        return False, f"this GPU computes wrongly: {faults} of its batches gave a wrong result; have it replaced"
    if errors := _new_errors(before, after):
        return False, f"this GPU made {errors} under load; reset it, and have it replaced if they come back"
    low = [level for level in levels if level.is_low]
    if low:
        worst = min(low, key=lambda level: level.share or 0)
        below = 1 - (worst.share or 0)
        figures = units.part_of(worst.value, worst.expected or 0, worst.unit)
        words = f"this GPU is {units.percent(below)} below its kind in {worst.name} ({figures})"
        return False, f"{words}{_cause(worst, found)}"
    if grave := [problem for problem in found if problem.weight == "wrong"]:
        return False, f"this GPU is as fast as its kind, but {grave[0].line}"
    if not any(level.expected for level in levels):
        return True, "nothing is wrong with this GPU; how fast its kind is, is not known"
    falling = [level for level in levels if level.falls > FALLS]
    falls = f"; {falling[0].name} falls by {units.percent(falling[0].falls)} as it warms" if falling else ""
    return True, f"this GPU does what its kind does{falls}"


def _samples(load: Load, look: Look, clock: Callable[[], float]) -> Iterator[_Sample]:
    begin = clock()
    while (now := clock()) - begin < load.seconds:
        load.start()
        state = look()
        amount = load.finish()
        rate = amount / (clock() - now)
        yield _Sample(rate, state, load.is_right())


def _level(load: Load, samples: Sequence[_Sample], gpu: gpus.Gpu | None) -> Level:
    rates = [sample.rate for sample in samples]
    quarter = max(len(rates) // 4, 1)
    first, last = statistics.median(rates[:quarter]), statistics.median(rates[-quarter:])
    states = [sample.state for sample in samples if sample.state]
    clocks = [value for state in states if (value := known(state.clocks.sm_clock_hz)) is not None]
    watts = [value for state in states if (value := known(state.power.power_w)) is not None]
    degrees = [value for state in states if (value := known(state.power.temperature_c)) is not None]
    words = [word for state in states for word in known(state.clocks.slowed_by) or ()]
    expected, source = _expected(load, gpu)
    return Level(
        name=load.name,
        limit=load.limit,
        unit=load.unit,
        value=statistics.median(rates[len(rates) // 2 :]),
        expected=expected,
        expected_from=source,
        falls=max(0.0, 1 - last / first),
        clock_hz=min(clocks, default=None),
        power_w=max(watts, default=None),
        temperature_c=max(degrees, default=None),
        slowed_by=tuple(dict.fromkeys(words)),
        faults=sum(not sample.is_right for sample in samples),
    )


def _kind(name: str) -> gpus.Gpu | None:
    try:
        return gpus.find(name)
    except gpus.UnknownGpu:
        return None


def _expected(load: Load, gpu: gpus.Gpu | None) -> tuple[float | None, str]:
    """What others reached on this kind; else the share of the vendor's figure that a healthy one reaches."""
    if gpu is None:
        return None, "this kind is not in the table"
    if reached := gpu.reached.get(load.limit):
        return reached, gpu.sources.get(f"reached.{load.limit}", "reached by others")
    family, _, dtype = load.limit.partition("_")
    spec = gpu.peak_flops.get(dtype) if family == "matmul" else gpu.memory_bytes_per_s
    if not spec:
        return None, "the vendor gives no figure"
    # is_low takes its share of what others reached: of the vendor's figure less is expected, and no share of it again
    return spec * NORMAL_SHARE_OF_SPEC[family] / NORMAL_SHARE_OF_REACHED, "a share of the vendor's figure"


def _new_errors(before: GpuState | None, after: GpuState | None) -> str:
    """What was counted meanwhile."""
    if before is None or after is None:
        return ""
    ecc = (known(after.errors.ecc_uncorrected) or 0) - (known(before.errors.ecc_uncorrected) or 0)
    if ecc > 0:
        return f"{ecc} uncorrected ECC error{'s' if ecc > 1 else ''}"
    new = (known(after.xids) or ())[len(known(before.xids) or ()) :]
    grave = [f"XID {xid.number}" for xid in new if xid.number not in check.APPLICATION_XIDS]
    return f"the error {grave[0]}" if grave else ""


def _cause(level: Level, found: Sequence[check.Problem]) -> str:
    """Heat before power, power before neighbours."""
    heat = f" at {level.temperature_c:.0f} °C" if level.temperature_c is not None else ""
    thermal = [word for word in level.slowed_by if "thermal" in word or word == "hardware slowdown"]
    if thermal:
        return f" because it throttles{heat} ({', '.join(thermal)})"
    kinds = {problem.kind: problem for problem in found}
    for kind in ("power-limit", "shared", "clocks", "throttled"):
        if kind in kinds:
            return f": {kinds[kind].words}"  # type: ignore[index]
    if "power cap" in level.slowed_by:
        return f" because its power cap holds it at {units.text(level.clock_hz, 'Hz')}"
    return f"; its driver shows no cause (clock {units.text(level.clock_hz, 'Hz')}{heat})"


class Matmul:
    """bf16 products of random matrices; each must be the first one's, bit by bit."""

    def __init__(self, name: str, seconds: float, *, size: int = 8192) -> None:
        import torch

        self.name, self.limit, self.unit, self.seconds = name, "matmul_bf16", "FLOP/s", seconds
        self._a, self._b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._first = self._a @ self._b
        self._out = torch.empty_like(self._first)
        self._flops = 2.0 * size**3
        self._count = _how_many(self._launch)

    def start(self) -> None:
        for _ in range(self._count):
            self._launch()

    def finish(self) -> float:
        import torch

        torch.cuda.synchronize()
        return self._count * self._flops

    def is_right(self) -> bool:
        import torch

        return torch.equal(self._out, self._first)

    def _launch(self) -> Any:
        import torch

        return torch.mm(self._a, self._b, out=self._out)


class Copy:
    """Copies of random bytes through the memory; each must be equal."""

    def __init__(self, name: str, seconds: float, *, size_bytes: int = 2**31) -> None:
        import torch

        self.name, self.limit, self.unit, self.seconds = name, "hbm_copy", "B/s", seconds
        self._from = torch.randint(-(2**31), 2**31 - 1, (size_bytes // 4,), device="cuda", dtype=torch.int32)
        self._into = torch.empty_like(self._from)
        self._bytes = 2.0 * size_bytes  # read and written
        self._count = _how_many(lambda: self._into.copy_(self._from))

    def start(self) -> None:
        for _ in range(self._count):
            self._into.copy_(self._from)

    def finish(self) -> float:
        import torch

        torch.cuda.synchronize()
        return self._count * self._bytes

    def is_right(self) -> bool:
        import torch

        return torch.equal(self._into, self._from)


def _how_many(launch: Callable[[], Any]) -> int:
    """How many calls fill a batch."""
    import torch

    launch()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(4):
        launch()
    torch.cuda.synchronize()
    return max(1, round(BATCH_S / ((time.perf_counter() - begin) / 4)))


def gpu_loads() -> tuple[Load, ...]:
    """Quick, memory, sustained: half a minute on the GPU that torch calls cuda:0."""
    if gpus.detect() is None:
        raise BadInput("--diagnose loads a GPU, and torch finds none here: `sublight doctor` says why")
    return Matmul("a quick matmul", 4), Copy("memory", 8), Matmul("sustained matmul", 18)


def gpu_name() -> str:
    """The name that torch gives to cuda:0."""
    import torch

    return str(torch.cuda.get_device_name(0))

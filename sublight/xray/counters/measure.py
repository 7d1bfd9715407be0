"""Beside what was predicted, what a GPU says: the time of each launch, and its counters where `ncu` may read them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublight.errors import BadInput
from sublight.results import Samples
from sublight.timing import Thunk
from sublight.xray.counters import ncu_csv
from sublight.xray.counters.record import Counters, ratio, short_name, wanted
from sublight.xray.record import Access, AccessKind, Code, Space

CLOSE = 0.05  # predicted and counted agree within this share
MAX_LAUNCHES = 64  # that ncu profiles of one script: each is run again for every pass
MAX_SETS = 256  # copies of a launch's tensors, so that none is read from a cache
TIMEOUT_S = 600.0
MOST_INDEX = 2**40  # above it, a 64-bit integer is an address
_LACKING = re.compile(r"[Ff]ailed to find metric:? (?:regex:)?([\w.]+)")
FORBIDDEN = (
    "the driver keeps its counters for administrators (ERR_NVGPUCTRPERM): run as root, give the container "
    "--cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
)


class Unavailable(RuntimeError):
    """No counters; the message says why, and how to come by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One launch on this machine's GPU; what is missing has its reason."""

    kernel: str
    samples: Samples | None = None
    counters: Counters | None = None
    is_cold: bool = False  # the copies of its tensors together exceed the L2
    no_time: str = ""
    no_counters: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure, predicted and counted."""

    what: str  # global load
    unit: str  # sectors per request
    predicted: float | None
    counted: float | None
    note: str = ""  # why one of them is missing, or not to be compared

    @property
    def difference(self) -> float | None:
        """The prediction's error relative to the count: 0.05 is 5 % too high. None where the two cannot be compared."""
        share = ratio(self.predicted, self.counted)
        return None if share is None or self.note else share - 1

    @property
    def is_close(self) -> bool | None:
        return None if self.difference is None else abs(self.difference) <= CLOSE


def measure(
    launches: Sequence[tuple[Code, Any]],
    *,
    command: Sequence[str] = (),
    time_limit_s: float = 0.5,
) -> list[Measured]:
    """Time every recorded launch (the record and its Triton function), and count it in a run of `command` under ncu."""
    reason = _no_gpu()
    if reason:
        return [Measured(kernel=code.name, no_time=reason, no_counters=reason) for code, _ in launches]
    counted: list[Counters] = []
    no_counters = "" if command else "counters need a script to run under ncu: give it with --record"
    if command:
        try:
            counted = count(command, {code.name for code, _ in launches} | {code.symbol for code, _ in launches})
        except Unavailable as error:
            no_counters = str(error)
    measured = []
    for code, function in launches:
        samples, is_cold, no_time = _timed(code, function, time_limit_s)
        counters = counters_of(code, counted)
        why = "" if counters else no_counters or f"ncu saw no launch of {code.name} in that run"
        measured.append(
            Measured(kernel=code.name, samples=samples, counters=counters, is_cold=is_cold, no_time=no_time,
                     no_counters=why)
        )  # fmt: skip
    return measured


def count(
    command: Sequence[str],
    kernels: Iterable[str] = (),
    *,
    max_launches: int = MAX_LAUNCHES,
    timeout_s: float = TIMEOUT_S,
) -> list[Counters]:
    """Run a command under ncu, and read what it counted of these kernels (of all, where none is named)."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise Unavailable("ncu is not on the PATH: it comes with the CUDA toolkit (or its package nsight-compute)")
    metrics = wanted()
    text = _run(ncu_words(ncu, metrics, kernels, max_launches), command, timeout_s)
    lacking = set(_LACKING.findall(text))
    if lacking and ncu_csv.KERNEL not in text:  # older versions refuse what they do not know; newer ones write n/a
        known = [name for name in metrics if name not in lacking]
        text = _run(ncu_words(ncu, known, kernels, max_launches), command, timeout_s)
    if "ERR_NVGPUCTRPERM" in text:
        raise Unavailable(FORBIDDEN)
    if ncu_csv.KERNEL not in text:
        errors = [line for line in text.splitlines() if line.startswith("==ERROR==") or "No kernels" in line]
        raise Unavailable(
            f"ncu counted nothing: {errors[-1].removeprefix('==ERROR== ') if errors else 'it said no why'}"
        )
    return ncu_csv.parse(text)


def ncu_words(ncu: str, metrics: Sequence[str], kernels: Iterable[str], max_launches: int) -> list[str]:
    """The command before the user's: clocks as they are, base units, only these kernels."""
    words = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    words += ["--launch-count", str(max_launches), "--metrics", ",".join(metrics)]
    if names := sorted({re.escape(short_name(kernel)) for kernel in kernels if kernel}):
        words += ["--kernel-name-base", "function", "--kernel-name", f"regex:^({'|'.join(names)})$"]
    return words


def counters_of(code: Code, found: Sequence[Counters]) -> Counters | None:
    """The counters of this kernel: of the launch with the same grid if that is known, else of the first launch."""
    names = {short_name(code.name), short_name(code.symbol)}
    mine = [row for row in found if row.name in names]
    grid = (*code.grid, 1, 1)[:3] if code.grid else ()
    same = [row for row in mine if grid and row.grid == grid]
    return next(iter(same or mine), None)


def compare(predicted: Sequence[Access], counted: Counters) -> list[Compared]:
    """What was predicted access by access, summed as the hardware sums, beside what it counted.

    Only ratios: the prediction may have followed some of the programs, the hardware counts all.
    """
    rows = []
    for name, space, kinds, figures in _GROUPS:
        for unit, ours, below, theirs in figures:
            also = _counted_among(name, unit, counted)
            mine = [access for access in predicted if access.space == space and access.kind in (*kinds, *also)]
            known = [access for access in mine if not access.unknown]
            guess = ratio(
                sum(float(getattr(access, ours)) for access in known),
                sum(float(getattr(access, below)) for access in known),
            )
            seen = theirs(counted)
            if guess is None and not seen and not mine:
                continue
            unknown = len(mine) - len(known)
            note = f"{unknown} of {len(mine)} accesses could not be followed" if unknown else ""
            if not mine:
                note = "not predicted"
            elif not seen:
                note = note or "not counted"
            rows.append(Compared(what=name, unit=unit, predicted=guess, counted=seen, note=note))
    return rows


def _counted_among(name: str, unit: str, counted: Counters) -> tuple[AccessKind, ...]:
    """What a counter of loads also counts: cp.async, unless it was counted apart; by the pipe, matrix loads."""
    if name == "global load" and counted.load_requests is not None and counted.copy_requests is None:
        return ("async copy",)
    return ("matrix load",) if name == "shared load" and unit == _WAYS and counted.has_matrix_loads else ()


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


_SECTORS = "sectors per request"
_PASSES = "wavefronts per request"
_WAYS = "n-way conflict"
_Figure = tuple[str, str, str, Callable[[Counters], float | None]]  # unit, our numerator, denominator, theirs
_GROUPS: tuple[tuple[str, Space, tuple[AccessKind, ...], tuple[_Figure, ...]], ...] = (
    ("global load", "global", ("load",), ((_SECTORS, "sectors", "requests", lambda c: c.sectors_per_load),)),
    ("global store", "global", ("store",), ((_SECTORS, "sectors", "requests", lambda c: c.sectors_per_store),)),
    ("global atomic", "global", ("atomic",), (
        (_SECTORS, "sectors", "requests", lambda c: ratio(
            _sum(c.atomic_sectors, c.reduction_sectors), _sum(c.atomic_requests, c.reduction_requests))),)),
    ("global async copy", "global", ("async copy",), (
        (_SECTORS, "sectors", "requests", lambda c: ratio(
            _sum(c.copy_sectors, c.cached_copy_sectors), _sum(c.copy_requests, c.cached_copy_requests))),)),
    ("shared load", "shared", ("load",), (
        (_PASSES, "wavefronts", "requests", lambda c: c.passes_per_shared_load),
        (_WAYS, "wavefronts", "ideal_wavefronts", lambda c: c.shared_load_conflict))),
    ("shared store", "shared", ("store",), (
        (_PASSES, "wavefronts", "requests", lambda c: c.passes_per_shared_store),
        (_WAYS, "wavefronts", "ideal_wavefronts", lambda c: c.shared_store_conflict))),
    ("shared matrix load", "shared", ("matrix load",), (
        (_PASSES, "wavefronts", "requests",
         lambda c: ratio(c.shared_matrix_load_wavefronts, c.shared_matrix_load_requests)),
        (_WAYS, "wavefronts", "ideal_wavefronts", lambda c: c.shared_matrix_load_conflict))),
    ("shared, all", "shared", ("load", "store", "atomic", "async copy", "matrix load", "matrix store",
                               "matrix operand"), (
        (_WAYS, "all_wavefronts", "ideal_wavefronts", lambda c: c.shared_conflict),)),
)  # fmt: skip


def _no_gpu() -> str:
    try:
        import torch
    except ImportError:
        return "needs torch with a GPU: pip install torch"
    if not torch.cuda.is_available():
        return "no GPU here: profile on a machine with one (`ncu --csv --page raw … > r.csv`), then --import r.csv"
    return ""


def _run(words: Sequence[str], command: Sequence[str], timeout_s: float) -> str:
    """The table goes to a file of its own, apart from what the command prints."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        try:
            done = subprocess.run(
                [*words, "--log-file", str(log), *command],
                capture_output=True, text=True, errors="replace", timeout=timeout_s,
                env={**os.environ, "LC_ALL": "C.UTF-8"},  # else the numbers have this country's separators
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Unavailable(f"ncu took longer than {timeout_s:.0f} s: profile a script that launches less") from None
        except OSError as error:
            raise Unavailable(f"ncu did not start: {error.strerror}") from None
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if not text and done.returncode:
        raise Unavailable(f"ncu failed: {_last_line(done.stderr) or _last_line(done.stdout) or 'no message'}")
    return text


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _timed(code: Code, function: Any, time_limit_s: float) -> tuple[Samples | None, bool, str]:
    import torch

    from sublight import timing

    if function is None or not code.grid:
        return None, False, "only a recorded launch can be timed: run the script with --record"
    try:
        placed = on_gpu(code.arguments)
    except (RuntimeError, AssertionError, BadInput) as error:  # more than its memory holds, say
        return None, False, f"its tensors do not go to the GPU: {(str(error).splitlines() or ['no message'])[0]}"
    tensors = [value for value in placed.values() if isinstance(value, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    sets = min(MAX_SETS, timing.sets_for(max(1, sum(storages.values())), cache_bytes))
    calls = [launch_of(code, function, arguments) for arguments in copies(placed, sets)]
    try:
        samples = timing.measure(calls, time_limit_s=time_limit_s, keep_outputs=False)
    except (RuntimeError, BadInput) as error:
        return None, False, (str(error).splitlines() or ["it failed"])[0]
    return samples, sets * sum(storages.values()) > cache_bytes, ""


def launch_of(code: Code, function: Any, arguments: Mapping[str, Any]) -> Thunk:
    """The recorded launch of a Triton function, again, on these arguments."""
    named = {**arguments, **code.constants, **{key: value for key, value in code.options.items() if value is not None}}

    def call() -> Any:
        return function[code.grid](**named)

    return call


def on_gpu(arguments: Mapping[str, Any], device: str = "cuda") -> dict[str, Any]:
    """The arguments with every tensor there, whole storages at once; of those without data nothing is known but zeros.

    An op's launch is planned on tensors of the CPU. Where they hold addresses, as a table of tensors does, those would
    be of the CPU's memory.
    """
    import torch

    stored: dict[int, Any] = {}

    def placed(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(placed(one) for one in value)
        if not isinstance(value, torch.Tensor) or value.device.type not in ("cpu", "meta"):
            return value
        if value.dtype == torch.int64 and not value.is_meta and bool((value.abs() > MOST_INDEX).any()):
            raise BadInput("a tensor of its launch holds addresses: time a script that makes it, with --record")
        storage = value.untyped_storage()
        if storage._cdata not in stored:
            stored[storage._cdata] = (
                torch.zeros(storage.nbytes(), dtype=torch.uint8, device=device)
                if value.is_meta
                else torch.empty(0, dtype=torch.uint8).set_(storage).to(device, copy=True)  # type: ignore[call-overload]
            ).untyped_storage()
        empty = torch.empty(0, dtype=value.dtype, device=device)
        return empty.set_(stored[storage._cdata], value.storage_offset(), value.shape, value.stride())

    return {name: placed(value) for name, value in arguments.items()}


def copies(arguments: Mapping[str, Any], sets: int) -> list[dict[str, Any]]:
    """The arguments, and copies of them: same strides and alignment, and tensors that shared memory share it still."""
    import torch

    made = [dict(arguments)]
    for _ in range(sets - 1):
        storages: dict[int, Any] = {}
        row = dict(arguments)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                at = value.untyped_storage().data_ptr()
                if at not in storages:
                    storages[at] = value.untyped_storage().clone()
                empty = torch.empty(0, dtype=value.dtype, device=value.device)
                row[name] = empty.set_(storages[at], value.storage_offset(), value.shape, value.stride())
        made.append(row)
    return made

"""The steps of a ladder beside PyTorch and whoever else computes the same: checked by the one rule, then timed."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sublight import timing
from sublight.correct import FAR_OFF, Call, forward_errors, worst
from sublight.cost import Shape, parse_dtype, parse_shape
from sublight.errors import BadInput, nearest
from sublight.extensions.check import error_of
from sublight.extensions.ladder import Ladder, Rung
from sublight.results import Limits, Result

PREFIX = "cuda:"  # cuda:matmul is the ladder, matmul the op
TIME_LIMIT_S = 0.3
LARGEST_EXACT = 2**22  # elements whose exact sum a CPU makes in a second
MOST_SETS = 4  # sets of inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A ladder at a shape: all its steps are timed together."""

    ladder: Ladder
    shape: Shape
    dtype: str


def find(name: str, ladders: Sequence[Ladder]) -> Ladder:
    """The ladder of this name, with or without `cuda:`."""
    names = {ladder.name: ladder for ladder in ladders}
    if ladder := names.get(name.removeprefix(PREFIX)):
        return ladder
    near = nearest(name.removeprefix(PREFIX), list(names)).replace(", ", f", {PREFIX}")
    raise BadInput(f"unknown ladder {name!r}: did you mean {PREFIX}{near}?")


def cases(
    ladder: Ladder, shapes: Sequence[str] = (), dtypes: Sequence[str] = (), *, is_quick: bool = False
) -> list[Case]:
    """The ladder's own shapes and data types unless others are given; the first of each where time is short."""
    name = f"{PREFIX}{ladder.name}"
    chosen = [parse_dtype(words, ladder.dtypes) for words in dtypes] or list(ladder.shapes)
    own = next(iter(ladder.shapes.values()))[0]
    wanted = [parse_shape(words, name, own) for words in shapes]
    all_cases = [
        Case(ladder=ladder, shape=shape, dtype=dtype)
        for dtype in chosen
        for shape in wanted or ladder.shapes.get(dtype, (own,))[: 1 if is_quick else None]
    ]
    return all_cases[:1] if is_quick and not (wanted or dtypes) else all_cases


def rows(
    case: Case,
    device: str,
    cache_bytes: int,
    limits: Limits,
    *,
    others: Mapping[str, Call] | None = None,
    time_limit_s: float | None = None,
) -> Iterator[Result]:
    """PyTorch's row, those of `others` (functions of the same inputs, by name), and one for each step."""
    import torch

    ladder, shape, dtype = case.ladder, case.shape, case.dtype
    cost = ladder.cost(shape, dtype)
    sets = min(timing.sets_for(cost.bytes, cache_bytes), MOST_SETS)
    inputs = [ladder.inputs(shape, dtype, device, seed) for seed in range(sets)]
    floor = limits.floor(cost)
    row = Result(
        op=ladder.name,
        direction="fwd",
        shape=dict(shape),
        dtype=dtype,
        provider="torch",
        floor_s=floor.seconds if floor else None,
        bound=floor.bound if floor else "",
        bytes=cost.bytes,
        flops=cost.total_flops,
        cache="cold" if cost.bytes * sets >= cache_bytes else "warm",
    )

    def timed(row: Result, call: Call) -> Result:
        return _timed(row, [functools.partial(call, *each) for each in inputs], device, time_limit_s or TIME_LIMIT_S)

    def kernels(call: Call) -> tuple[str, ...]:
        return timing.kernels_of(functools.partial(call, *inputs[0]), device=device)

    yield timed(row, ladder.reference)
    for name, other in (others or {}).items():
        theirs = replace(row, provider=name)
        try:
            ran = kernels(other)
            theirs = replace(theirs, kernel=", ".join(dict.fromkeys(ran)), ours=ran != kernels(ladder.reference))
            error = worst(forward_errors(other, ladder.reference, inputs[0])).ratio
            yield replace(timed(theirs, other), error=min(error, FAR_OFF))
        except RuntimeError as failure:
            yield replace(theirs, unavailable=_reason(failure))
    for rung in ladder.rungs:
        mine = replace(row, provider=rung.name, ours=True, kernel=", ".join(rung.kernels))
        if dtype not in rung.dtypes or ladder.why_not(rung, *inputs[0]):
            continue
        try:
            error = error_at(ladder, rung, shape, dtype, device)
            yield replace(timed(mine, ladder.call(rung)), error=error)
        except RuntimeError as failure:  # an error of the driver must not cost the other steps their rows
            yield replace(mine, unavailable=_reason(failure))
    inputs.clear()
    if device == "cuda":
        torch.cuda.empty_cache()


def error_at(ladder: Ladder, rung: Rung, shape: Shape, dtype: str, device: str) -> float:
    """Ours over PyTorch's at the timed shape; of a single number, which takes several draws, at a smaller one."""
    if ladder.draws > 1:
        shape = {key: min(size, LARGEST_EXACT) for key, size in shape.items()}
    error = error_of(ladder, rung, shape, dtype, device)
    if error is None:
        raise RuntimeError("takes no such shape")
    return min(error.ratio, FAR_OFF)


def _reason(failure: RuntimeError) -> str:
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"[:200]


def _timed(row: Result, thunks: list[timing.Thunk], device: str, time_limit_s: float) -> Result:
    samples = timing.measure(thunks, device=device, time_limit_s=time_limit_s, keep_outputs=False)
    return replace(
        row,
        median_s=samples.median_s,
        spread_s=samples.spread_s,
        n=samples.n,
        method=samples.method,
        clock_mhz=samples.clock_mhz[1] if samples.clock_mhz else None,
        note=", ".join(filter(None, (samples.note, *samples.throttle))),
    )

"""Two proofs, of different kinds, that a module computes a formula: its structure and its values.

Structure: with gradients on, its forward calls the ops of the formula and nothing else, in every data type and mode,
and reads nothing that could make it do otherwise (`trace.py`). Values: what it gives and every gradient are the
formula's in float64 at scales from 1e-4 to 1e4 with outliers; and in each data type that it may run in, it is no
further from that than twice what PyTorch is, by its own op for the formula or op by op.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sublight.correct import FACTOR, Error, error
from sublight.fix.patch import held, probe
from sublight.fix.patch.trace import trace
from sublight.fix.patch.twin import set_training, shallow

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (1e-4, 1e-2, 1.0, 1e2, 1e4)
OUTLIER = 30.0  # times the scale
DRAWS = 8  # of rounding errors, at most
HOPELESS = 2.0  # times the rule: no luck
SURE = 0.75  # times the rule: what is beyond it may be luck
LONG = 1030  # rows of the long probe
MOST = 1 << 18  # numbers in it
MANY_BITS, MOST_BITS = 18, 56  # of a dimension's length where no values are held, and of their product
MODES = ((True, True), (False, True), (True, False), (False, False))  # training, gradients
Compute = Callable[[Any, torch.Tensor], torch.Tensor]  # (twin, x) -> y


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """What a module is to be proven to compute."""

    name: str  # in messages: "RMSNorm"
    budget: Mapping[str, int]  # ATen's ops that it may be written with, and how often each may occur
    compute: Compute  # in the data type of its inputs, as PyTorch's own op does it where there is one
    by_hand: Compute | None = None  # the same op by op, each rounded
    parameters: tuple[str, ...] = ()  # of the twin, whose gradients count
    any_width: bool = False  # of its rows: nothing in the module has their length


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What is proven of a module: for which data types, and what is missing."""

    dtypes: frozenset[torch.dtype] = frozenset()
    ranks: frozenset[int] = frozenset()  # of the inputs: one that names a dimension by its place is another for others
    missing: str = ""

    def holds_for(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dtype in self.dtypes and x.dim() in self.ranks


def prove(twin: Any, formula: Formula, x: torch.Tensor, runs_in: torch.dtype) -> Proof:
    """Both proofs, for a twin in float64 and an input whose first dimension is as long as SCALES."""
    if loose := next((name for name, value in vars(twin).items() if isinstance(value, torch.Tensor)), ""):
        return Proof(missing=f"structure not proven: it holds a tensor that is no parameter ({loose})")
    if missing := structure(twin, formula, x[:2]):
        return Proof(missing=f"structure not proven: {missing}")
    if missing := values(twin, formula, x):
        return Proof(missing=f"values not proven: {missing}")
    failed = {dtype: why for dtype in (*DTYPES, torch.float64) if (why := rounding(twin, formula, x, dtype))}
    if runs_in in failed:
        return Proof(missing=f"values not proven: {failed[runs_in]}")
    return Proof(dtypes=frozenset({*DTYPES, torch.float64} - failed.keys()), ranks=_ranks(twin, formula, x))


def scaled(x: torch.Tensor) -> torch.Tensor:
    """x times each scale, in a new first dimension, with an outlier in every row."""
    x = x.clone()
    x[..., x.shape[-1] // 2] *= OUTLIER
    return torch.stack([x * scale for scale in SCALES])


def structure(twin: Any, formula: Formula, x: torch.Tensor) -> str:
    """Why its forward is not made of the formula's ops; empty where it is."""
    for training, records, dtype in _modes():
        each = in_dtype(twin, dtype)
        set_training(each, training)
        before = contents(each)
        value = x.to(dtype) if x.is_floating_point() else x
        leaf = _leaf(value, records)
        with torch.set_grad_enabled(records), quiet():
            try:
                found = trace(type(each).forward, each, leaf)
            except Exception as failure:  # whatever a stranger's forward may raise
                return f"its forward does not take one tensor ({type(failure).__name__})"
        if why := found.why_not(formula.budget, formula.name):
            return why
        if leaf._version:
            return "its forward writes to its input"
        if contents(each) != before:
            return "its forward changes what the module holds"
        if not isinstance(found.result, torch.Tensor):
            return f"its forward gives a {type(found.result).__name__}"
        if records and not found.result.requires_grad:
            return "no gradient comes through its forward"
    return _by_size(twin, formula, x)


def _modes() -> Iterator[tuple[bool, bool, torch.dtype]]:
    """Training, gradients, data type."""
    return itertools.product((False, True), (False, True), (torch.float64, *DTYPES))


def _by_size(twin: Any, formula: Formula, x: torch.Tensor) -> str:
    """Whether it computes with its input's sizes: `0.001 * len(x)` leaves no trace but the number that an op gets."""
    there, (*rows, width) = on_meta(twin), x.shape
    many = (1 << min(MANY_BITS, MOST_BITS // x.dim())) + 7
    shapes = x.shape, (*(many for _ in rows), many if formula.any_width else width)
    numbers = []
    for shape in shapes:
        try:
            with torch.no_grad(), quiet():
                found = trace(type(there).forward, there, torch.empty(shape, dtype=torch.float64, device="meta"))
        except Exception as failure:  # whatever a stranger's forward may raise
            return f"its forward fails at other sizes ({type(failure).__name__})"
        numbers.append((found.ops, found.numbers))
    return "" if numbers[0] == numbers[1] else "its forward computes with sizes, and may do otherwise for others"


def _ranks(twin: Any, formula: Formula, x: torch.Tensor) -> frozenset[int]:
    """Those for which it computes the formula; that of x is proven."""
    rows, found = x.flatten(0, -2), {x.dim()}
    for each in (rows[0], rows, rows[None], rows[None, None], rows[None, None, None]):
        with contextlib.suppress(Exception):  # whatever a stranger's forward may raise
            if each.dim() not in found and not values(twin, formula, each, is_long=False):
                found.add(each.dim())
    return frozenset(found)


def values(twin: Any, formula: Formula, x: torch.Tensor, is_long: bool = True) -> str:
    """Why it does not compute the formula; empty where it does, gradients included, in float64."""
    for each in (x, long(x)) if is_long else (x,):
        theirs = _step(twin, formula.compute, each, formula.parameters)
        in_single: list[dict[str, torch.Tensor | None]] = []
        for name, one in _in_modes(twin, each, formula.parameters, MODES if is_long else MODES[:1]):
            other = theirs[name]
            if one is None or other is None or one.shape != other.shape:
                return f"{name} is not {formula.name}'s"
            for part in _parts(one, len(each)):
                if probe.same(one[part], other[part], _natural(name, theirs, each, part)):
                    continue
                in_single = in_single or _in_single(twin, formula, each)
                singles = [single for step in in_single if (single := step[name]) is not None]
                if not any(error(name, one[part].float(), single[part], other[part]).ok for single in singles):
                    return f"{name} is not {formula.name}'s"
    return ""


def _natural(name: str, step: Mapping[str, torch.Tensor | None], x: torch.Tensor, part: Any) -> float:
    """How large an input's gradient is if nothing cancels: a softmax that is all but certain has next to none."""
    y = step["its result"]
    if name != "the gradient of its input" or y is None or isinstance(part, slice):
        return 0.0
    return float(y[part].abs().max() / x[part].abs().max())


def _in_single(
    twin: Any, formula: Formula, x: torch.Tensor, seed: int = probe.SEED
) -> list[dict[str, torch.Tensor | None]]:
    """The formula in float32: a forward that casts to it can be no nearer to float64."""
    return _ways(in_dtype(twin, torch.float32), formula, x.float(), seed)


def _ways(twin: Any, formula: Formula, x: torch.Tensor, seed: int) -> list[dict[str, torch.Tensor | None]]:
    """The formula in this data type, by each way that it may be written."""
    calls = [call for call in (formula.compute, formula.by_hand) if call is not None]
    return [_step(twin, call, x, formula.parameters, seed=seed) for call in calls]


def _parts(x: torch.Tensor, scales: int) -> Sequence[Any]:
    """Each scale by itself: beside 1e8, what is wrong at 1e-4 would not show."""
    return range(scales) if x.dim() > 1 and len(x) == scales else (slice(None),)


def rounding(twin: Any, formula: Formula, x: torch.Tensor, dtype: torch.dtype) -> str:
    """Why it does not compute the formula in this data type; empty where it does.

    One draw of few numbers may be luck, good or bad: where a ratio is near the rule, on whichever side, more draws are
    pooled with it, and the last one decides.
    """
    narrow = in_dtype(twin, dtype)
    pooled: dict[Any, list[Error]] = {}
    for draw in range(DRAWS):
        why, drawn = _drawn(narrow, formula, x.roll(draw, -1).to(dtype), dtype, probe.SEED + draw)
        if why:
            return why
        for key, errors in drawn.items():
            pooled[key] = [one.merge(other) for one, other in zip(pooled.get(key, errors), errors, strict=True)]
        nearest = {key: min(each.ratio for each in errors) for key, errors in pooled.items()}
        beyond = {key: ratio for key, ratio in nearest.items() if not ratio <= FACTOR}
        farthest = max(nearest.values(), default=0.0)
        if farthest <= SURE * FACTOR or not farthest <= HOPELESS * FACTOR:
            break
    if not beyond:
        return ""
    (_, name, _), *_ = beyond
    return f"in {str(dtype).removeprefix('torch.')}, {name} is not {formula.name}'s"


def _drawn(
    narrow: Any, formula: Formula, x: torch.Tensor, dtype: torch.dtype, seed: int
) -> tuple[str, dict[Any, list[Error]]]:
    """What rounding cannot explain; and the errors beside each way to compute the formula, by mode, name and part."""
    wide = in_dtype(narrow, torch.float64)
    is_wide = dtype == torch.float64  # where a forward that casts is as near as the formula in float32
    theirs = _in_single(narrow, formula, x, seed) if is_wide else _ways(narrow, formula, x, seed)
    truth = _step(wide, formula.compute, x.double(), formula.parameters, seed=seed)
    found: dict[Any, list[Error]] = {}
    for number, (name, one) in enumerate(_in_modes(narrow, x, formula.parameters, MODES, seed)):
        others, true = [each[name] for each in theirs], truth[name]
        if one is None or true is None or one.dtype != dtype:
            return f"{name} is of another data type than {str(dtype).removeprefix('torch.')}", {}
        for part in _parts(true, len(x)):
            if not bool(true[part].to(dtype).isfinite().all()):
                continue  # beyond the data type: the formula has no right answer there
            if float(true[part].abs().max()) < torch.finfo(dtype).eps * _natural(name, truth, x.double(), part):
                continue  # all of it cancels: what is left is rounding
            if is_wide and probe.same(one[part], true[part], _natural(name, truth, x, part), probe.TIGHT):
                continue
            key, mine = (number, name, part if isinstance(part, int) else None), one.float() if is_wide else one
            found[key] = [error(name, mine[part], other[part], true[part]) for other in others if other is not None]
    return "", found


def long(x: torch.Tensor) -> torch.Tensor:
    """The same rows again and again, in the dimension before the last."""
    if x.dim() < 2:
        return x
    times = min(-(-LONG // x.shape[-2]), max(1, MOST // x.numel()))
    return x.repeat(*[1] * (x.dim() - 2), times, 1)


def _in_modes(
    twin: Any, x: torch.Tensor, parameters: tuple[str, ...], modes: Sequence[tuple[bool, bool]], seed: int = probe.SEED
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """What its own forward gives in each: a result, and gradients where they are recorded."""
    for training, records in modes:
        yield from _step(twin, _own, x, parameters, training, records, seed).items()


def _step(
    twin: Any,
    call: Compute,
    x: torch.Tensor,
    parameters: tuple[str, ...],
    training: bool = True,
    records: bool = True,
    seed: int = probe.SEED,
) -> dict[str, torch.Tensor | None]:
    """What a call gives, and the gradients."""
    leaves = {name: getattr(twin, name).detach().requires_grad_() for name in parameters}
    holder = shallow(twin)
    vars(holder)["_parameters"] = vars(twin)["_parameters"] | leaves
    set_training(holder, training)
    x = x.detach().requires_grad_(records)
    with torch.set_grad_enabled(records), quiet():
        y = call(holder, x)
        if not records:
            return {"its result": y.detach()}
        inputs = [x, *leaves.values()]
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)
        grads = torch.autograd.grad(y, inputs, grad, allow_unused=True)
    named = dict(zip((f"the gradient of {name}" for name in ("its input", *leaves)), grads, strict=True))
    return {"its result": y.detach(), **named}


def _own(twin: Any, x: torch.Tensor) -> torch.Tensor:
    return type(twin).forward(twin, x)  # type: ignore[no-any-return]


def in_dtype(twin: Any, dtype: torch.dtype) -> Any:
    """The twin with parameters, buffers and children in this data type."""
    return _mapped(twin, lambda x: x.to(dtype) if x.is_floating_point() else x)


def on_meta(twin: Any) -> Any:
    """The twin without values."""
    return _mapped(twin, lambda x: x.to("meta"))


def _mapped(twin: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    other = shallow(twin)
    for kind in ("_parameters", "_buffers"):
        vars(other)[kind] = {name: x if x is None else change(x) for name, x in vars(twin)[kind].items()}
    children = vars(twin)["_modules"].items()
    vars(other)["_modules"] = {name: child if child is None else _mapped(child, change) for name, child in children}
    return other


def contents(twin: Any) -> Any:
    """What a module holds, to see whether a call changes it."""
    own = {
        name: _plain(value, 3) for name, value in vars(twin).items() if name not in probe.EVERY_MODULES | {"training"}
    }
    tensors = [(name, x, x._version) for name, x in _tensors(twin) if x is not None]
    own["of tensors"] = [(name, Same(x), version) for name, x, version in tensors]
    return own, {name: contents(child) for name, child in vars(twin)["_modules"].items() if child is not None}


def _tensors(twin: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    for kind in ("_parameters", "_buffers"):
        yield from vars(twin)[kind].items()


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """Equal to itself alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


def _plain(value: Any, depth: int) -> Any:
    if held.is_setting(value):
        return copy.deepcopy(value)
    if depth and isinstance(value, Mapping):
        return {repr(key): _plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth - 1) for item in value]
    if depth and not isinstance(value, torch.nn.Module | torch.Tensor | type):
        names = [name for name in held.names_in(value) if hasattr(value, name)]
        return Same(value), {name: _plain(getattr(value, name), depth - 1) for name in names}
    return Same(value)


def _leaf(x: torch.Tensor, records: bool) -> torch.Tensor:
    return x.detach().clone().requires_grad_(records and x.is_floating_point())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings, and random numbers as they were: the user gets both when he calls it."""
    state = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(state)

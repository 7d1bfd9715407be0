"""Launches of one of our ops, from its record, at the shape that was asked for; data come from a smaller one.

What follows memory accesses needs the launch's grid and numbers, the integers that addresses may depend on, and values
that branches depend on. A smaller shape that takes the same code is made in full, and its values stand where the first,
the middle and the last block of the large one read. What a kernel before would have computed is not known.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sublight.backend.record import Launch, compilable, no_interpreter
from sublight.correct import Inputs
from sublight.cost import Shape, shape_text
from sublight.errors import BadInput, nearest
from sublight.gpus import Gpu
from sublight.op import Op
from sublight.xray.compile import TARGETS, make, recording

MAX_ELEMENTS = 2**22  # of all inputs, up to which they are made in full
MAX_INTEGERS = 2**26  # of one tensor
MAX_BYTES = 2**33  # of one tensor that is hardly touched: its pages are never there
_FILL = "fill_uninitialized_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfOp:
    """What a typical call of an op launches, and what it does not."""

    launches: tuple[Launch, ...]
    shapes: tuple[Shape, ...]  # of each launch
    others: Mapping[str, Shape] = field(default_factory=dict)  # kernels of the benchmark's other shapes
    unmet: Mapping[str, Shape] = field(default_factory=dict)  # kernels that only shapes of the tests launch


def launches_of_op(op: Op, gpu: Gpu, *, kernel: str = "", shape: str = "", dtype: str = "bfloat16") -> OfOp:
    """The kernels of a plain call, forward and backward, at the shape given, else at a typical one of the benchmark's.

    A kernel that is named comes as the most demanding shape of the benchmark has it, or of the tests, with gaps between
    rows and options. Launches have tensors of the CPU for arguments, or, of what a kernel before computes, without
    data.
    """
    no_interpreter()
    capability = compilable(gpu)
    names = [each.name for each in op.kernels]
    if kernel and kernel not in names:
        raise BadInput(f"{op.name} has no kernel {kernel!r}: it has {nearest(kernel, names)}")
    family = max((target for target in TARGETS if target <= capability), default=min(TARGETS))
    own = {each.name for each in op.kernels if family in each.targets}
    shapes = (op.parse_shape(shape),) if shape else op.shapes
    met = _largest_launches(op, shapes, dtype, gpu, _call)
    unmet: dict[str, tuple[Launch, Shape]] = {}
    if kernel not in ("", *met) or not (shape or kernel):
        every = _largest_launches(op, shapes if shape else (*op.shapes, *op.test_shapes), dtype, gpu, make)
        unmet = {name: each for name, each in every.items() if name not in met and name in own}
    if kernel:
        shown = {name: each for name, each in {**met, **unmet}.items() if name == kernel}
    else:
        shown = met if shape else _largest_launches(op, (_typical(op, dtype, gpu),), dtype, gpu, _call)
    best = {name: each for name, each in shown.items() if name in own}
    if not best:
        raise BadInput(_why_none(op, gpu, kernel, shape, dtype, sorted(met)))
    found = [best[name] for name in names if name in best]
    launches = tuple(_with_arguments(op, launch, at, dtype, gpu) for launch, at in found)
    of_found = tuple(at for _, at in found)
    if kernel or shape:
        return OfOp(launches=launches, shapes=of_found)
    return OfOp(
        launches=launches,
        shapes=of_found,
        others={name: at for name, (_, at) in met.items() if name not in best and name in own},
        unmet={name: at for name, (_, at) in unmet.items()},
    )


def _typical(op: Op, dtype: str, gpu: Gpu) -> Shape:
    """A shape of middle size among the benchmark's shapes that launch the most usual kernels."""
    by_kernels: dict[tuple[str, ...], list[Shape]] = {}
    for each in op.shapes:
        kernels = tuple(sorted({launch.kernel for launch in _recorded(op, each, dtype, gpu, "meta", _call)}))
        by_kernels.setdefault(kernels, []).append(each)
    alike = max(by_kernels.values(), key=len)
    return sorted(alike, key=lambda shape: _elements(op, shape, dtype))[len(alike) // 2]


def _largest_launches(
    op: Op, shapes: Iterable[Shape], dtype: str, gpu: Gpu, run: Callable[[Op, Inputs], None]
) -> dict[str, tuple[Launch, Shape]]:
    """For each kernel the launch that holds most, and its shape."""
    best: dict[str, tuple[Launch, Shape]] = {}
    for each in shapes:
        for launch in _recorded(op, each, dtype, gpu, "meta", run):
            if launch.kernel not in best or launch.size > best[launch.kernel][0].size:
                best[launch.kernel] = launch, each
    return best


def _call(op: Op, inputs: Inputs) -> None:
    """What one plain call launches, forward and backward."""
    import torch

    result = op.launch(*inputs)
    if op.launch_backward:
        outputs = result if isinstance(result, tuple) else (result,)
        op.launch_backward(*(torch.ones_like(y) for y in outputs if y.is_floating_point()), *inputs)


def launches_at(op: Op, gpu: Gpu, shape: Shape, dtype: str = "bfloat16") -> list[Launch]:
    """What one forward call launches at that shape, in its order."""
    no_interpreter()
    with recording(compilable(gpu), gpu) as launches:
        op.launch(*op.inputs(shape, dtype, "meta", 0))
    return [_with_arguments(op, launch, shape, dtype, gpu) for launch in launches]


def _recorded(
    op: Op, shape: Shape, dtype: str, gpu: Gpu, device: str, run: Callable[[Op, Inputs], None] = make
) -> list[Launch]:
    with recording(compilable(gpu), gpu) as launches:
        run(op, op.inputs(shape, dtype, device, 0))
    return launches


def _with_arguments(op: Op, launch: Launch, shape: Shape, dtype: str, gpu: Gpu) -> Launch:
    """The same launch on tensors that are there, in full or in the parts that are looked at."""
    small = _smaller(op, launch, shape, dtype, gpu)
    if _elements(op, small, dtype) > 4 * MAX_ELEMENTS:
        return launch
    inputs = op.inputs(small, dtype, "cpu", 0)
    with _marked(), recording(compilable(gpu), gpu) as launches:
        make(op, inputs)
    made = next((each for each in launches if each.key == launch.key), None)
    if made is None or small == shape:
        return made or launch
    enlarged = _Enlarged({x.untyped_storage()._cdata for x in inputs})
    named = {name: enlarged.of(value, made.arguments.get(name)) for name, value in launch.arguments.items()}
    return made if enlarged.has_table else replace(launch, arguments=named)


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    """Memory that nobody has written holds the largest integer, so that it can be told from a launcher's tables."""
    import torch
    from torch.utils import deterministic as settings

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = getattr(settings, _FILL)  # a property of the module, which type checkers do not see
    setattr(settings, _FILL, True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        setattr(settings, _FILL, filled)


class _Enlarged:
    """Tensors without data, with those of a smaller launch."""

    def __init__(self, inputs: set[int]) -> None:
        self.inputs = inputs  # storages
        self.has_table = False  # that a launcher wrote for the smaller shape: of the larger one it says nothing
        self._known: dict[int, Any] = {}

    def of(self, value: Any, made: Any) -> Any:
        """Inputs of the op with the smaller one's values, counters with zeros; others as they are."""
        import torch

        if isinstance(value, tuple | list) and isinstance(made, tuple | list):
            pairs = zip(value, (*made, *(made[-1:] * len(value))), strict=False)  # a longer list has more of the last
            return type(value)(self.of(one, of_one) for one, of_one in pairs)
        if not isinstance(value, torch.Tensor) or not isinstance(made, torch.Tensor) or not made.numel():
            return value
        storage, small = value.untyped_storage(), made.untyped_storage()
        is_integer = not (value.is_floating_point() or value.is_complex())
        if small._cdata not in self.inputs:
            if not is_integer or bool((made == _largest(made.dtype)).all()):
                return value
            self.has_table |= bool(made.any())
        is_whole = is_integer and storage.nbytes() <= MAX_INTEGERS * value.element_size()
        if value.dtype != made.dtype or not (is_whole or storage.nbytes() <= MAX_BYTES):
            return value
        if storage._cdata not in self._known:
            few = torch.empty(0, dtype=torch.uint8).set_(small)  # type: ignore[call-overload]
            self._known[storage._cdata] = _repeated(few, storage.nbytes(), is_whole=is_whole)
        flat = self._known[storage._cdata].view(value.dtype)
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())


def _largest(dtype: Any) -> int:
    import torch

    return 1 if dtype == torch.bool else int(torch.iinfo(dtype).max)


def _repeated(few: Any, size: int, *, is_whole: bool) -> Any:
    """So many bytes of these over and over; else these at the beginning, in the middle and at the end."""
    import numpy as np
    import torch

    if is_whole or size <= 3 * len(few):
        return few.repeat(-(-size // len(few)))[:size]
    many = torch.from_numpy(np.zeros(size, np.uint8))  # pages come when they are written
    half = len(few) // 32 * 16  # a whole number of any element
    for at in (0, size // 32 * 16 - half, size - len(few)):
        many[at : at + len(few)] = few
    return many


def _smaller(op: Op, launch: Launch, shape: Shape, dtype: str, gpu: Gpu) -> Shape:
    """Halve the dimensions in their order, rows first, as long as the same code is launched."""
    for key in op.keys:
        while _elements(op, shape, dtype) > MAX_ELEMENTS and shape[key] > 1:
            half = {**shape, key: shape[key] // 2}
            if not _takes(op, half, launch, dtype, gpu):
                break
            shape = half
    return shape


def _takes(op: Op, shape: Shape, launch: Launch, dtype: str, gpu: Gpu) -> bool:
    try:
        return any(each.key == launch.key for each in _recorded(op, shape, dtype, gpu, "meta"))
    except Exception:  # half of a number that is no size, such as an order of dimensions, is no shape of this op
        return False


def _elements(op: Op, shape: Shape, dtype: str) -> int:
    return sum(math.prod(x.shape) for x in op.inputs(shape, dtype, "meta", 0))


def _why_none(op: Op, gpu: Gpu, kernel: str, shape: str, dtype: str, launched: list[str]) -> str:
    if kernel in launched or not kernel:
        return f"{kernel or op.name} is not for {gpu.key}: name another GPU with --gpu"
    at = f" at {shape_text(op.parse_shape(shape))}" if shape else ""
    return f"{op.name} launches {', '.join(launched)}{at} in {dtype}, not {kernel}: try another --shape or --dtype"

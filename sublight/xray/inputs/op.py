"""Launches of one of our ops, from its record: the code of the most demanding shape, the arguments of a small one."""

from __future__ import annotations

import math

from sublight.gpus import Gpu
from sublight.op import BadInput, Op, Shape, nearest, shape_text
from sublight.xray.compile import TARGETS, kernel_of, make, recording
from sublight.xray.launch import Launch, compilable, no_interpreter

MAX_ELEMENTS = 2**22  # of all inputs: what follows memory accesses needs real tensors, and few rows show them all


def launches_of_op(op: Op, gpu: Gpu, *, kernel: str = "", shape: str = "", dtype: str = "bfloat16") -> list[Launch]:
    """Every kernel of the op once, as its most demanding shape has it; with a shape, the kernels of that one.

    They come with CPU tensors for arguments, of fewer rows where that leaves the code as it is.
    """
    no_interpreter()
    capability = compilable(gpu)
    names = [each.name for each in op.kernels]
    if kernel and kernel not in names:
        raise BadInput(f"{op.name} has no kernel {kernel!r}: it has {nearest(kernel, names)}")
    family = max((target for target in TARGETS if target <= capability), default=min(TARGETS))
    best: dict[str, tuple[Launch, Shape]] = {}
    launched: list[str] = []
    for each in (op.parse_shape(shape),) if shape else (*op.shapes, *op.test_shapes):
        for launch in _recorded(op, each, dtype, gpu, "meta"):
            launched.append(launch.kernel)
            if family not in kernel_of(op, launch.kernel).targets or kernel not in ("", launch.kernel):
                continue
            if launch.kernel not in best or launch.size > best[launch.kernel][0].size:
                best[launch.kernel] = launch, each
    if not best:
        raise BadInput(_why_none(op, gpu, kernel, shape, dtype, sorted(set(launched))))
    return [_with_arguments(op, *best[name], dtype, gpu) for name in names if name in best]


def _recorded(op: Op, shape: Shape, dtype: str, gpu: Gpu, device: str) -> list[Launch]:
    with recording(compilable(gpu), gpu) as launches:
        make(op, op.inputs(shape, dtype, device, 0))
    return launches


def _with_arguments(op: Op, launch: Launch, shape: Shape, dtype: str, gpu: Gpu) -> Launch:
    """The same code, launched on tensors that are there; without them where no small shape takes that code."""
    small = _smaller(op, launch, shape, dtype, gpu)
    if _elements(op, small, dtype) > 4 * MAX_ELEMENTS:
        return launch
    found = [each for each in _recorded(op, small, dtype, gpu, "cpu") if each.key == launch.key]
    return found[0] if found else launch


def _smaller(op: Op, launch: Launch, shape: Shape, dtype: str, gpu: Gpu) -> Shape:
    """Halve the dimensions in their order, rows first, as long as the same code is launched."""
    for key in op.keys:
        while _elements(op, shape, dtype) > MAX_ELEMENTS and shape[key] > 1:
            half = {**shape, key: shape[key] // 2}
            if all(each.key != launch.key for each in _recorded(op, half, dtype, gpu, "meta")):
                break
            shape = half
    return shape


def _elements(op: Op, shape: Shape, dtype: str) -> int:
    return sum(math.prod(x.shape) for x in op.inputs(shape, dtype, "meta", 0))


def _why_none(op: Op, gpu: Gpu, kernel: str, shape: str, dtype: str, launched: list[str]) -> str:
    if kernel in launched or not kernel:
        return f"{kernel or op.name} is not for {gpu.key}: name another GPU with --gpu"
    at = f" at {shape_text(op.parse_shape(shape))}" if shape else ""
    return f"{op.name} launches {', '.join(launched)}{at} in {dtype}, not {kernel}: try another --shape or --dtype"

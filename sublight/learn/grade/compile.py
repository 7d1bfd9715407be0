"""A submission on a GPU that is not here: its launches are noted instead of made, compiled for that GPU and read.

The first call is on tensors of the grader's, with launches left out: if they are right nevertheless, no kernel computed
them. The second is at the goal's size, for the figures.
"""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from sublight.backend import private
from sublight.errors import BadInput
from sublight.gpus import Gpu
from sublight.gpus import find as find_gpu
from sublight.learn.grade import child
from sublight.learn.grade.buffers import Spec, mapped
from sublight.learn.grade.guard import Guard
from sublight.learn.grade.launches import is_place, words_of
from sublight.xray.build import code_of
from sublight.xray.examine import Bounded, bounded
from sublight.xray.inputs.pretended import gpu_pretended
from sublight.xray.record import Code

PTR_TO_INT = "tt.ptr_to_int"  # in Triton's own representation
_GIVE = "give the kernel tensors, and offsets as numbers"


def prepared() -> child.Serve:
    """Everything that every check needs; what it gives is called in a process of its own."""
    _warm_up()

    def serve(channel: Connection, order: dict[str, Any]) -> None:
        gpu = find_gpu(order["gpu"])
        launches: list[Any] = []
        with child.answering(channel) as answer:
            try:
                with gpu_pretended(gpu, launches):
                    function = child.load(order, programs=True)
                    answer(failure=None)
                    guard = Guard(order["source"])
                    for case in child.orders(channel):
                        del launches[:]
                        tensors = _tensors(case)
                        with guard:
                            function(*tensors)
                        unfilled = _unfilled(case, tensors)
                        compiled = {} if case["is_small"] else _compiled(launches, gpu, tensors, unfilled)
                        answer(failure=None, torch=guard.noted, launches=len(launches), **compiled)
            except BaseException as error:
                answer(failure=child.failure_of(error, order["source"]))

    return serve


def _warm_up() -> None:
    """Load what a check would load, and hash Triton's own files, which its cache does once a process."""
    with gpu_pretended(find_gpu("h200"), []):
        _ = private.GluonASTSource, private.code_generator
    with contextlib.suppress(ImportError):
        private.triton_key()


def _tensors(case: dict[str, Any]) -> list[Any]:
    import numpy as np
    import torch

    specs = [Spec.from_json(spec) for spec in (*case["inputs"], *case["outputs"])]
    if case["is_small"]:
        return [mapped(spec).tensor for spec in specs]
    made = []
    for spec in specs:
        if spec.file:
            made.append(mapped(spec).tensor)
            continue
        kind = getattr(torch, spec.dtype)
        reach = sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True)) + 1
        pages = np.zeros(reach * kind.itemsize, np.uint8)  # pages come when they are touched, and few are
        made.append(torch.from_numpy(pages).view(kind).as_strided(spec.shape, spec.strides))
    return made


def _unfilled(case: dict[str, Any], tensors: list[Any]) -> set[int]:
    """The storages of tensors that have no numbers of the problem's in them."""
    specs = (*case["inputs"], *case["outputs"])
    return {_storage(x) for spec, x in zip(specs, tensors, strict=True) if not Spec.from_json(spec).file}


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Blank:
    """Arguments as xray may see them: where floating-point numbers would lie, and all of `unfilled`, nothing is known.
    Zeros are there, and code that branches on what it loads would be judged by the way that zeros take."""

    def __init__(self, unfilled: set[int]) -> None:
        self._unfilled = unfilled
        self._stand_ins: dict[int, Any] = {}  # for each storage one: views of the same memory stay so

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(self, value)) if type(value) in (tuple, list) else value
        if not hasattr(value, "untyped_storage"):
            if not hasattr(value, "base"):
                return value
            described = copy.copy(value)  # a tensor descriptor
            object.__setattr__(described, "base", self(value.base))
            return described
        key = _storage(value)
        return self._view(value, key) if value.is_floating_point() or key in self._unfilled else value

    def _view(self, value: Any, key: int) -> Any:
        import torch

        size = value.untyped_storage().nbytes()
        whole = self._stand_ins.setdefault(key, torch.empty(size, dtype=torch.uint8, device="meta"))
        whole = whole[: size // value.element_size() * value.element_size()].view(value.dtype)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _compiled(launches: list[Any], gpu: Gpu, tensors: list[Any], unfilled: set[int]) -> dict[str, Any]:
    """Each launch's figures; those that share their code and grid are compiled and followed once."""
    blank = _Blank(unfilled)
    known: dict[str, tuple[Code, Bounded]] = {}
    made_of, refused = [], ""
    for launch in launches:
        key = f"{launch.key} {launch.grid}"
        try:
            if key not in known:
                code = code_of(launch, gpu)
                code = replace(code, arguments={name: blank(value) for name, value in code.arguments.items()})
                known[key] = code, bounded(code)
            if (
                any(is_place(value, tensors) for value in launch.arguments.values())
                or PTR_TO_INT in known[key][0].ttgir
            ):
                raise BadInput(f"{launch.kernel} makes a number of an address, which is another one each time: {_GIVE}")
            room = known[key][1].occupancy
            if room and room.reason:
                raise BadInput(f"{launch.kernel} does not fit on {gpu.name}: {room.reason}; take a smaller block")
        except BadInput as error:
            refused = str(error)
            break
        made_of.append(figures(*known[key], launch.grid))
    made = [words_of(launch.jit, launch.grid, launch.arguments, tensors) for launch in launches]
    return {"kernels": made_of, "refused": refused, "made": made}


def figures(code: Code, bound: Bounded, grid: tuple[int, ...]) -> dict[str, Any]:
    known = [access for access in bound.accesses if access.space == "global" and not access.unknown]
    highest = bound.roof.highest
    return {
        "name": code.name,
        "registers": code.resources.registers,
        "spill_bytes": code.resources.spill_bytes,
        "occupancy": bound.occupancy.fraction if bound.occupancy else None,
        "limited_by": ", ".join(bound.occupancy.limited_by) if bound.occupancy else "",
        "sectors": sum(access.sectors for access in known),
        "ideal_sectors": sum(access.ideal_sectors for access in known),
        "programs": math.prod(grid),
        "seconds": highest.seconds if highest else None,
        "sentence": bound.roof.sentence or "; ".join(bound.notes),
        "uncounted": next((each.unknown for each in bound.accesses if each.kind == "bulk copy" and each.unknown), ""),
        "unfollowed": bound.followed.problem or next((stop.reason for stop in bound.followed.stops), ""),
    }

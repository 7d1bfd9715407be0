"""Where the tensors of an AdamW update lie, as tables on the device: what its kernels find their tensors by.

Addresses change seldom, so a table is sent once and kept; within a CUDA graph's capture, where nothing can be copied
from the host, it is written by launches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sublight.backend.jit import cdiv
from sublight.backend.private import foreach_add_
from sublight.correct import Inputs
from sublight.errors import BadInput
from sublight.ops.record.tuning import TRIAL, Tile


class Kind(NamedTuple):
    """What tensors have in common that one launch takes."""

    device: torch.device
    param: torch.dtype
    grad: torch.dtype
    average: torch.dtype
    is_aligned: bool  # 16 divides the addresses of all but the steps


class Group(NamedTuple):
    """Tensors of one kind without their addresses: what a plan depends on."""

    kind: Kind
    tensors: int
    chunks: int
    tile: Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors of one kind, and where the device finds them."""

    group: Group
    where: tuple[torch.Tensor, ...]  # addresses of parameters, gradients, averages, averages of squares, steps
    sizes: torch.Tensor  # a tensor's elements, and its first chunk
    chunks: torch.Tensor  # the tensor that each chunk belongs to
    kinds: Inputs  # empty, with the data types of parameters, gradients and averages


class _Capturing(Exception):
    """Nothing can be copied from the host now."""


@functools.lru_cache(maxsize=2**14)
def _sent(numbers: tuple[int, ...], device: torch.device, repeats: tuple[int, ...] = ()) -> torch.Tensor:
    """Numbers on a device, the i-th repeats[i] times; on a stream of its own, so that nobody waits for anybody's work,
    and complete, so that any stream may read them."""
    found = torch.tensor(numbers, dtype=torch.int64)
    if repeats:
        found = torch.repeat_interleave(found.int(), torch.tensor(repeats))
    if device.type != "cuda":
        return found.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise _Capturing
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return found.to(device)


@functools.cache
def _held(numbers: tuple[int, ...], device: torch.device, repeats: tuple[int, ...] = ()) -> torch.Tensor:
    """What a graph was captured with: it may be replayed as long as the process lives, so this is never let go."""
    return _sent(numbers, device, repeats)


def send(numbers: tuple[int, ...], device: torch.device, repeats: tuple[int, ...] = ()) -> torch.Tensor:
    """Numbers on a device, sent there once; within a capture, those that are new travel as arguments of launches.

    >>> send((5, 6, 7), torch.device("cpu"), repeats=(2, 0, 1)).tolist()
    [5, 5, 7]
    """
    if device.type != "cuda":
        return _sent(numbers, device, repeats)
    if not torch.cuda.is_current_stream_capturing():
        found = _sent(numbers, device, repeats)
        found.record_stream(torch.cuda.current_stream(device))
        return found
    try:
        return _held(numbers, device, repeats)
    except _Capturing:
        written = torch.zeros(len(numbers), dtype=torch.int64, device=device)
        foreach_add_(written.unbind(), numbers)
        if not repeats:
            return written
        return torch.repeat_interleave(written.int(), send(repeats, device), output_size=sum(repeats))


def groups_of(fours: Sequence[Inputs]) -> list[Group]:
    """What `batches_of` makes of these parameters, gradients and averages once `together` has copied what it must."""
    return [
        _group(kind, _counts([four[0].numel() for four in members], kind))
        for kind, members in _by_kind(fours, [_is_aligned(four) for four in fours]).items()
    ]


def batches_of(fives: Sequence[Inputs]) -> list[Batch]:
    """Parameters with their gradients, averages and steps, by data types and by whether 16 divides all addresses."""
    found = []
    aligned = [not (p.data_ptr() | g.data_ptr() | m.data_ptr() | v.data_ptr()) & 15 for p, g, m, v, _ in fives]
    for kind, members in _by_kind(fives, aligned).items():
        numels = [five[0].numel() for five in members]
        counts = _counts(numels, kind)
        firsts = [0, *itertools.accumulate(counts)]
        found.append(
            Batch(
                group=_group(kind, counts),
                where=tuple(
                    send(tuple(x.data_ptr() for x in each), kind.device) for each in zip(*members, strict=True)
                ),
                sizes=send(tuple(itertools.chain(*zip(numels, firsts))), kind.device),  # noqa: B905 (the last is the end)
                chunks=send(tuple(range(len(counts))), kind.device, counts),
                kinds=tuple(x.new_empty(0) for x in members[0][:3]),
            )
        )
    return found


def _by_kind(members: Sequence[Inputs], aligned: Sequence[bool]) -> dict[Kind, list[Inputs]]:
    found: dict[tuple[Any, ...], list[Inputs]] = {}
    for member, is_aligned in zip(members, aligned, strict=True):
        p, g, m, *_ = member
        found.setdefault((p.device, p.dtype, g.dtype, m.dtype, is_aligned), []).append(member)
    return {Kind(*kind): own for kind, own in found.items()}


def _counts(numels: Sequence[int], kind: Kind) -> tuple[int, ...]:
    """Chunks of each tensor."""
    block = tile_of(kind).block
    return tuple(cdiv(numel, block) for numel in numels)


def _group(kind: Kind, counts: Sequence[int]) -> Group:
    return Group(kind, len(counts), sum(counts), tile_of(kind))


def tile_of(kind: Kind) -> Tile:
    """A thread takes four elements, 16 bytes of what is fp32."""
    trial = TRIAL.get()
    if trial is not None and trial[0] == "adamw" and trial[1] is not None:
        return trial[1]
    widest = max(kind.param.itemsize, kind.grad.itemsize, kind.average.itemsize)
    return Tile(block=4 * 32 * (4 if widest == 4 else 8), warps=4)


def _is_aligned(four: Inputs) -> bool:
    """Of what `together` makes of it: a copy is."""
    if is_together(*four):
        return all(x.data_ptr() % 16 == 0 for x in four)
    return all(not x.is_contiguous() or x.is_neg() or x.data_ptr() % 16 == 0 for x in four)


def is_dense(x: torch.Tensor) -> bool:
    """No gaps and nothing twice, in whatever order."""
    return x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).is_contiguous()


def is_together(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> bool:
    """Element i of each belongs to element i of the others, and what lies there is its value."""
    if g.is_neg():  # lazily: as a part of a complex gradient may be
        return False
    if p.is_contiguous():
        return g.is_contiguous() and m.is_contiguous() and v.is_contiguous()
    return is_dense(p) and g.stride() == m.stride() == v.stride() == p.stride()


def check(fours: Sequence[Inputs]) -> None:
    """What a kernel would read or write wrongly."""
    for p, g, m, v in fours:
        if not p.shape == g.shape == m.shape == v.shape:
            raise BadInput(
                f"parameter, gradient and averages differ in shape: {[tuple(x.shape) for x in (p, g, m, v)]}"
            )
        if m.dtype != v.dtype or any(x.device != p.device for x in (g, m, v)):
            raise BadInput("a parameter, its gradient and its averages must share a device, the averages a dtype")


def together(fours: Sequence[Inputs]) -> list[Inputs]:
    """The same quadruples, copied where their elements do not lie in one order; `put_back` ends it."""
    return [four if is_together(*four) else tuple(x.contiguous().resolve_neg() for x in four) for four in fours]


def put_back(fours: Sequence[Inputs], own: Sequence[Inputs]) -> None:
    """What was updated in a copy, to where it belongs."""
    for four, mine in zip(fours, own, strict=True):
        for i in (0, 2, 3):
            if mine[i] is not four[i]:
                four[i].copy_(mine[i])

"""Buckets: calls of many sizes share a graph, their inputs padded with zeros to the next size, outputs cut back.

Only for work whose rows do not meet: where a result depends on the rows that were added, the bucket is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sublight.errors import BadInput
from sublight.fix.graph.key import Call, is_tensor_part, substitute

LARGEST = 2**20
CLOSE = {torch.float16: 0.02, torch.bfloat16: 0.05}  # of the root mean square: another kernel rounds otherwise
CLOSE_ELSE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The dimension that is padded, and the sizes it is padded to."""

    dim: int = 0
    sizes: tuple[int, ...] = ()  # empty: the powers of two

    def size_for(self, n: int) -> int | None:
        """The size that n is padded to; None where it is larger than all.

        >>> [Buckets().size_for(n) for n in (1, 3, 8, 9)], Buckets(sizes=(4, 10)).size_for(11)
        ([1, 4, 8, 16], None)
        """
        if not self.sizes:
            return 1 << max(n - 1, 0).bit_length() if n <= LARGEST else None
        return next((size for size in self.sizes if size >= n), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How one call is padded: from n to size, along dim, those of its tensors that have n there."""

    dim: int
    n: int
    size: int
    padded: tuple[bool, ...]

    def padded_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        shape = list(x.shape)
        shape[self.dim] = self.size
        return tuple(shape)


def parse(words: Any) -> Buckets | None:
    """`True` or {}: powers of two of dimension 0; a sequence: its sizes; a mapping: dim and sizes."""
    if words is None or words is False:
        return None
    if words is True:
        return Buckets()
    if isinstance(words, Mapping):
        unknown = set(words) - {"dim", "sizes"}
        dim, sizes = words.get("dim", 0), words.get("sizes", ())
    else:
        unknown, dim, sizes = set(), 0, words
    whole = isinstance(sizes, Sequence) and not isinstance(sizes, str) and all(type(s) is int and s > 0 for s in sizes)
    if unknown or not isinstance(dim, int) or not whole:
        raise BadInput(
            f'buckets={words!r} is not understood: write True, [1, 8, 64] or {{"dim": 1, "sizes": [128, 256]}}'
        )
    return Buckets(dim=dim, sizes=tuple(sorted(set(sizes))))


def fit(buckets: Buckets, call: Call) -> Fit | None:
    """The size of the first tensor that has the dimension decides; every tensor of that size there is padded."""
    dim = buckets.dim
    sizes = [x.shape[dim] if -x.dim() <= dim < x.dim() else None for x in call.tensors]
    n = next((size for size in sizes if size is not None), None)
    if not n:
        return None
    size = buckets.size_for(n)
    return None if size is None else Fit(dim=dim, n=n, size=size, padded=tuple(each == n for each in sizes))


def key_of(call: Call, at: Fit) -> Hashable:
    """What calls of one bucket share: everything but the size, and how the padded tensors lie in memory."""
    sized = [at.padded_shape(x) if is_padded else None for x, is_padded in zip(call.tensors, at.padded, strict=True)]
    return "bucket", at.dim, at.size, tuple(sized), _without(call.key, iter(call.tensors), iter(sized))


def _without(part: Any, tensors: Iterator[torch.Tensor], shapes: Iterator[Any]) -> Hashable:
    """A key in which padded tensors are described by their data type alone."""
    if is_tensor_part(part):
        x, shape = next(tensors), next(shapes)
        return part if shape is None else (x.dtype, x.device, x.requires_grad)
    return tuple([_without(each, tensors, shapes) for each in part]) if type(part) is tuple else part


def padded(x: torch.Tensor, at: Fit) -> torch.Tensor:
    """A copy with zeros behind it."""
    out = torch.zeros(at.padded_shape(x), dtype=x.dtype, device=x.device)
    out.narrow(at.dim, 0, x.shape[at.dim]).copy_(x)
    return out


def shortened(x: torch.Tensor, at: Fit) -> torch.Tensor:
    """All rows but the last."""
    return x.narrow(at.dim, 0, at.n - 1)


def follows(out: Sequence[torch.Tensor], small: Sequence[torch.Tensor], at: Fit, n: int) -> list[int | None] | str:
    """Which dimension of each output is as long as the inputs' (size, where they had n), or why that cannot be said."""
    if len(out) != len(small):
        return f"it gives {len(out)} tensors where padded, {len(small)} where not"
    dims: list[int | None] = []
    for number, (x, y) in enumerate(zip(out, small, strict=True)):
        if x.dim() != y.dim() or x.dtype != y.dtype:
            return f"output {number} has another shape where it is padded"
        differ = [d for d in range(x.dim()) if x.shape[d] != y.shape[d]]
        if len(differ) > 1 or any((x.shape[d], y.shape[d]) != (at.size, n) for d in differ):
            return f"output {number} is {tuple(y.shape)} for size {n}, {tuple(x.shape)} for size {at.size}"
        dims.append(differ[0] if differ else None)
        if why := _depends(x.narrow(differ[0], 0, n) if differ else x, y):
            return f"output {number} depends on the rows that padding adds ({why})"
    return dims


def by_position(out: Sequence[torch.Tensor], at: Fit) -> list[int | None]:
    """Where nothing can be tried twice: an output with the padded size at the padded dimension follows."""
    dim = at.dim
    return [dim if -x.dim() <= dim < x.dim() and x.shape[dim] == at.size else None for x in out]


def _depends(x: torch.Tensor, y: torch.Tensor) -> str:
    if x.numel() == 0 or torch.equal(x, y):
        return ""
    if not x.is_floating_point():
        return "its values differ"
    one, other = x.double(), y.double()
    scale = float(other.square().mean().sqrt())
    apart = float((one - other).square().mean().sqrt())
    close = CLOSE.get(x.dtype, CLOSE_ELSE)
    return "" if apart <= close * scale else f"{apart / max(scale, 1e-30):.1%} of its size"


def put_in(call: Call, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """The arguments with other tensors in place of those on the device."""
    mine, new = {id(x) for x in call.tensors}, iter(tensors)
    return substitute((args, kwargs), lambda x: next(new) if id(x) in mine else x)


def as_run(call: Call, at: Fit | None, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], Any, Any]:
    """A call as it is run eagerly: padded where a graph of it will be."""
    if at is None or at.n == at.size:
        return call.tensors, args, kwargs
    tensors = [padded(x, at) if p else x for x, p in zip(call.tensors, at.padded, strict=True)]
    return tensors, *put_in(call, tensors, args, kwargs)


def cut(out: Any, dims: list[int | None], at: Fit) -> Any:
    """Without the rows that padding added."""
    each = iter(dims)

    def put(x: torch.Tensor) -> torch.Tensor:
        dim = next(each, None)
        return x if dim is None else x.narrow(dim, 0, at.n)

    return substitute(out, put)

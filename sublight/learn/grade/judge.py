"""What is wrong with a result, in words: which element, what was expected, what is there, and where the others lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sublight.correct import FACTOR, Error
from sublight.learn.verdict import Fault

if TYPE_CHECKING:
    import torch

CLOSE = 2**-4  # of what is expected: so far off is a 16-bit result that was rounded too often
_BITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


def unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Where the poison (every bit set) still is."""
    import torch

    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8) == 255
    return tensor.contiguous().view(getattr(torch, _BITS[tensor.element_size()])) == -1


def fault_of(
    name: str, ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor, error: Error, case: str
) -> Fault:
    """Why this output is not right, given that it is not."""
    import torch

    missing = unwritten(ours) & ~unwritten(theirs)
    if bool(missing.any()):
        first = _spot(missing)
        return Fault(
            kind="unwritten",
            case=case,
            text=f"{_at(name, first)} was never written, expected {_number(theirs, first)}"
            + ("; nor was any other" if bool(missing.all()) and missing.numel() > 1 else _where(missing, name)),
        )
    wrong = ours != theirs
    if ours.is_floating_point():
        off = (ours.double() - truth.double()).abs()
        wrong = (off > FACTOR * error.torch_largest) | (torch.isfinite(ours) != torch.isfinite(theirs))
    if not bool(wrong.any()):
        return Fault(
            kind="values",
            case=case,
            text=f"{name} is close, but its error is {error.ratio:.3g} times PyTorch's (up to {FACTOR:g} is right): "
            "compute in float32 (`.to(tl.float32)`) and round once, when you store"
            + ("; subtract numbers that are close before others are added" if ours.element_size() > 2 else ""),
        )
    first = _spot(wrong)
    digits = 6 if _number(ours, first) != _number(theirs, first) else 9
    values = f"{_number(ours, first, digits)}, expected {_number(theirs, first, digits)}"
    where = _where(wrong, name) + _reason(ours, theirs, truth, wrong)
    return Fault(kind="values", case=case, text=f"{_at(name, first)} is {values}{where}")


def _reason(ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor, wrong: torch.Tensor) -> str:
    """What the wrong numbers themselves tell of their cause, if anything."""
    import torch

    if not ours.is_floating_point():
        return ""
    if bool((torch.isnan(ours) & torch.isfinite(theirs))[wrong].any()):
        return ". nan comes of inf - inf, inf / inf or 0 / 0: what was too large before, as exp(100) is?"
    if not bool(torch.isfinite(ours).all() & torch.isfinite(theirs).all()):
        return ""
    if ours.element_size() == 2:
        off, size = (ours.double() - truth.double()).abs()[wrong], truth.double().abs()
        if float((off / size[wrong]).median()) <= CLOSE and float(off.max()) <= CLOSE * float(size.max()):
            return ". That is close: compute in float32 (`.to(tl.float32)`) and round once, when you store"
        return ""
    for kind in (torch.bfloat16, torch.float16):
        if ours.element_size() == 4 and _has_bits_of(kind, ours, theirs):
            name = str(kind).removeprefix("torch.")
            return f". Every number has only the bits of {name}: keep float32 to the end; a store converts by itself"
    return ""


def _has_bits_of(kind: torch.dtype, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether our numbers fit into that narrower type, and are what theirs are there, but for a last bit or two."""
    narrow = ours.to(kind)
    fits, is_same = bool((narrow.to(ours.dtype) == ours).all()), (ours - theirs).abs() <= 2**-7 * theirs.abs()
    return fits and bool(is_same.all()) and not bool((theirs.to(kind).to(theirs.dtype) == theirs).all())


def _spot(mask: torch.Tensor) -> tuple[int, ...]:
    """The first that is set."""
    return tuple(int(place) for place in mask.nonzero()[0])


def _at(name: str, place: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, place))}]" if place else name


def _number(tensor: torch.Tensor, place: tuple[int, ...], digits: int = 6) -> str:
    value: Any = tensor[place].item()
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _where(mask: torch.Tensor, name: str) -> str:
    """Which elements these are, as a person would say it.

    >>> import torch
    >>> mask = torch.zeros(4, 10, dtype=torch.bool)
    >>> mask[:, 8:] = True
    >>> _where(mask, "out")
    '; wrong are 8 of 40 elements: columns 8 to 9'
    >>> _where(torch.arange(10) > 5, "out")
    '; wrong are 4 of 10 elements: out[6] to the last'
    >>> _where(torch.arange(10) == 5, "out")
    '; it is the only wrong one of 10 elements'
    >>> _where(torch.tensor([True]), "out"), _where(torch.tensor(True), "place")
    ('; it is the only element', '')
    """
    count, total = int(mask.sum()), mask.numel()
    if count == total:
        alone = "; it is the only element" if mask.dim() else ""
        return "; all others are wrong, too" if total > 1 else alone
    if count == 1:
        return f"; it is the only wrong one of {total} elements"
    words = f"; wrong are {count} of {total} elements"
    if mask.dim() == 1:
        pattern = _run(mask)
        return f"{words}: {name}[{pattern[0]}] to {_last(pattern[1], total, name)}" if pattern else words
    if mask.dim() == 2:
        rows, columns = mask.any(1), mask.any(0)
        for lines, noun in ((columns, "column"), (rows, "row")):
            across = bool(mask[:, lines].all()) if noun == "column" else bool(mask[lines].all())
            if across and (pattern := _run(lines)):
                first, last = pattern
                return f"{words}: {noun} {first}" if first == last else f"{words}: {noun}s {first} to {last}"
    return words


def _last(index: int, total: int, name: str) -> str:
    return "the last" if index == total - 1 else f"{name}[{index}]"


def _run(line: torch.Tensor) -> tuple[int, int] | None:
    """First and last of those that are set, where all between are, too."""
    places = line.nonzero().flatten().tolist()
    return (places[0], places[-1]) if places and places[-1] - places[0] + 1 == len(places) else None

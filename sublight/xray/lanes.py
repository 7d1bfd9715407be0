"""How Triton spreads a block of elements over threads: which lane of which warp holds each, in which register.

A layout of Triton's is linear over bits: element = XOR of one basis for each set bit of register, lane and warp. Here
the bases are worked out from the layouts that TTGIR names (blocked, MMA, dot operand, slice, linear); a shared layout
gives each element its place in shared memory instead. What is not known here is named, never guessed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

Basis = tuple[int, ...]  # a coordinate for each dimension of the tensor

_DEFINED = re.compile(r"^#(\w+) = (#ttg\.\w+<.*>)\s*$", re.MULTILINE)
_TENSOR = re.compile(r"tensor<((?:\d+x)+)([^,<>]+(?:<[^<>]*>)?), (#(?:\w+|ttg\.\w+<\{[^{}]*\}>))>")
_MEMORY = re.compile(r"memdesc<((?:\d+x)+)(\w+), (#\w+), #(?:ttg\.)?s(?:hared_)?mem")
_FIELD = re.compile(r"(\w+) = (\[\[?.*?\]\]?(?=[,}])|[^,{}\[\]]+)")
ITEM_BITS = re.compile(r"\d+$")


class NotDrawn(Exception):
    """A layout that this file does not know; the message says which."""


@dataclass(frozen=True, kw_only=True)  # no slots: holders are worked out once
class Spread:
    """Bases of a tensor that lies in registers."""

    shape: tuple[int, ...]
    register: tuple[Basis, ...]
    lane: tuple[Basis, ...]
    warp: tuple[Basis, ...]

    def element(self, register: int, lane: int, warp: int) -> tuple[int, ...]:
        at = [0] * len(self.shape)
        for bases, index in ((self.register, register), (self.lane, lane), (self.warp, warp)):
            for bit, basis in enumerate(bases):
                if index >> bit & 1:
                    at = [here ^ more for here, more in zip(at, basis, strict=True)]
        return tuple(at)

    @functools.cached_property
    def holders(self) -> dict[tuple[int, ...], list[tuple[int, int, int]]]:
        """Element -> every (warp, lane, register) that has it, the first ones first."""
        found: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        for warp in range(1 << len(self.warp)):
            for lane in range(1 << len(self.lane)):
                for register in range(1 << len(self.register)):
                    found.setdefault(self.element(register, lane, warp), []).append((warp, lane, register))
        return found

    @property
    def elements(self) -> int:
        """How many different ones a thread has."""
        return 1 << sum(any(basis) for basis in self.register)

    @property
    def copies(self) -> int:
        """How many threads have each element."""
        return len({(warp, lane) for warp, lane, _ in next(iter(self.holders.values()))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The places of a tensor that lies in shared memory."""

    shape: tuple[int, ...]
    item_bits: int
    offsets: dict[tuple[int, ...], int]  # element -> its place, in elements

    def bank(self, element: tuple[int, ...]) -> int:
        return self.offsets[element] * self.item_bits // 32 % 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One layout of one kernel, for one shape that has it."""

    name: str  # blocked1
    text: str  # as TTGIR defines it
    shape: tuple[int, ...]
    dtype: str
    where: Spread | Shared | None
    why_not: str = ""


def layouts(ttgir: str) -> tuple[Layout, ...]:
    """Every layout with every shape that has it, in the order in which the code uses them."""
    defined = dict(_DEFINED.findall(ttgir))
    used: dict[tuple[str, tuple[int, ...]], str] = {}
    for pattern in (_TENSOR, _MEMORY):
        for sizes, dtype, name in pattern.findall(ttgir):
            shape = tuple(int(size) for size in sizes.split("x") if size)
            used.setdefault((name, shape), dtype)
    result = []
    for (name, shape), dtype in used.items():
        text = defined.get(name[1:], name)
        try:
            where: Spread | Shared | None = place(text, shape, dtype, defined)
            reason = ""
        except NotDrawn as error:
            where, reason = None, str(error)
        label = name[1:] if name[1:] in defined else name.replace("#ttg.", "").replace("#", "")
        result.append(Layout(name=label, text=text, shape=shape, dtype=dtype, where=where, why_not=reason))
    return tuple(result)


def place(text: str, shape: Sequence[int], dtype: str, defined: dict[str, str]) -> Spread | Shared:
    """Of a layout as TTGIR writes it: `#ttg.blocked<{sizePerThread = [1, 4], …}>`, or the name of one."""
    shape = tuple(shape)
    text = defined.get(text[1:], text)
    kind = re.match(r"#ttg\.(\w+)<", text)
    if not kind:
        raise NotDrawn(f"{text} is no layout that is known here")
    if any(size & (size - 1) for size in shape):
        raise NotDrawn(f"{'x'.join(map(str, shape))} is no power of two")
    fields = {name: value.strip() for name, value in _FIELD.findall(text)}
    bits = int(match[0]) if (match := ITEM_BITS.search(dtype)) else 64  # of a pointer: 64
    if kind[1] == "blocked":
        return _blocked(fields, shape)
    if kind[1] == "nvidia_mma":
        return _mma(fields, shape)
    if kind[1] == "dot_op":
        return _operand(fields, shape, defined)
    if kind[1] == "slice":
        return _slice(fields, shape, dtype, defined)
    if kind[1] == "linear":
        return _linear(text, shape)
    if kind[1] == "swizzled_shared":
        vec, per_phase, max_phase = (int(fields[name]) for name in ("vec", "perPhase", "maxPhase"))
        order = _numbers(fields["order"])
        return _swizzled(shape[-len(order) :], bits, order, vec, per_phase, max_phase)  # one of a ring of buffers
    if kind[1] == "nvmma_shared":
        return _for_tensor_cores(fields, shape[-2:], bits)
    raise NotDrawn(f"{kind[1]} layouts are not drawn yet")


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", words))


def _log2(size: int) -> int:
    return size.bit_length() - 1


class _Builder:
    """Bases one after the other, each dimension's doubling where it stopped."""

    def __init__(self, rank: int) -> None:
        self.sizes = [1] * rank
        self.bases: dict[str, list[Basis]] = {"register": [], "lane": [], "warp": []}

    def add(self, kind: str, dim: int, size: int, *, repeats: bool = False) -> None:
        """`size` steps along a dimension; with `repeats` all of them hold the same."""
        for _ in range(_log2(size)):
            basis = [0] * len(self.sizes)
            if not repeats:
                basis[dim] = self.sizes[dim]
                self.sizes[dim] *= 2
            self.bases[kind].append(tuple(basis))

    def add_all(self, kind: str, sizes: Sequence[int], order: Sequence[int]) -> None:
        for dim in order:
            self.add(kind, dim, sizes[dim])

    def spread(self, shape: tuple[int, ...], order: Sequence[int]) -> Spread:
        """For a tensor that is smaller, several threads have the same; for a larger one, more registers."""
        for kind, bases in self.bases.items():
            self.bases[kind] = [
                basis if all(at < size for at, size in zip(basis, shape, strict=True)) else (0,) * len(shape)
                for basis in bases
            ]
        for dim in order:
            while self.sizes[dim] < shape[dim]:
                self.add("register", dim, 2)
        return Spread(shape=shape, **{kind: tuple(bases) for kind, bases in self.bases.items()})


def _blocked(fields: dict[str, str], shape: tuple[int, ...]) -> Spread:
    order = _numbers(fields["order"])
    built = _Builder(len(shape))
    for kind, name in (("register", "sizePerThread"), ("lane", "threadsPerWarp"), ("warp", "warpsPerCTA")):
        built.add_all(kind, _numbers(fields[name]), order)
    return built.spread(shape, order)


def _tile(built: _Builder, inner: int, outer: int, wide: int, tall: int, together: int) -> None:
    """What one mma gives a warp: `together` neighbours a lane, 4 lanes across, 8 down, then registers for the rest."""
    built.add("register", inner, together)
    built.add("lane", inner, 4)
    built.add("lane", outer, 8)
    built.add("register", outer, tall // 8)
    built.add("register", inner, wide // (4 * together))


def _mma(fields: dict[str, str], shape: tuple[int, ...]) -> Spread:
    version, instruction = int(fields["versionMajor"]), _numbers(fields["instrShape"])
    if version not in (2, 3) or len(shape) != 2:
        raise NotDrawn(f"MMA version {version} of {len(shape)} dimensions is not drawn yet")
    tall, wide = instruction[:2]
    built = _Builder(2)
    _tile(built, 1, 0, wide, tall, 2)
    warps = _numbers(fields["warpsPerCTA"])
    built.add_all("warp", warps, (1, 0) if version == 2 else (0, 1))
    return built.spread(shape, (1, 0))


def _operand(fields: dict[str, str], shape: tuple[int, ...], defined: dict[str, str]) -> Spread:
    parent = defined.get(fields["parent"][1:], fields["parent"])
    if "nvidia_mma" not in parent or len(shape) != 2 or "kWidth" not in fields:
        raise NotDrawn("operands of a product without tensor cores are not drawn yet")
    mma = {name: value.strip() for name, value in _FIELD.findall(parent)}
    index, together = int(fields["opIdx"]), int(fields["kWidth"])
    deep, other = (1, 0) if index == 0 else (0, 1)
    version = int(mma["versionMajor"])
    if version not in (2, 3):
        raise NotDrawn(f"operands of MMA version {version} are not drawn yet")
    instruction = _numbers(mma["instrShape"])
    built = _Builder(2)
    _tile(built, deep, other, 8 * together, instruction[0] if index == 0 else instruction[1], together)
    warps = _numbers(mma["warpsPerCTA"])
    for dim in (1, 0) if version == 2 else (0, 1):
        built.add("warp", dim, warps[dim], repeats=dim == deep)
    return built.spread(shape, (deep, other))


def _slice(fields: dict[str, str], shape: tuple[int, ...], dtype: str, defined: dict[str, str]) -> Spread:
    """A parent with a dimension of one left out: lanes along it have copies, registers along it one."""
    dim = int(fields["dim"])
    whole = place(fields["parent"], (*shape[:dim], 1, *shape[dim:]), dtype, defined)
    if not isinstance(whole, Spread):
        raise NotDrawn("a slice of shared memory is not drawn yet")

    def without(bases: Sequence[Basis]) -> tuple[Basis, ...]:
        return tuple(basis[:dim] + basis[dim + 1 :] for basis in bases)

    register = tuple(basis for basis in without(whole.register) if any(basis))
    return Spread(shape=shape, register=register, lane=without(whole.lane), warp=without(whole.warp))


def _linear(text: str, shape: tuple[int, ...]) -> Spread:
    """The bases as they are written; a larger tensor goes on along the dimension that registers begin with."""
    built = _Builder(len(shape))
    for kind, bases in built.bases.items():
        listed = re.search(rf"{kind} = \[((?:\[[\d, ]+\][, ]*)*)\]", text)
        bases += [_numbers(each) for each in re.findall(r"\[([\d, ]+)\]", listed[1] if listed else "")]
    every = [basis for bases in built.bases.values() for basis in bases]
    built.sizes = [2 * max((basis[dim] for basis in every), default=0) or 1 for dim in range(len(shape))]
    begun = [dim for basis in built.bases["register"] for dim, step in enumerate(basis) if step]
    found = built.spread(shape, tuple(dict.fromkeys((*begun, *reversed(range(len(shape)))))))
    return dataclasses.replace(found, register=tuple(basis for basis in found.register if any(basis)))


def _swizzled(
    shape: tuple[int, ...], bits: int, order: Sequence[int], vec: int, per_phase: int, max_phase: int
) -> Shared:
    """Chunks of `vec` neighbours are swapped within their line, by the line's number."""
    if len(shape) == 1:
        return Shared(shape=shape, item_bits=bits, offsets={(at,): at for at in range(shape[0])})
    if len(shape) != 2:
        raise NotDrawn("shared memory of more than two dimensions is not drawn yet")
    inner, outer = order[0], order[1]
    offsets: dict[tuple[int, ...], int] = {}
    for line in range(shape[outer]):
        for at in range(shape[inner]):
            swapped = at // vec ^ line // per_phase % max_phase
            element = (line, at) if inner == 1 else (at, line)
            offsets[element] = line * shape[inner] + (swapped * vec + at % vec) % shape[inner]
    return Shared(shape=shape, item_bits=bits, offsets=offsets)


def _for_tensor_cores(fields: dict[str, str], shape: tuple[int, ...], bits: int) -> Shared:
    """As TMA and wgmma want it: tiles of `swizzlingByteWidth` a line, chunks of 16 bytes swapped."""
    wide = int(fields["swizzlingByteWidth"])
    if len(shape) != 2 or not wide or fields.get("fp4Padded") == "true":
        raise NotDrawn("shared memory for tensor cores without swizzling, or of other than two dimensions")
    inner = 0 if fields["transposed"] == "true" else 1
    lines, columns, tile = shape[1 - inner], shape[inner], min(8 * wide // bits, shape[inner])
    if columns < 8 * wide // bits:
        raise NotDrawn("shared memory for tensor cores that is narrower than its swizzle")
    vec, per_phase, max_phase = 128 // bits, 128 // wide, wide // 16
    offsets: dict[tuple[int, ...], int] = {}
    for line in range(lines):
        for at in range(columns):
            swapped = (at % tile) // vec ^ line // per_phase % max_phase
            element = (line, at) if inner == 1 else (at, line)
            offsets[element] = at // tile * lines * tile + line * tile + swapped * vec + at % vec
    return Shared(shape=shape, item_bits=bits, offsets=offsets)

"""From a compiled kernel and its recorded launch to what a followed block begins with: parameters, memory, its place.

A tensor's pointer is a made-up address with the tensor's own offset into its storage; a number is its value. An
argument that is not given is a pointer without data behind it, or an unknown number whose reason names it.
"""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sublight.xray.ptx.entry import Entry, Parameter
from sublight.xray.ptx.machine import Start
from sublight.xray.ptx.memory import GlobalMemory, Memory, storage_of
from sublight.xray.ptx.numbers import BITS, rounded_to_bf16
from sublight.xray.record import Code

_PACK = {"f32": "<f", "f64": "<d"}


def start_of(code: Code, entry: Entry, *, blocks: int) -> Start | str:
    """Where the blocks begin; a sentence where that cannot be said."""
    threads = entry.threads or _as_three(code.options.get("block")) or _as_three(code.resources.threads)
    threads = threads or entry.most_threads
    if threads is None:
        return "the launch is not known, nor how many threads a block has: give --threads 256"
    if threads[1:] == (1, 1) and entry.threads is None and not code.options.get("block") and _has_more_sides(entry):
        return "the kernel reads threadIdx.y, and the block's sides are not known: give --threads 32x8, or 256x1"
    reasons = [""]
    memory = GlobalMemory()
    symbols: dict[str, int] = {}
    for variable in entry.variables:
        if variable.space in ("global", "const"):
            data = np.zeros(max(variable.bytes, 8), np.uint8)
            if variable.content:
                bits = np.array([x & (2**64 - 1) for x in variable.content], np.uint64)
                raw = bits.astype(BITS[variable.item_bytes]).view(np.uint8)
                data[: len(raw)] = raw
            symbols[variable.name] = memory.add(variable.name, data, 0).base
    grid = _as_three(code.grid) or (1, 1, 1)
    return Start(
        threads=threads,
        grid=grid,
        blocks=chosen_blocks(grid, blocks),
        memory=memory,
        parameters=_parameters(code, entry, memory, reasons),
        reasons=reasons,
        symbols=symbols,
    )


_STEP = (5**0.5 - 1) / 2  # of the golden ratio: its multiples fall evenly between 0 and 1, and repeat no grid's width


def chosen_blocks(grid: tuple[int, int, int], count: int) -> tuple[tuple[int, int, int], ...]:
    """One out of each of so many equal parts of the grid, at another place in each.

    So each kind of block is followed about as often as the launch has it: the last block of a row, which may be
    half empty, is one of many, and weighs no more than that.

    >>> chosen_blocks((5, 2, 1), 3)
    ((2, 0, 0), (4, 0, 0), (4, 1, 0))
    """
    x, y, z = grid
    total = x * y * z
    count = min(count, total)
    numbers = [int((part + (part + 1) * _STEP % 1) * total / count) for part in range(count)]
    numbers = numbers if count < total else list(range(total))
    return tuple((number % x, number // x % y, number // (x * y)) for number in numbers)


def _as_three(given: Any) -> tuple[int, int, int] | None:
    if given is None or given == ():
        return None
    sizes = (given,) if isinstance(given, int) else tuple(given)
    x, y, z = (*(int(size) for size in sizes), 1, 1)[:3]
    return x, y, z


def _parameters(code: Code, entry: Entry, memory: GlobalMemory, reasons: list[str]) -> Memory:
    """All parameters' bytes in order, each aligned to its size, as ld.param finds them."""
    leaves = dict(_flat(code, entry.parameters))
    names = list(leaves)
    raw, whys = bytearray(), bytearray()
    stored: dict[Any, int] = {}
    for position, parameter in enumerate(entry.parameters):
        align = min(parameter.bytes, 8) if parameter.count == 1 else 16
        while len(raw) % align:
            raw.append(0)
            whys.append(0)
        name = names[position] if position < len(names) else str(position)
        is_extra = bool(names) and position >= len(names)  # Triton's scratch memory
        missing = object()
        value = leaves[name][1] if name in leaves else None
        value = code.arguments.get(str(position), missing) if value is None else value
        bits = None
        if value is missing or value is None:
            if parameter.count == 1 and _is_pointer(parameter, leaves[name][0] if name in leaves else ""):
                reason = "memory that the launch has beside its arguments" if is_extra else f"the values of {name}"
                reasons.append(reason)
                bits = memory.add(name, None, len(reasons) - 1).base
        elif storage := storage_of(value):
            if storage.key not in stored:
                reasons.append(f"the values of {name}")
                stored[storage.key] = memory.add(name, storage.data, len(reasons) - 1).base
            bits = stored[storage.key] + storage.offset_bytes
        content = bits if bits is not None else value if value is not missing else None
        packed = _packed(parameter, content, leaves[name][0] if name in leaves else "")
        number = 0
        if packed is None:
            packed = bytes(parameter.bytes)
            is_one = parameter.count == 1
            reasons.append(f"argument {name}, " + (f"which is not given (--arg {name}=4096)" if is_one else "a struct"))
            number = len(reasons) - 1
        raw += packed
        whys += bytes([number]) * parameter.bytes
    padding = -len(raw) % 16
    data = np.frombuffer(bytes(raw) + bytes(padding), np.uint8)
    why = np.frombuffer(bytes(whys) + bytes(padding), np.uint8)
    return Memory(data, why if why.any() else None)


def _flat(code: Code, parameters: Sequence[Parameter]) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Type and value of each argument that the kernel takes, the items of tuples one by one; constants are no more."""
    count = 0

    def leaves(path: str, kind: Any, value: Any) -> Iterator[tuple[str, tuple[str, Any]]]:
        if isinstance(kind, tuple):
            values = value if isinstance(value, tuple | list) else (None,) * len(kind)
            for index, (of_one, one) in enumerate(zip(kind, values, strict=True)):
                yield from leaves(f"{path}.{index}", of_one, one)
        elif str(kind).startswith("tensordesc"):
            yield from _descriptor(path, str(kind), value, parameters[count:])
        elif kind != "constexpr":
            yield path, (str(kind), value)

    for name, kind in code.signature.items():
        for leaf in leaves(name, ast.literal_eval(kind) if kind.startswith("(") else kind, code.arguments.get(name)):
            count += 1
            yield leaf


def _descriptor(
    name: str, kind: str, value: Any, parameters: Sequence[Parameter]
) -> Iterator[tuple[str, tuple[str, Any]]]:
    """A tensor descriptor, as Triton passes it: TMA's own 128 bytes, or the pointer and all that they would hold."""
    match = re.match(r"tensordesc\w*<(\w+)\[([^\]]*)\]", kind)
    element, block = (match[1], match[2]) if match else ("", "")
    ranked = re.search(r"input_rank=(\d+)", kind)
    rank = int(ranked[1]) if ranked else block.count(",") + 1
    shape, strides = (list(getattr(value, word, None) or [None] * rank) for word in ("shape", "strides"))
    if parameters and parameters[0].count > 1:
        yield f"{name}.map", ("tensordesc", None)
    else:
        yield name, (f"*{element}", getattr(value, "base", None))
        for word, sizes in (("shape", shape), ("stride", strides)):
            yield from ((f"{name}.{word}{i}", ("i64", size)) for i, size in enumerate(sizes))
        for flag in ("padding", "round_f32_to_tf32")[
            : [one.type for one in parameters[1 + 2 * rank :][:2]].count("u8")
        ]:
            yield f"{name}.{flag}", ("i1", getattr(value, flag, None) in ("nan", True))
    yield from ((f"{name}.size{i}", ("i32", size)) for i, size in enumerate(shape))
    yield from ((f"{name}.step{i}", ("i64", size)) for i, size in enumerate(strides))


def _has_more_sides(entry: Entry) -> bool:
    """Whether lanes are told apart by threadIdx.y: a rank within the block, made of all three, needs no sides."""
    words = {operand for instruction in entry.instructions for operand in instruction.operands}
    is_rank = {"%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y"} <= words
    return not is_rank and not words.isdisjoint({"%tid.y", "%tid.z"})


def _is_pointer(parameter: Parameter, kind: str) -> bool:
    if kind:
        return kind.startswith("*") or kind.endswith("*")
    return parameter.is_pointer or parameter.type in ("u64", "b64")


def _packed(parameter: Parameter, value: Any, kind: str) -> bytes | None:
    """A number's bytes as the parameter has them; `kind` is the argument's type, where it is known."""
    if isinstance(value, bytes | bytearray) and len(value) == parameter.bytes:
        return bytes(value)
    if not isinstance(value, int | float | np.number | np.bool_) or parameter.count != 1:
        return None
    if kind == "bf16":
        return rounded_to_bf16(np.array([value], np.float32)).tobytes()
    if parameter.type in _PACK:
        return struct.pack(_PACK[parameter.type], float(value))
    if isinstance(value, float | np.floating) or kind.startswith("fp"):  # Triton declares the bits: .b32 or .u32
        return struct.pack({4: "<f", 8: "<d"}.get(parameter.bytes, "<e"), float(value))
    return (int(value) & ((1 << (8 * parameter.bytes)) - 1)).to_bytes(parameter.bytes, "little")

"""The text of an NVTX range: what PyTorch's `emit_nvtx` writes is an operator again, with its shapes."""

from __future__ import annotations

import functools
import re
from typing import Annotated, Any

import msgspec

from sublight.trace.record import NONE, Kind

_SUFFIX = (  # in the order in which PyTorch appends them, each optional
    r"(?:, seq = (\d{1,18}))?(?:, op_id = (\d+))?(?:, sizes = (\[[][\d, ]*\]))?(?:, input_op_ids = \[.*)?"
)
_TEXT = re.compile(r"([^,]+)" + _SUFFIX, re.DOTALL)
_TEXT_WITH_COMMAS = re.compile(r"(.+?)" + _SUFFIX, re.DOTALL)  # slower: asked second
_SCHEMA = re.compile(r"[A-Za-z_]\w*(?:::[\w.]+)+")  # namespace::name, and nothing beside it
_NODE = re.compile(r"[A-Za-z_]\w*Backward\d*")
_OF_PYTORCH = ("aten::", "prim::", "prims::", "c10d::", "_c10d_functional::", "quantized::", "torch::autograd::")
_EVALUATE = "autograd::engine::evaluate_function: "
_BARE = frozenset({"detach", "detach_", "record_param_comms"})  # operators that have no namespace

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_SHAPES = msgspec.json.Decoder(list[list[_Size]])
_NESTED = msgspec.json.Decoder(list[list[_Size | list[_Size]]])


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """What a range's text says."""

    kind: Kind  # OP or RANGE
    name: str
    sequence: int = NONE
    sizes: str = ""  # as written; `dims` reads them


def read(text: str) -> Range:
    """
    >>> read("aten::mm, seq = 5, op_id = 12, sizes = [[2, 3], [3, 4]]")
    Range(kind=<Kind.OP: 0>, name='aten::mm', sequence=5, sizes='[[2, 3], [3, 4]]')
    >>> [read(text).name for text in ("forward", "FSDP::pre_forward (blocks.0), op_id = 7")]
    ['forward', 'FSDP::pre_forward (blocks.0)']
    """
    match = _TEXT.fullmatch(text) or _TEXT_WITH_COMMAS.fullmatch(text)
    if match is None:
        return Range(kind=Kind.RANGE, name=text)
    name, sequence, op_id, sizes = match.groups()
    return Range(
        kind=Kind.OP if sequence is not None or _is_op(name, op_id is not None) else Kind.RANGE,
        name=name,
        sequence=NONE if sequence is None else int(sequence),
        sizes=sizes or "",
    )


@functools.lru_cache(maxsize=4096)
def _is_op(name: str, has_id: bool) -> bool:
    """Whether PyTorch named it: emit_nvtx writes a user's record_function as it writes operators, id and all."""
    if has_id:
        return bool(_SCHEMA.fullmatch(name) or _NODE.fullmatch(name)) or name in _BARE or name.startswith(_EVALUATE)
    # before 1.11 there were no ids
    return name.startswith(_EVALUATE) or (name.startswith(_OF_PYTORCH) and _SCHEMA.fullmatch(name) is not None)


def dims(sizes: str) -> tuple[Any, ...]:
    """Shapes by argument; () where the text is not a list of shapes. A list of tensors gives a tuple of shapes.

    >>> dims("[[2, 3], []]"), dims("[[[2, 3], [4]], [5]]"), dims("[[2, 3]"), dims("")
    (((2, 3), ()), (((2, 3), (4,)), (5,)), (), ())
    """
    if not sizes:
        return ()
    try:
        return tuple(tuple(shape) for shape in _SHAPES.decode(sizes))
    except msgspec.DecodeError:
        pass
    try:
        return tuple(tuple(_frozen(item) for item in argument) for argument in _NESTED.decode(sizes))
    except msgspec.DecodeError:
        return ()


def _frozen(item: int | list[int]) -> int | tuple[int, ...]:
    return tuple(item) if isinstance(item, list) else item

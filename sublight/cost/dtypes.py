"""Data types by PyTorch's names: their sizes, and how people spell them."""

from __future__ import annotations

from sublight.errors import BadInput, nearest

SPELLINGS = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
DTYPES = ("float32", "float16", "bfloat16")
ITEMSIZE = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1},
    **{"int64": 8, "int32": 4, "int8": 1},
}


def parse_dtype(words: str, known: tuple[str, ...] = DTYPES) -> str:
    """
    >>> parse_dtype("bf16"), parse_dtype("float32")
    ('bfloat16', 'float32')
    """
    name = SPELLINGS.get(words.lower(), words.lower())
    if name not in known:
        raise BadInput(f"unknown data type {words!r}: use one of {nearest(name, [*known, *SPELLINGS])}")
    return name

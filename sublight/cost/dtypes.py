"""Data types by PyTorch's names: their sizes, how people spell them, and which limit bounds arithmetic in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sublight.errors import BadInput, nearest


@dataclass(frozen=True, slots=True)
class DType:
    """One data type. A packed type's item is one number, not the byte or word that holds several."""

    name: str
    bits: int
    matmul: str = "matmul_fp32"  # the limit of products in it, on the cores that are made for it
    vector: str = "vector_fp32"  # the limit of other arithmetic; half precision is computed in float32
    spellings: tuple[str, ...] = ()


_INT = "vector_int32"
TABLE = (
    DType("float64", 64, "matmul_fp64", "vector_fp64", ("fp64", "double", "f64")),
    DType("float32", 32, spellings=("fp32", "float", "f32")),
    DType("float16", 16, "matmul_fp16", spellings=("fp16", "half", "f16")),
    DType("bfloat16", 16, "matmul_bf16", spellings=("bf16",)),
    DType("float8_e4m3fn", 8, "matmul_fp8", spellings=("fp8", "e4m3", "fp8_e4m3", "float8_e4m3")),
    DType("float8_e4m3fnuz", 8, "matmul_fp8"),
    DType("float8_e5m2", 8, "matmul_fp8", spellings=("e5m2", "fp8_e5m2", "bf8")),
    DType("float8_e5m2fnuz", 8, "matmul_fp8"),
    DType("float8_e8m0fnu", 8, "matmul_fp8", spellings=("e8m0",)),  # scales of blocks, powers of two
    DType("float4_e2m1fn", 4, "matmul_fp4", spellings=("fp4", "e2m1")),
    DType("float4_e2m1fn_x2", 8, "matmul_fp4"),  # PyTorch counts the byte that holds two as one item
    DType("complex32", 32, "matmul_fp32"),
    DType("complex64", 64, "matmul_fp32"),
    DType("complex128", 128, "matmul_fp64", "vector_fp64"),
    DType("int64", 64, vector=_INT, spellings=("i64", "long")),
    DType("int32", 32, vector=_INT, spellings=("i32", "int")),
    DType("int16", 16, vector=_INT, spellings=("i16", "short")),
    DType("int8", 8, "matmul_int8", _INT, ("i8", "char")),
    DType("int4", 4, "matmul_int4", _INT, ("i4",)),
    DType("uint64", 64, vector=_INT, spellings=("u64",)),
    DType("uint32", 32, vector=_INT, spellings=("u32",)),
    DType("uint16", 16, vector=_INT, spellings=("u16",)),
    DType("uint8", 8, "matmul_int8", _INT, ("u8", "byte")),
    DType("uint4", 4, "matmul_int4", _INT, ("u4",)),
    DType("bool", 8, vector=_INT),
)
OPAQUE = tuple(DType(f"{size}-byte", 8 * size) for size in (1, 2, 4, 8, 16))  # of which only the size is known
_BY_NAME = {dtype.name: dtype for dtype in (*TABLE, *OPAQUE)}

DTYPES = ("float32", "float16", "bfloat16")  # what the ops' kernels compute in
SPELLINGS = {spelling: dtype.name for dtype in TABLE for spelling in dtype.spellings}
ITEMSIZE = {dtype.name: dtype.bits // 8 for dtype in (*TABLE, *OPAQUE) if dtype.bits >= 8}  # bytes, of whole bytes


def find_dtype(name: str) -> DType:
    """The row of this name; it is an error of the caller's where there is none."""
    return _BY_NAME[name]


def size_bytes(numel: int, dtype: str) -> int:
    """
    >>> size_bytes(10, "bfloat16"), size_bytes(10, "int4"), size_bytes(3, "int4")
    (20, 5, 2)
    """
    return -(-numel * _BY_NAME[dtype].bits // 8)


def is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def matmul_limit(dtype: str, *, tf32: bool = False) -> str:
    """The limit that bounds products in this data type; `tf32`: those of float32 may run as TF32.

    >>> matmul_limit("bfloat16"), matmul_limit("float32"), matmul_limit("float32", tf32=True)
    ('matmul_bf16', 'matmul_fp32', 'matmul_tf32')
    """
    limit = _BY_NAME[dtype].matmul
    return "matmul_tf32" if tf32 and limit == "matmul_fp32" else limit


def vector_limit(dtype: str) -> str:
    """The limit that bounds arithmetic in this data type outside tensor cores.

    >>> vector_limit("bfloat16"), vector_limit("float64"), vector_limit("int64")
    ('vector_fp32', 'vector_fp64', 'vector_int32')
    """
    return _BY_NAME[dtype].vector


def name_dtype(words: str) -> str | None:
    """The data type that somebody means; None where nobody knows it.

    >>> name_dtype("BF16"), name_dtype("float8_e4m3fn"), name_dtype("decimal")
    ('bfloat16', 'float8_e4m3fn', None)
    """
    name = SPELLINGS.get(words.lower(), words.lower())
    return name if name in _BY_NAME else None


def parse_dtype(words: str, among: Sequence[str] = DTYPES) -> str:
    """
    >>> parse_dtype("bf16"), parse_dtype("float32")
    ('bfloat16', 'float32')
    """
    name = name_dtype(words)
    if name is None or name not in among:
        known = [*among, *(spelling for spelling, meant in SPELLINGS.items() if meant in among)]
        raise BadInput(f"unknown data type {words!r}: did you mean {nearest(words.lower(), known)}?")
    return name

"""What the profiler wrote of an op's arguments, as tensors with bytes; what it did not write is None, not a guess."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sublight.cost import ITEMSIZE, Cost, matmul_limit
from sublight.cost.tensor import Tensor
from sublight.trace.costs.kernels import kernel_dtype, kernel_family, kernel_itemsize
from sublight.trace.record import Detail, Shape

DTYPES = {  # as the profiler spells the element type of a tensor
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "long int": "int64",
    "long": "int64",
    "long long": "int64",
    "int": "int32",
    "short int": "int16",
    "short": "int16",
    "signed char": "int8",
    "char": "int8",
    "unsigned char": "uint8",
    "unsigned short": "uint16",
    "short unsigned int": "uint16",
    "unsigned int": "uint32",
    "unsigned long": "uint64",
    "long unsigned int": "uint64",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::complex<c10::Half>": "complex32",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e4m3fnuz": "float8_e4m3fnuz",
    "c10::Float8_e5m2": "float8_e5m2",
    "c10::Float8_e5m2fnuz": "float8_e5m2fnuz",
    "c10::Float8_e8m0fnu": "float8_e8m0fnu",
    "c10::Float4_e2m1fn_x2": "float4_e2m1fn_x2",
    "c10::qint8": "int8",
    "c10::quint8": "uint8",
}
CODES = {  # as a scalar argument numbers them
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    8: "complex32",
    9: "complex64",
    10: "complex128",
    11: "bool",
    15: "bfloat16",
    23: "float8_e5m2",
    24: "float8_e4m3fn",
    25: "float8_e5m2fnuz",
    26: "float8_e4m3fnuz",
    27: "uint16",
    28: "uint32",
    29: "uint64",
    44: "float8_e8m0fnu",
    45: "float4_e2m1fn_x2",
}
ASSUMED_DTYPE = "float32"  # where neither the trace nor a kernel's name says: traces of 2021, and lists of tensors
LISTS = ("TensorList", "GenericList")
MOST_ELEMENTS = 2**50  # a shape beyond this is damage, not a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """What one call of an op must do at least."""

    family: str
    cost: Cost
    dtype: str  # "bfloat16"
    shape: str  # for people: "4096x1024 @ 1024x4096"
    output_bytes: int
    inplace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """The arguments of one call, by their place in the op's schema."""

    name: str  # without namespace and without the underscore of in-place variants
    detail: Detail
    kernels: Sequence[str] = ()  # what the call ran on the device, where that is known
    inplace: bool = False

    def __len__(self) -> int:
        return len(self.detail.dims)

    def type(self, place: int) -> str | None:
        """None where the schema did not record types."""
        types = self.detail.types
        return types[place] if place < len(types) else (None if not types else "")

    def tensor(self, place: int) -> Tensor | None:
        if not 0 <= place < len(self.detail.dims):
            return None
        kind = self.type(place)
        if kind is None and not self.detail.dims[place]:
            return None  # a scalar, an absent tensor or one of zero dimensions: small in any case
        if kind is not None and kind not in DTYPES:
            return None
        strides = self.detail.strides[place] if place < len(self.detail.strides) else None
        return _tensor(self.detail.dims[place], strides, DTYPES[kind] if kind else self.likely_dtype())

    def need(self, place: int) -> Tensor:
        """A tensor without which the cost is not known."""
        tensor = self.tensor(place)
        if tensor is None:
            raise Unknown
        return tensor

    def tensors(self, place: int) -> tuple[Tensor, ...]:
        """The tensors of a list; of what data type the profiler does not say."""
        if not 0 <= place < len(self.detail.dims) or self.type(place) not in (*LISTS, None):
            return ()
        shapes = self.detail.dims[place]
        if not isinstance(shapes, tuple) or not all(isinstance(shape, tuple) for shape in shapes):
            return ()
        strides = self.detail.strides[place] if place < len(self.detail.strides) else ()
        known = isinstance(strides, tuple) and len(strides) == len(shapes)
        dtype = self.likely_dtype()
        found = [_tensor(shape, strides[at] if known else None, dtype) for at, shape in enumerate(shapes)]
        return tuple(tensor for tensor in found if tensor is not None)

    def all_tensors(self) -> tuple[Tensor, ...]:
        singles = [self.tensor(place) for place in range(len(self))]
        return tuple(tensor for tensor in singles if tensor is not None)

    def likely_dtype(self) -> str:
        """The data type of tensors whose type was not recorded: by the kernels' names, else ASSUMED_DTYPE."""
        for kernel in self.kernels:
            if dtype := kernel_dtype(kernel):
                return dtype
        for kernel in self.kernels:
            if size := kernel_itemsize(kernel):
                return f"{size}-byte"
        return ASSUMED_DTYPE

    def word(self, place: int) -> str:
        """A scalar argument as it was written; empty where it was not."""
        return self.detail.concrete[place] if 0 <= place < len(self.detail.concrete) else ""

    def number(self, place: int) -> float | None:
        try:
            return float(self.word(place))
        except ValueError:
            return None

    def integer(self, place: int) -> int | None:
        try:
            return int(self.word(place))
        except ValueError:
            return None

    def flag(self, place: int) -> bool | None:
        return {"True": True, "False": False}.get(self.word(place))

    def numbers(self, place: int) -> tuple[float, ...] | None:
        words = self._items(place)
        try:
            return None if words is None else tuple(float(word) for word in words)
        except ValueError:
            return None

    def integers(self, place: int) -> tuple[int, ...] | None:
        words = self._items(place)
        try:
            return None if words is None else tuple(int(word) for word in words)
        except ValueError:
            return None

    def flags(self, place: int) -> tuple[bool, ...] | None:
        words = self._items(place)
        return None if words is None else tuple(word == "True" for word in words)

    def dtype(self, place: int) -> str | None:
        """The data type that a scalar argument asks for."""
        code = self.integer(place)
        return CODES.get(code) if code is not None else None

    def _items(self, place: int) -> list[str] | None:
        word = self.word(place)
        if not (word.startswith("[") and word.endswith("]")):
            return None
        return [item.strip() for item in word[1:-1].split(",") if item.strip()]


class Unknown(Exception):
    """The trace does not tell enough to know the cost."""


Handler = Callable[[Args], OpCost]  # raises Unknown where the trace does not tell enough


def aten(names: str, handler: Handler) -> dict[str, Handler]:
    """Rows of a table: PyTorch's ops of these names, separated by blanks."""
    return {f"aten::{name}": handler for name in names.split()}


def _tensor(shape: object, strides: object, dtype: str) -> Tensor | None:
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        return None
    if math.prod(shape) > MOST_ELEMENTS:
        return None
    fits = isinstance(strides, tuple) and len(strides) == len(shape)
    fits = fits and all(type(stride) is int and stride >= 0 for stride in strides)  # type: ignore[attr-defined]
    return Tensor(shape=shape, dtype=dtype, strides=strides if fits else None)  # type: ignore[arg-type]


def shape_text(shape: Iterable[int]) -> str:
    """
    >>> shape_text((4096, 1024)), shape_text(())
    ('4096x1024', '1')
    """
    return "x".join(str(size) for size in shape) or "1"


def tensors_text(tensors: Sequence[Tensor]) -> str:
    """The shapes of a call; of a long list, how many there are and how large they are together."""
    if len(tensors) > 4:
        return f"{len(tensors)} tensors of {sum(tensor.numel for tensor in tensors)}"
    return ", ".join(tensor.text for tensor in tensors)


def broadcast(shapes: Iterable[Shape]) -> Shape:
    """The shape that these give together.

    >>> broadcast([(4, 1, 8), (16, 8), ()])
    (4, 16, 8)
    """
    result: list[int] = []
    for shape in shapes:
        result = [1] * (len(shape) - len(result)) + result
        for at in range(1, len(shape) + 1):
            if result[-at] == 1:
                result[-at] = shape[-at]
            elif shape[-at] not in (1, result[-at]):
                raise Unknown
    return tuple(result)


def promoted(tensors: Sequence[Tensor]) -> str:
    """The data type that arithmetic on these gives; a tensor without dimensions counts only beside its like."""
    ranked = [tensor.dtype for tensor in tensors if tensor.shape] or [tensor.dtype for tensor in tensors]
    rank = {"complex": 3, "float": 2, "bfloat": 2, "int": 1, "uint": 1}
    best = max(ranked, key=lambda dtype: (rank.get(dtype.rstrip("0123456789"), 0), ITEMSIZE[dtype]))
    return "float32" if {"float16", "bfloat16"} <= set(ranked) and ITEMSIZE[best] == 2 else best


def product_limit(dtype: str, kernels: Sequence[str]) -> str:
    """The limit that bounds products of this data type.

    A float32 product may run as TF32: the kernels' names say. A name that says nothing gives the benefit of the doubt,
    because a floor must not be above what is possible; without names (a CPU) it is float32 in earnest.
    """
    on_tensor_cores = [tensor for family, tensor in map(kernel_family, kernels) if family in PRODUCTS]
    tf32 = True in on_tensor_cores or bool(on_tensor_cores and False not in on_tensor_cores)
    return matmul_limit(dtype, tf32=tf32)


PRODUCTS = ("matmul", "conv", "attention")


def op_cost(args: Args, family: str, cost: Cost, *, dtype: str, shape: str | Sequence[Tensor]) -> OpCost:
    """The record of a call; `shape` in words, or the tensors that it shows."""
    return OpCost(
        family=family,
        cost=cost,
        dtype=dtype,
        shape=shape if isinstance(shape, str) else tensors_text(shape),
        output_bytes=cost.write_bytes,
        inplace=args.inplace,
    )

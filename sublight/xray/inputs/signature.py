"""The types and constants of a kernel as they are written on the command line.

`x_ptr:*bf16, n:i32:16` names arguments; without names they are in order, as Triton's own ahead-of-time compiler takes
them. A pointer is taken to be aligned to 16 bytes unless it says `:1`; a number is a multiple of 16 if it says `:16`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sublight.errors import BadInput, nearest

_SAME = {
    **{"f16": "fp16", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"},
    **{"f32": "fp32", "float32": "fp32", "float": "fp32", "f64": "fp64", "float64": "fp64", "double": "fp64"},
    **{"bool": "i1", "int1": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int": "i32", "int64": "i64"},
    **{"uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64"},
    **{"float8_e4m3fn": "fp8e4nv", "float8e4nv": "fp8e4nv", "fp8": "fp8e4nv"},
    **{"float8_e5m2": "fp8e5", "float8e5": "fp8e5"},
}
_TYPES = (
    *("bf16", "fp16", "fp32", "fp64", "fp8e4nv", "fp8e5", "fp8e4b15"),
    *("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """One argument's type, and what is known of its value."""

    kind: str  # *bf16, i32
    divisor: int | None = None  # as written after the type

    @property
    def is_aligned(self) -> bool:
        return self.divisor == 16 if self.divisor is not None else self.kind.startswith(("*", "tensordesc"))

    @property
    def is_one(self) -> bool:
        """`i32:1` is the number one, which Triton makes a constant; of a pointer it says that nothing is known."""
        return self.divisor == 1 and not self.kind.startswith("*")

    def known_as(self, value: int | float, name: str) -> Typed:
        """With the value of one launch, which must fit what is written.

        >>> Typed(kind="i32").known_as(4096, "n"), Typed(kind="i32").known_as(1000, "n").is_aligned
        (Typed(kind='i32', divisor=16), False)
        """
        if self.kind.startswith("fp") or isinstance(value, float):
            return self
        bits = re.fullmatch(r"[iu](\d+)", self.kind)
        if bits and not -(2 ** (int(bits[1]) - 1)) <= value < 2 ** (int(bits[1]) - self.kind.startswith("i")):
            raise BadInput(f"--arg {name}={value} does not fit {self.kind}: write {name}:i64 in --sig")
        if self.divisor == 16 and value % 16:
            raise BadInput(f"--arg {name}={value} is no multiple of 16, as --sig has it: leave :16 out there")
        divisor = 16 if value % 16 == 0 else 1 if value == 1 else 2
        return self if self.divisor is not None else Typed(kind=self.kind, divisor=divisor)


def parse_signature(words: str, names: Sequence[str]) -> dict[str, Typed | str]:
    """By argument: a type, or what stands for a constant where the types are in order.

    >>> parse_signature("x:*bf16, n:i32:16", ["x", "n"])["n"]
    Typed(kind='i32', divisor=16)
    >>> parse_signature("*fp32:16, i32, 1024", ["x", "n", "BLOCK"])["BLOCK"]
    '1024'
    """
    parts = [part.strip() for part in _split(words) if part.strip()]
    named = [part for part in parts if ":" in part and part.split(":")[0].strip() in names]
    if len(named) < len(parts) and (named or any(re.match(r"[A-Za-z_]\w*\s*:\s*[*A-Za-z]", part) for part in parts)):
        odd = next(part for part in parts if part not in named)
        raise BadInput(f"--sig: no argument is named by {odd!r}: they are {', '.join(names)}")
    if untyped := [part for part in parts if part in names]:
        raise BadInput(f"--sig: {untyped[0]} has no type: write {untyped[0]}:*bf16, or :i32")
    if not named:
        if len(parts) > len(names):
            raise BadInput(f"--sig has {len(parts)} types, the kernel {len(names)} arguments: {', '.join(names)}")
        return {name: parse_type(part) if _is_type(part) else part for name, part in zip(names, parts, strict=False)}
    found: dict[str, Typed | str] = {}
    for part in parts:
        name, kind = (word.strip() for word in part.split(":", 1))
        if name in found:
            raise BadInput(f"--sig names {name} twice: give it one type")
        found[name] = parse_type(kind)
    return found


def parse_constants(words: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """`BLOCK=1024`, also several with commas between; `known` has the values that a bare name may stand for.

    >>> parse_constants(["BLOCK=1024, EPS=1e-6", "PACKED=True", "MODE=exact"], {})
    {'BLOCK': 1024, 'EPS': 1e-06, 'PACKED': True, 'MODE': 'exact'}
    """
    found: dict[str, Any] = {}
    for part in [part.strip() for word in words for part in _split(word) if part.strip()]:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name.isidentifier() or not value:
            raise BadInput(f"--const {part!r} is no constant: write NAME=VALUE, such as BLOCK=1024")
        if name in found:
            raise BadInput(f"--const gives {name} twice: give it one value")
        found[name] = parse_value(value, known)
    return found


def parse_value(words: str, known: Mapping[str, Any]) -> Any:
    """A number, True, None, a quoted or bare string, a data type such as tl.float16, or a name of the user's file."""
    with_language = re.fullmatch(r"(?:tl|gl|triton\.language)\.(\w+)", words)
    if with_language:
        import triton.language as tl

        kind = getattr(tl, with_language[1], None)
        if kind is None:
            raise BadInput(f"{words} is not in triton.language: write a data type such as tl.float16")
        return kind
    try:
        return ast.literal_eval(words)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(words.lower(), known.get(words, words))


def parse_type(words: str) -> Typed:
    """One type, as it is written; what is none is refused, with the types that are."""
    kind, _, divisor = words.partition(":")
    kind = kind.strip()
    if not _is_type(kind):
        raise BadInput(
            f"--sig: {kind!r} is no type: use one of {nearest(kind.lstrip('*'), list(_TYPES))}, or a * before it"
        )
    if divisor.strip() not in ("", "1", "2", "4", "8", "16"):
        raise BadInput(f"--sig: {words!r} ends in no divisor: write :16 for a multiple of 16, :1 for nothing known")
    pointer = "*" * (len(kind) - len(kind.lstrip("*")))
    bare = kind.removeprefix(pointer)
    return Typed(kind=pointer + _SAME.get(bare, bare), divisor=int(divisor) if divisor.strip() else None)


def _is_type(words: str) -> bool:
    bare = words.partition(":")[0].strip()
    return bare.startswith("tensordesc<") or bare.lstrip("*").removeprefix("k") in (*_TYPES, *_SAME)


def _split(words: str) -> list[str]:
    """At commas, but not inside brackets: `tensordesc<bf16[64, 64]>` is one.

    >>> _split("a:i32, b:tensordesc<bf16[64, 64]>")
    ['a:i32', ' b:tensordesc<bf16[64, 64]>']
    """
    parts, depth = [""], 0
    for letter in words:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts

"""What a cost is: bytes and FLOPs of an ideal implementation, for a shape, a data type and a direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sublight import units
from sublight.errors import BadInput

Direction = Literal["fwd", "bwd", "fwd+bwd"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")
Shape = Mapping[str, int]  # {"rows": 4096, "cols": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The work that an ideal implementation must do: each input read once, each output written once, one launch."""

    read_bytes: int  # through the device's own memory, as the next
    write_bytes: int
    flops: Mapping[str, float] = field(default_factory=dict)  # by the limit that bounds them: matmul_bf16, vector_fp32
    launches: int = 1
    link_bytes: int = 0  # that this GPU sends to others, or gets from them: the larger of the two
    from_host_bytes: int = 0
    to_host_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Through the device's memory."""
        return self.read_bytes + self.write_bytes

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())

    def __add__(self, other: Cost) -> Cost:
        """One after the other.

        >>> Cost(read_bytes=1, write_bytes=2) + Cost(read_bytes=3, write_bytes=4, launches=0, link_bytes=5)
        Cost(read_bytes=4, write_bytes=6, flops={}, launches=1, link_bytes=5, from_host_bytes=0, to_host_bytes=0)
        """
        flops: Counter[str] = Counter(self.flops)
        flops.update(other.flops)
        return Cost(
            read_bytes=self.read_bytes + other.read_bytes,
            write_bytes=self.write_bytes + other.write_bytes,
            flops=dict(flops),
            launches=self.launches + other.launches,
            link_bytes=self.link_bytes + other.link_bytes,
            from_host_bytes=self.from_host_bytes + other.from_host_bytes,
            to_host_bytes=self.to_host_bytes + other.to_host_bytes,
        )


NOTHING = Cost(read_bytes=0, write_bytes=0, launches=0)  # a view, or a gradient that is another tensor itself


def in_direction(direction: Direction, forward: Cost, backward: Cost) -> Cost:
    """The one that is meant; of both, the sum: the backward pass begins when the forward one is done."""
    if direction == "fwd":
        return forward
    return backward if direction == "bwd" else forward + backward


def shape_text(shape: Shape) -> str:
    """
    >>> shape_text({"rows": 4096, "cols": 1024})
    '4096x1024'
    """
    return "x".join(str(size) for size in shape.values())


def shapes(keys: str, *sizes: tuple[int, ...]) -> tuple[Shape, ...]:
    """
    >>> shapes("rows cols", (1, 2), (3, 4))
    ({'rows': 1, 'cols': 2}, {'rows': 3, 'cols': 4})
    """
    return tuple(dict(zip(keys.split(), each, strict=True)) for each in sizes)


def parse_shape(words: str, of: str, example: Shape, options: Mapping[str, tuple[int, ...]] | None = None) -> Shape:
    """`4096x1024` in the order of the example's keys, or `rows=4096,cols=1024` in any order, options among them.

    >>> parse_shape("64x2k", "softmax", {"rows": 1, "cols": 1})
    {'rows': 64, 'cols': 2000}
    >>> parse_shape("cols=3,rows=2", "softmax", {"rows": 1, "cols": 1})
    {'rows': 2, 'cols': 3}
    """
    options = options or {}
    keys = tuple(key for key in example if key not in options)
    named_example = ",".join(f"{key}={size}" for key, size in example.items())
    usage = f"write {shape_text({key: example[key] for key in keys})} or {named_example}"
    sizes, _, named = words.partition(",") if "=" not in words.partition(",")[0] else ("", "", words)
    try:
        pairs = [part.split("=", 1) for part in named.split(",")] if named else []
        shape = {key.strip(): units.parse_quantity(value) for key, value in pairs}
        if len(shape) != len(pairs):
            raise ValueError("a dimension is given twice")
        if sizes:
            in_order = [units.parse_quantity(part) for part in sizes.lower().split("x")]
            if not shape.keys().isdisjoint(keys):
                raise ValueError("a dimension is given twice")
            shape |= dict(zip(keys, in_order, strict=True))
    except ValueError:
        raise BadInput(f"shape {words!r} does not fit {of}: {usage}") from None
    shape = {key: values[0] for key, values in options.items()} | shape
    if set(shape) != {*keys, *options} or min(shape[key] for key in keys) < 1:
        raise BadInput(f"shape {words!r} does not fit {of}: {usage}, each at least 1")
    if max(shape.values()) >= 2**63:
        raise BadInput(f"shape {words!r} does not fit {of}: a size has 63 bits")
    for key, values in options.items():
        if shape[key] not in values:
            raise BadInput(f"{key}={shape[key]} is none of {of}'s: use {', '.join(map(str, values))}")
    return {key: shape[key] for key in (*keys, *options)}

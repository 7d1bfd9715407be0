"""What a cost is: bytes and FLOPs of an ideal implementation, for a shape, a data type and a direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["fwd", "bwd", "fwd+bwd"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")
Shape = Mapping[str, int]  # {"rows": 4096, "cols": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The work that an ideal implementation must do: each input read once, each output written once, one launch."""

    read_bytes: int
    write_bytes: int
    flops: Mapping[str, float] = field(default_factory=dict)  # by the limit that bounds them: matmul_bf16, vector_fp32
    launches: int = 1

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())


def shape_text(shape: Shape) -> str:
    """
    >>> shape_text({"rows": 4096, "cols": 1024})
    '4096x1024'
    """
    return "x".join(str(size) for size in shape.values())

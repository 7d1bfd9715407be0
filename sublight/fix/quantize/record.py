"""What quantizing a model did, and what it left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Layers of one kind that were packed, or left for one reason."""

    kind: str
    names: tuple[str, ...]
    is_packed: bool
    reason: str
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """What `quantize` did to a model."""

    how: str
    rows: tuple[Row, ...]
    change: str = ""  # of the loss, or of the outputs, where a batch was given
    is_kept: bool = True  # the weights as they were are kept, so that it can be undone

    @property
    def packed(self) -> int:
        return sum(len(row.names) for row in self.rows if row.is_packed)

    @property
    def before_bytes(self) -> int:
        return sum(row.before_bytes for row in self.rows)

    @property
    def after_bytes(self) -> int:
        return sum(row.after_bytes for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "how": self.how,
            "rows": [
                {
                    "kind": row.kind,
                    "names": list(row.names),
                    "packed": row.is_packed,
                    "reason": row.reason,
                    "before_bytes": row.before_bytes,
                    "after_bytes": row.after_bytes,
                }
                for row in self.rows
            ],
            "change": self.change,
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
        }

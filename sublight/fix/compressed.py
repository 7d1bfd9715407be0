"""What quantizing or sparsifying a model did to its linear layers, and what it left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Layers of one kind that were changed, or left for one reason."""

    kind: str
    names: tuple[str, ...]
    is_changed: bool
    reason: str
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """What `quantize` or `sparsify` did to a model."""

    how: str  # w4a16, 2:4, …
    verb: str  # what was done to a layer: "packed", "made sparse"
    rows: tuple[Row, ...]
    change: str = ""  # of the loss, or of the outputs, where a batch was given
    is_kept: bool = True  # the weights as they were are kept, so that it can be undone
    expected: str = ""  # of the time, where that was measured

    @property
    def changed(self) -> int:
        return sum(len(row.names) for row in self.rows if row.is_changed)

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
                    "changed": row.is_changed,
                    "reason": row.reason,
                    "before_bytes": row.before_bytes,
                    "after_bytes": row.after_bytes,
                }
                for row in self.rows
            ],
            "change": self.change,
            "expected": self.expected,
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
        }

"""The last values of everything that is watched, for curves."""

from __future__ import annotations

from collections import deque

from sublight.health.record import Snapshot, leaves

LOOKS = 120


class History:
    """The last values of each GPU and of the host, under the names of the record's innermost fields."""

    def __init__(self, looks: int = LOOKS) -> None:
        self._rows: deque[dict[tuple[str, str], float]] = deque(maxlen=looks)

    def add(self, snapshot: Snapshot) -> None:
        parts = [(gpu.uuid, gpu) for gpu in snapshot.gpus] + [("host", snapshot.host)]
        self._rows.append(
            {
                (of, name): float(value)
                for of, part in parts
                for name, value in leaves(part)
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
        )

    def series(self, of: str, name: str) -> list[float | None]:
        """Oldest first; None at a look that had no value. `of`: a GPU's UUID, or host."""
        return [row.get((of, name)) for row in self._rows]

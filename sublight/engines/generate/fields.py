"""Values of a config.json, by name and kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sublight.errors import BadInput

MOST = 2**31 - 1  # of any size


class Fields:
    """The values of a config.json, each of the kind that it must be; another ends in a line that names it. What is
    left out, or null, is `usual`."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data, self.source = data, source

    def whole(self, name: str, usual: int | None = None, *, least: int = 1) -> int:
        value = self._given(name, usual)
        if type(value) is not int or not least <= value <= MOST:
            raise self._wrong(name, value, f"a whole number from {least} to {MOST}")
        return value

    def number(self, name: str, usual: float | None = None) -> float:
        value = self._given(name, usual)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._wrong(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._given(name, False)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def tokens(self, name: str) -> tuple[int, ...]:
        value = self._given(name, [])
        found = value if isinstance(value, list) else [value]
        if any(type(each) is not int for each in found):
            raise self._wrong(name, value, "a token's number, or a list of them")
        return tuple(found)

    def inner(self, name: str) -> dict[str, Any]:
        value = self._given(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return value

    def _given(self, name: str, usual: Any) -> Any:
        value = self.data.get(name)
        if value is None and usual is None:
            raise BadInput(f"{self.source} has no {name}: fetch the model again")
        return usual if value is None else value

    def _wrong(self, name: str, value: Any, kind: str) -> BadInput:
        return BadInput(f"{self.source} has {name} {str(value)[:40]!r}, which is not {kind}")

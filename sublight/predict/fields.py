"""A config's fields: each read as what it must be, or refused in one line that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sublight.errors import BadInput

Config = Mapping[str, Any]
MOST = 1 << 31  # of a number in a config: more is a slip, and takes hours to count


class Fields:
    """A config's fields by Hugging Face's names; one that is needed and not there is the user's mistake."""

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name

    def number(self, *names: str, default: int | None = None) -> int:
        """A whole number above 0; where the config leaves it out, or has null, the class's `default`, if it has one."""
        value = self.maybe(*names)
        if value is None:
            if default is not None:
                return default
            raise BadInput(f"the config of {self.name} lacks {' or '.join(names)}: add it to the file")
        if not value:
            given = next(name for name in names if self.config.get(name) is not None)
            raise BadInput(f"the config of {self.name} has {given} = 0: it must be a whole number above 0")
        return value

    def maybe(self, *names: str) -> int | None:
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST:
                less = f" below {MOST}" if isinstance(value, int) and value >= MOST else ""
                raise BadInput(f"the config of {self.name} has {name} = {value!r}: it must be a whole number{less}")
            return value
        return None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadInput(f"the config of {self.name} has {name} = {value!r}: it must be true or false")
        return value

    def labels(self) -> int:
        """Classes of a classifier: ImageNet's where the config names none."""
        value = self.config.get("id2label") or {}
        if not isinstance(value, dict):
            raise BadInput(f"the config of {self.name} has id2label = {value!r}: it must be an object")
        return len(value) or self.number("num_labels", default=1000)

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers, or nothing."""
        value = self.config.get(name) or []
        if not isinstance(value, list) or not all(
            isinstance(each, int) and not isinstance(each, bool) and 0 <= each < MOST for each in value
        ):
            raise BadInput(f"the config of {self.name} has {name} = {value!r}: it must be a list of whole numbers")
        return value

    def layer_types(self) -> list[str] | None:
        """The kind of attention of each layer, where the config lists them."""
        value = self.config.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list):
            raise BadInput(f"the config of {self.name} has layer_types = {value!r}: it must be a list")
        for kind in value:
            if kind not in ("full_attention", "sliding_attention"):
                raise BadInput(f"the config of {self.name} has layers of {kind!r}, which are not counted yet")
        return value

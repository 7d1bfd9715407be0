"""How positions become angles where a model was stretched to longer texts than it was first trained on.

Each pair of a head turns by its own frequency. `linear` slows all of them alike; Llama 3's way and YaRN slow those that
make few turns over the first training's positions and leave the fast ones, with a ramp between; YaRN also multiplies
cosines and sines (its amplitude). `dynamic` leaves the angles as they are within `max_position_embeddings`, where texts
end here: beyond, every token changes the angles of those before it, whose keys are cached, so a text's tokens would
depend on its chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sublight.engines.generate.fields import Fields
from sublight.errors import BadInput

KINDS = ("default", "dynamic", "linear", "llama3", "yarn")
NAMES = (  # of all kinds; a name from elsewhere may mean other angles
    *("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "finetuned"),
    *("partial_rotary_factor", "mrope_section", "short_factor", "long_factor"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    factor: float
    amplitude: float = 1.0

    def scaled(self, plain: Sequence[float], theta: float) -> list[float]:
        return [frequency / self.factor for frequency in plain]


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3:
    """The ramp is over turns: below `low` slowed, above `high` as they were."""

    factor: float
    low: float
    high: float
    original: float  # positions of the first training
    amplitude: float = 1.0

    def scaled(self, plain: Sequence[float], theta: float) -> list[float]:
        return [self._scaled(frequency) for frequency in plain]

    def _scaled(self, frequency: float) -> float:
        turns = self.original * frequency / (2 * math.pi)
        part = min(1.0, max(0.0, (turns - self.low) / (self.high - self.low)))
        return (1 - part) * frequency / self.factor + part * frequency


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """The ramp is over a head's pairs: from the one that makes `fast` turns to the one that makes `slow`."""

    factor: float
    fast: float
    slow: float
    original: float
    is_rounded: bool  # the ramp's ends, to whole pairs
    amplitude: float

    def scaled(self, plain: Sequence[float], theta: float) -> list[float]:
        size = 2 * len(plain)

        def pair_of(turns: float) -> float:
            return size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = pair_of(self.fast), pair_of(self.slow)
        if self.is_rounded:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        wide = last - first or 0.001
        parts = [min(1.0, max(0.0, (pair - first) / wide)) for pair in range(len(plain))]
        return [
            part * frequency / self.factor + (1 - part) * frequency
            for part, frequency in zip(parts, plain, strict=True)
        ]


Scaling = Linear | Llama3 | Yarn


def joined(old: Mapping[str, Any], new: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`rope_scaling`, as files had it, and `rope_parameters`, as they have it now; where both are there they agree.

    >>> joined({"type": "linear", "factor": 2.0}, {}, "here")
    {'factor': 2.0, 'rope_type': 'linear'}
    """
    forms = [_named(each) for each in (old, new) if each]
    made = {name: value for form in forms for name, value in form.items()}
    if any(made[name] != value for form in forms for name, value in form.items()):
        raise BadInput(f"{source} has rope_scaling and rope_parameters that differ: keep the one that is right")
    if strange := sorted(made.keys() - set(NAMES)):
        raise BadInput(f"{source} turns positions by {strange[0][:40]!r}, which `generate` does not know")
    if "factor" in made and "rope_type" not in made:
        raise BadInput(f"{source} has a factor of positions without a rope_type: `generate` knows {', '.join(KINDS)}")
    return made


def _named(form: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is null, and its kind under the one name."""
    made = {name: value for name, value in form.items() if value is not None and name != "type"}
    kind = form.get("rope_type", form.get("type"))
    return made if kind is None else {**made, "rope_type": kind}


def read(rope: Fields, original: int) -> Scaling | None:
    """Of `rope_scaling` or `rope_parameters`; `original` positions where it has none of its own."""
    kind = rope.data.get("rope_type", "default")
    if kind not in KINDS:
        raise BadInput(f"{rope.source} has rope_type {kind!r}: `generate` knows {', '.join(KINDS)}")
    if rope.number("partial_rotary_factor", 1.0) != 1:
        raise BadInput(f"{rope.source} has a partial_rotary_factor: `generate` turns heads as a whole")
    if kind == "default":
        return None
    factor = rope.number("factor")
    if kind == "dynamic":
        return None
    if kind == "linear":
        return Linear(factor=factor)
    positions = rope.number("original_max_position_embeddings", original)
    if kind == "yarn":
        return _yarn(rope, factor, positions)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise BadInput(f"{rope.source} has low_freq_factor {low:g}, which is not below high_freq_factor {high:g}")
    return Llama3(factor=factor, low=low, high=high, original=positions)


def _yarn(rope: Fields, factor: float, original: float) -> Yarn:
    fast, slow = rope.number("beta_fast", 32), rope.number("beta_slow", 1)
    if rope.number("rope_theta", 10000.0) <= 1:
        raise BadInput(f"{rope.source} has a rope_theta of at most 1, by which yarn can tell no pair from another")
    if fast <= slow:
        raise BadInput(f"{rope.source} has beta_fast {fast:g}, which is not above beta_slow {slow:g}")
    if rope.data.get("mscale") and rope.data.get("mscale_all_dim"):
        usual = _grown(factor, rope.number("mscale")) / _grown(factor, rope.number("mscale_all_dim"))
    else:
        usual = _grown(factor, 1.0)
    return Yarn(
        factor=factor,
        fast=fast,
        slow=slow,
        original=original,
        is_rounded=rope.data.get("truncate") is None or rope.flag("truncate"),
        amplitude=rope.number("attention_factor", usual),
    )


def _grown(factor: float, scale: float) -> float:
    """
    >>> _grown(0.5, 1.0), round(_grown(4.0, 1.0), 3)
    (1.0, 1.139)
    """
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

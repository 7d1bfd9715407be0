"""A probe measures one family of ceilings; each file of this folder holds one, `LIMITS` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from sublight.gpus import Gpu
from sublight.results import Limit, Samples

Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The machine that a probe runs on and how long it may take."""

    kind: Kind
    gpu: Gpu | None = None
    quick: bool = False

    @property
    def time_limit_s(self) -> float:
        """The longest that one figure may take; it ends earlier once it has settled."""
        return 0.15 if self.quick else 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One file's measurement: yields each limit as soon as it is known, so that Ctrl-C keeps what there is."""

    name: str  # the family: "device memory"
    names: tuple[str, ...]  # the limits that it yields
    kinds: tuple[Kind, ...]  # the devices that it can measure
    measure: Callable[[Context], Iterator[Limit]]
    gpu_only: tuple[str, ...] = ()  # limits among `names` that a CPU does not have

    def names_on(self, kind: Kind) -> tuple[str, ...]:
        return tuple(name for name in self.names if kind == "cuda" or name not in self.gpu_only)


def rate(name: str, unit: str, amount: float, samples: Samples, **rest: object) -> Limit:
    """A limit as a rate: `amount` moved or computed, divided by the sampled time."""
    median_s = samples.median_s
    return Limit(
        name=name,
        unit=unit,
        value=amount / median_s,
        spread=amount * samples.spread_s / median_s**2,
        n=samples.n,
        **rest,  # type: ignore[arg-type]
    )

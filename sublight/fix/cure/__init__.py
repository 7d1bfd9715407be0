"""What can be tried on a script from outside: one cure a file. Nothing here imports torch before a script runs."""

from __future__ import annotations

from collections.abc import Iterable

from sublight.fix.cure.autocast import AUTOCAST
from sublight.fix.cure.cache import CACHE
from sublight.fix.cure.compiled import COMPILE
from sublight.fix.cure.graphed import GRAPH
from sublight.fix.cure.norms import NORMS
from sublight.fix.cure.optimizer import OPTIMIZER
from sublight.fix.cure.pinned import PINNED
from sublight.fix.cure.pointwise import POINTWISE
from sublight.fix.cure.record import Cure
from sublight.fix.cure.tf32 import TF32
from sublight.fix.cure.workers import WORKERS

CURES: tuple[Cure, ...] = (
    NORMS,
    POINTWISE,
    COMPILE,
    AUTOCAST,
    OPTIMIZER,
    GRAPH,
    PINNED,
    CACHE,
    TF32,
    WORKERS,
)  # those that set a forward in the order in which they may lie around each other


def find(name: str) -> Cure:
    return next(cure for cure in CURES if cure.name == name)


def treating(findings: Iterable[str]) -> list[Cure]:
    """The cures of these findings, each once.

    >>> [cure.name for cure in treating(["pageable-copy", "host-sync"])]
    ['pinned copies']
    """
    wanted = set(findings)
    return [cure for cure in CURES if wanted & set(cure.treats)]

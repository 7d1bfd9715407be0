"""What patching a model found, did and left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from sublight.fix.patch.pay import Paid
    from sublight.fix.patch.verify import Verdict

Forward = Callable[..., Any]  # forward(self, …): takes all it needs from `self`, for a copy of the module gets it too


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A forward of ours for one module, that behaves as the module's own does."""

    rule: str
    forward: Forward
    op: str = ""  # whose plan says whether ours wins; none: it is swapped always
    arguments: Callable[..., tuple[Any, ...]] = tuple  # (module, *what its forward is called with) -> what the op takes
    wins: Callable[..., tuple[bool, str]] | None = (
        None  # (module, *its arguments): a plan needs what its forward makes of them
    )
    over: Callable[[Forward], Forward] | None = None  # the same done to another rule's forward for this module
    hides: tuple[str, ...] = ()  # children that it does not call, which must stay what they are
    reads_settings: bool = (
        True  # the module's settings are part of the proof; a forward rebuilt from its source reads them
    )
    trusts: tuple[str, ...] = ()  # packages whose code is not read; what other code of its class reads must stay
    what: str = ""  # in the table: "RMSNorm with 1 + weight"
    why: str = "decided call by call"  # in the table, unless a batch tells more


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A module of a kind that a rule knows, which it does not understand."""

    rule: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of module. `find` tells by behaviour, not by class: None where it is no such module at all."""

    name: str
    find: Callable[[torch.nn.Module, torch.nn.Module], Swap | Left | None]  # (module, the whole model)
    reads: Literal["behaviour", "source"] = "behaviour"  # of the module; its children are known by theirs
    joins: bool = False  # its swaps go beside another rule's in one forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: modules of one kind, swapped or left for one reason."""

    rule: str
    kind: str  # the modules' class
    names: tuple[str, ...]
    is_swapped: bool
    reason: str  # why ours wins, or why they were left
    saving_s: float | None = None  # of one step, expected; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """What `patch` did to a model."""

    rows: tuple[Row, ...]
    verdict: Verdict | None = None  # where it was verified
    paid: Paid | None = None  # where it was measured
    notes: tuple[str, ...] = field(default=())
    before: int = 0  # modules that had been patched before

    @property
    def swapped(self) -> int:
        return sum(len(row.names) for row in self.rows if row.is_swapped)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [
                {
                    "rule": row.rule,
                    "kind": row.kind,
                    "names": list(row.names),
                    "swapped": row.is_swapped,
                    "reason": row.reason,
                    "saving_s": row.saving_s,
                }
                for row in self.rows
            ],
            "verified": self.verdict.sentence if self.verdict else None,
            "is_right": self.verdict.is_right if self.verdict else None,
            "before_s": self.paid.before.samples.median_s if self.paid else None,
            "after_s": self.paid.after.samples.median_s if self.paid else None,
            "before_peak_bytes": self.paid.before.peak_bytes if self.paid else None,
            "after_peak_bytes": self.paid.after.peak_bytes if self.paid else None,
            "notes": list(self.notes),
        }

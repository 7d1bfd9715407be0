"""One access of one program: what it does to which lanes of which tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sublight.xray.record import Place
from sublight.xray.sanitize.memory import Argument, Array, Storage
from sublight.xray.sanitize.order import Kind

VERBS: dict[Kind, str] = {
    "load": "reads",
    "store": "writes",
    "atomic": "updates",
    "atomic load": "reads",
    "atomic store": "writes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The lanes of one access that belong to one tensor."""

    argument: Argument | None
    storage: Storage
    lanes: Array
    offsets: Array  # in bytes, from the storage's beginning

    def spot(self, number: int) -> str:
        """What the lane of that number in this group touches, in words."""
        byte = int(self.offsets[number])
        if self.argument is None:
            return f"byte {byte} of a tensor that is no argument"
        return f"{self.argument.spot(byte)} ({self.argument.text})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What one instruction of one program does."""

    kind: Kind
    size: int  # bytes of an element
    place: Place
    values: Array | None  # that it stores, by lane
    current: Callable[[Array], Array] | None  # reads memory at true addresses
    reads: bool
    is_float_add: bool
    sources: frozenset[Place]  # loads that the values come from
    true: Array  # addresses by lane, as they become known

    @property
    def is_atomic(self) -> bool:
        return self.kind.startswith("atomic")


def words_of_outside(argument: Argument, offset: int, lanes: int) -> str:
    """So many bytes from a tensor's first element, and no element there."""
    is_between = 0 <= offset < argument.span
    return (
        f"at offset {offset // argument.itemsize} of {argument.name}, "
        + ("in a gap between the elements of that view, " if is_between else "")
        + f"{argument.text} that ends at {argument.span // argument.itemsize}{lanes_text(lanes)}: "
        + ("mend the strides" if is_between else "mask it off, or mend the stride")
    )


def lanes_text(count: int) -> str:
    """How many more do so.

    >>> lanes_text(1), lanes_text(32)
    ('', ' (32 lanes do)')
    """
    return f" ({count} lanes do)" if count > 1 else ""

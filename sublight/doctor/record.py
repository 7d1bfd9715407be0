"""One line of the doctor's table: something that sublight can use, and whether it is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that sublight can use."""

    name: str
    state: State
    found: str = ""  # the version, the device, the folder
    needed_for: str
    fix: str = ""  # empty where there is nothing to fix
    required: bool = False  # without it no verb works

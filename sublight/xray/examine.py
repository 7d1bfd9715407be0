"""A kernel's whole page: what its compiled code takes, how it fills an SM, what it issues and what it moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sublight.errors import BadInput
from sublight.xray.occupancy.blocks import Occupancy, Row, WhatIf, occupancy, table, what_if
from sublight.xray.occupancy.in_flight import InFlight, bytes_in_flight
from sublight.xray.occupancy.waves import Waves, waves
from sublight.xray.ptx.accesses import BLOCKS, Followed, access_findings, accesses, follow_blocks
from sublight.xray.record import Access, Code, Finding
from sublight.xray.roof import Roof, roof_of
from sublight.xray.sass.ahead import bytes_ahead
from sublight.xray.sass.asm_lines import read
from sublight.xray.sass.findings import by_line, code_findings
from sublight.xray.sass.instruction import file_of
from sublight.xray.sass.loops import flow
from sublight.xray.sass.mix import Mix, mix
from sublight.xray.sass.turns import turns_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything that xray tells of one kernel on one GPU."""

    code: Code
    mix: Mix
    accesses: tuple[Access, ...]
    findings: tuple[Finding, ...]
    roof: Roof
    heat: Mapping[int, float]  # source line -> instructions there
    occupancy: Occupancy | None = None  # None: the block's size is not known
    what_if: WhatIf | None = None
    table: tuple[Row, ...] = ()
    waves: Waves | None = None
    in_flight: InFlight | None = None
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        used, occupancy = self.code.resources, self.occupancy
        return {
            "name": self.code.name,
            "gpu": self.code.gpu.key,
            "registers": used.registers,
            "spill_bytes": used.spill_bytes,
            "stack_bytes": used.stack_bytes,
            "shared_bytes": used.shared_bytes,
            "static_shared_bytes": used.static_shared_bytes,
            "dynamic_shared_bytes": used.dynamic_shared_bytes,
            "barriers": used.barriers,
            "threads": used.threads,
            "blocks_per_sm": occupancy.blocks_per_sm if occupancy else None,
            "warps_per_sm": occupancy.warps_per_sm if occupancy else None,
            "occupancy": occupancy.fraction if occupancy else None,
            "limited_by": ", ".join(occupancy.limited_by) if occupancy else None,
            "what_if": self.what_if.sentence if self.what_if else None,
            "waves": self.waves.sentence if self.waves else None,
            "in_flight": self.in_flight.sentence if self.in_flight else None,
            "tensor_core": self.mix.tensor_core,
            "mix": self.mix.to_json(),
            "accesses": [_access(access) for access in self.accesses],
            "findings": [finding.to_json() for finding in self.findings],
            "roof": [
                {"name": bound.name, "seconds": bound.seconds, "detail": bound.detail} for bound in self.roof.bounds
            ],
            "constants": {name: _plain(value) for name, value in self.code.constants.items()},
            "options": {name: _plain(value) for name, value in self.code.options.items()},
            "grid": list(self.code.grid),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """The time below which a kernel cannot go, and what that is read off."""

    accesses: tuple[Access, ...]
    roof: Roof
    occupancy: Occupancy | None
    waves: Waves | None
    in_flight: InFlight | None
    followed: Followed
    notes: tuple[str, ...]


def bounded(code: Code, *, blocks: int = BLOCKS, measured_s: float | None = None) -> Bounded:
    """What the compiled kernel allows; a part of what `examine` tells, and half of its time."""
    instructions = read(code)
    paths, file = flow(instructions), file_of(code, instructions)
    found, notes = _occupancy(code)
    followed = follow_blocks(code, blocks=blocks)
    seen = accesses(code, followed=followed)
    grid = waves(math.prod(code.grid), found, code.gpu) if found and found.blocks_per_sm and code.grid else None
    in_flight = _in_flight(found, code, bytes_ahead(instructions))
    warps = followed.blocks * found.warps_per_block if found and not followed.stops else 0
    notes += [followed.problem] if followed.problem else [_stopped(stop.reason) for stop in followed.stops[:1]]
    roof = roof_of(
        code,
        turns=turns_of(code, instructions, paths, file, seen, warps),
        accesses=seen,
        followed=followed,
        occupancy=found,
        waves=grid,
        in_flight=in_flight,
        measured_s=measured_s,
    )
    return Bounded(
        accesses=seen,
        roof=roof,
        occupancy=found,
        waves=grid,
        in_flight=in_flight,
        followed=followed,
        notes=tuple(notes),
    )


def examine(code: Code, *, blocks: int = BLOCKS, measured_s: float | None = None) -> Page:
    """Every part of xray over one kernel."""
    bound = bounded(code, blocks=blocks, measured_s=measured_s)
    findings = (*code_findings(code), *access_findings(code, bound.followed))
    return Page(
        code=code,
        mix=mix(code),
        accesses=bound.accesses,
        findings=tuple(_judged(code, finding) for finding in findings),
        roof=bound.roof,
        heat={line: float(sum(kinds.values())) for line, kinds in by_line(code).items()},
        occupancy=bound.occupancy,
        what_if=what_if(code.resources, code.gpu) if bound.occupancy else None,
        table=table(code.resources, code.gpu) if bound.occupancy else (),
        waves=bound.waves,
        in_flight=bound.in_flight,
        notes=bound.notes,
    )


def _judged(code: Code, finding: Finding) -> Finding:
    """What the kernel's author accepts, and says why, is information."""
    why = code.accepted.get(finding.id)
    return replace(finding, detail=f"{finding.detail}; accepted: {why}", is_information=True) if why else finding


def _occupancy(code: Code) -> tuple[Occupancy | None, list[str]]:
    if code.resources.threads is None:
        return None, ["how many threads a block has is not known: give --threads 256"]
    return occupancy(code.resources, code.gpu), []


def _in_flight(found: Occupancy | None, code: Code, ahead: int | None) -> InFlight | None:
    if found is None or not found.warps_per_sm or not ahead:
        return None
    try:
        return bytes_in_flight(found, code.gpu, bytes_per_thread=ahead)
    except BadInput:  # no latency is published for this GPU
        return None


def _stopped(reason: str) -> str:
    return f"not every block could be followed to its end: {reason}"


def _access(access: Access) -> dict[str, Any]:
    return {
        "line": access.place.line if access.place else None,
        "file": access.place.file if access.place else None,
        "space": access.space,
        "kind": access.kind,
        "instruction": access.instruction,
        "bytes_per_thread": access.bytes_per_thread,
        "requests": access.requests,
        "sectors_per_request": access.sectors_per_request,
        "ideal_sectors_per_request": access.ideal_sectors / access.requests
        if access.sectors_per_request is not None
        else None,
        "bank_conflict": access.bank_conflict,
        "unknown": access.unknown or None,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)

"""What xray knows of a kernel: its compiled self, and what each part of xray reads off it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sublight.gpus import Gpu

RESERVED_SHARED_BYTES = 1024  # of every block, for the driver, since sm_80

Space = Literal["global", "shared"]
AccessKind = Literal[
    "load", "store", "atomic", "async copy", "bulk copy", "matrix load", "matrix store", "matrix operand"
]
Resource = Literal["registers", "shared memory", "threads", "blocks", "barriers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a block or a thread of it takes, as the assembler and the driver count it."""

    registers: int  # a thread
    spill_bytes: int = 0  # a thread: what the assembler could not keep in registers
    stack_bytes: int = 0  # a thread: spills, and arrays that are indexed at run time
    static_shared_bytes: int = 0  # a block, without what the driver reserves
    dynamic_shared_bytes: int = 0  # a block, asked for at the launch
    barriers: int = 0
    threads: int | None = None  # a block; None: only the launch says

    @property
    def shared_bytes(self) -> int:
        return self.static_shared_bytes + self.dynamic_shared_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A line of the source."""

    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One kernel, compiled for one GPU: everything else is read off this."""

    name: str  # as its author wrote it
    symbol: str  # as the binary names it
    gpu: Gpu
    resources: Resources
    sass: str  # of this kernel alone, as nvdisasm prints it with lines
    ptx: str = ""  # empty where only the binary is at hand
    ttgir: str = ""  # Triton's own representation, with the layouts
    file: str = ""  # of the source; empty where it is not at hand
    signature: Mapping[str, str] = field(default_factory=dict)  # argument -> type, as Triton writes it: *bf16, i32
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # num_warps, num_stages, …
    grid: tuple[int, ...] = ()  # of the launch that was recorded; empty: unknown
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of that launch: tensors and numbers by name
    function: Any = None  # Triton's, to launch it again; None where only the code is at hand
    at: str = ""  # of an op of ours: the shape and data type of the call that launched it
    accepted: Mapping[str, str] = field(default_factory=dict)  # id of a finding -> why its author accepts it

    @property
    def capability(self) -> int:
        """90 for sm_90."""
        assert self.gpu.compute_capability is not None
        major, minor = self.gpu.compute_capability
        return 10 * major + minor


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with a kernel, or worth knowing, at its line."""

    id: str  # kebab-case: narrow-load, spill, race
    kernel: str
    place: Place | None
    detail: str  # one sentence: what, how much, what to do
    is_information: bool = False  # worth knowing, nothing to mend

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kernel": self.kernel,
            "file": self.place.file if self.place else None,
            "line": self.place.line if self.place else None,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One memory instruction, summed over the warps that were followed through the kernel.

    A *request* is one warp executing it. Global memory answers in *sectors* of 32 bytes; shared memory in *wavefronts*
    (passes), one where no two lanes want different words of one bank.
    """

    place: Place | None
    space: Space
    kind: AccessKind
    bytes_per_thread: int
    requests: int
    sectors: int = 0  # global: distinct sectors, request by request
    ideal_sectors: int = 0  # global: what the bytes asked for would fill if they lay side by side
    wavefronts: int = 0  # shared
    ideal_wavefronts: int = 0  # shared: what the bytes asked for take without a conflict
    split_wavefronts: int = 0  # shared: those that an async copy takes besides, its bytes coming from more lines
    unknown: str = ""  # why nothing can be said; the counts are then 0
    instruction: str = ""  # ld.global.v4.b32

    @property
    def sectors_per_request(self) -> float | None:
        return self.sectors / self.requests if self.space == "global" and self.requests and not self.unknown else None

    @property
    def all_wavefronts(self) -> int:
        return self.wavefronts + self.split_wavefronts

    @property
    def bank_conflict(self) -> float | None:
        """n of an n-way conflict: 1 is none."""
        return self.wavefronts / self.ideal_wavefronts if self.ideal_wavefronts and not self.unknown else None

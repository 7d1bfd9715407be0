"""A kernel's compiled self held to what its author expects, for anybody's tests: no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sublight.backend.record import no_interpreter
from sublight.gpus import Gpu
from sublight.gpus import find as find_gpu
from sublight.xray.examine import Page, examine
from sublight.xray.record import Code, Place, Space
from sublight.xray.sass.asm_lines import read
from sublight.xray.sass.instruction import file_of
from sublight.xray.sass.kinds import Kind, bytes_per_thread, kind_of
from sublight.xray.sass.lanes import Lanes
from sublight.xray.sass.loops import flow


class Unexpected(AssertionError):
    """The kernel is not as expected; every line of the message is one thing, with its place."""


def check(
    kernel: Any,
    *,
    gpu: Gpu | str = "h100",
    spills: int | None = 0,
    min_load_bytes: int = 0,
    min_store_bytes: int = 0,
    tensor_cores: bool | str | None = None,
    max_registers: int | None = None,
    min_occupancy: float | None = None,
    bank_conflicts: bool = True,
    uncoalesced: bool = True,
    signature: str | Mapping[str, str] = "",
    constants: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    grid: tuple[int, ...] = (),
) -> tuple[Page, ...]:
    """Compile `kernel` for `gpu` and raise `Unexpected` unless all that is asked for holds; else its pages.

    `kernel` is a @triton.jit function (with `signature` and `constants`, unless it was compiled), `Code`, or what the
    command takes: an op's name, FILE:KERNEL. `spills`: bytes a thread at most; None: as many as it likes.
    `min_load_bytes`, `min_store_bytes`: what a lane moves at once, where lanes differ in their address. `tensor_cores`:
    used (True), not used (False), or which ("HGMMA"). `bank_conflicts=False`, `uncoalesced=False`: none may be found.
    That takes addresses to be known: of an op they are, else give numbers and tensors by name as `arguments`, and the
    `grid`; what cannot be judged is not as expected either.
    """
    codes = _codes(kernel, gpu, signature, constants)
    launches = [
        replace(code, arguments={**code.arguments, **(arguments or {})}, grid=grid or code.grid) for code in codes
    ]
    pages = tuple(map(examine, launches))
    wrong: list[str] = []
    for page in pages:
        name = f"{page.code.name} on {page.code.gpu.key}"
        used = page.code.resources
        if spills is not None and used.spill_bytes > spills:
            place = next((finding.place for finding in page.findings if finding.id == "spill"), None)
            wrong.append(f"{name}: spills {used.spill_bytes} bytes a thread, at most {spills} allowed{_at(place)}")
        if max_registers is not None and used.registers > max_registers:
            wrong.append(f"{name}: {used.registers} registers a thread, at most {max_registers} allowed")
        if min_occupancy is not None and (page.occupancy is None or page.occupancy.fraction < min_occupancy):
            reached = f"{page.occupancy.fraction:.2f}" if page.occupancy else "not known"
            wrong.append(f"{name}: occupancy {reached}, at least {min_occupancy:.2f} wanted")
        wrong += [f"{name}: {words}" for words in _narrow(page.code, "global load", min_load_bytes)]
        wrong += [f"{name}: {words}" for words in _narrow(page.code, "global store", min_store_bytes)]
        wrong += [f"{name}: {words}" for words in _tensor_cores(page, tensor_cores)]
        wrong += [f"{name}: {words}" for words in _memory(page, "shared", bank_conflicts, ("bank-conflict",))]
        wrong += [f"{name}: {words}" for words in _memory(page, "global", uncoalesced, ("uncoalesced", "misaligned"))]
    if wrong:
        raise Unexpected("\n".join(wrong))
    return pages


def _codes(
    kernel: Any, gpu: Gpu | str, signature: str | Mapping[str, str], constants: Mapping[str, Any] | None
) -> tuple[Code, ...]:
    from sublight.xray.inputs.load import load, load_kernel

    gpu_record = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if isinstance(kernel, Code):
        return (kernel,)
    if not isinstance(kernel, str | Path) and not hasattr(kernel, "asm"):
        no_interpreter()
    if isinstance(kernel, str | Path):
        words = signature if isinstance(signature, str) else ", ".join(f"{n}:{kind}" for n, kind in signature.items())
        pairs = [f"{name}={value}" for name, value in (constants or {}).items()]
        return load(str(kernel), [gpu_record], signature=words, constants=pairs)
    return (load_kernel(kernel, gpu_record, signature=signature, constants=constants),)


def _narrow(code: Code, wanted: Kind, least: int) -> Iterator[str]:
    """Accesses below that many bytes a lane, by line; one address for the whole warp is no matter of width."""
    instructions = read(code)
    file, lanes = file_of(code, instructions), Lanes(instructions)
    narrow: dict[tuple[Place | None, int], int] = {}
    for index in flow(instructions).reached:
        each = instructions[index]
        width = bytes_per_thread(each)
        if kind_of(each) == wanted and width < least and lanes.differ(index):
            key = each.place(file), width
            narrow[key] = narrow.get(key, 0) + 1
    verb = wanted.removeprefix("global ")
    for (place, width), count in narrow.items():
        yield f"{count} {verb}{'s' if count > 1 else ''} of {width} bytes a thread, at least {least} wanted{_at(place)}"


def _memory(page: Page, space: Space, is_allowed: bool, unwanted: tuple[str, ...]) -> Iterator[str]:
    """What was found of these, or why it could not be looked for."""
    if is_allowed:
        return
    untold = [*page.notes, *(access.unknown for access in page.accesses if access.space == space and access.unknown)]
    if untold:
        yield f"{' and '.join(unwanted)} accesses cannot be looked for: {untold[0]}"
    for found in page.findings:
        if found.id in unwanted:
            yield f"{found.id}, {found.detail}{_at(found.place)}"


def _tensor_cores(page: Page, wanted: bool | str | None) -> Iterator[str]:
    used = page.mix.tensor_core
    if wanted is None or (wanted == bool(used) if isinstance(wanted, bool) else wanted in (used or "").split("+")):
        return
    words = wanted if isinstance(wanted, str) else "tensor cores" if wanted else "no tensor cores"
    yield f"{words} wanted, {used or 'none'} used"


def _at(place: Place | None) -> str:
    return f" ({place.file}:{place.line})" if place else ""

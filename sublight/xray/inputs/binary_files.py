"""Kernels that are compiled already: PTX, a cubin, or what Triton keeps in its cache."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sublight.backend.record import OPTIONS, capability_of, compilable
from sublight.errors import BadInput, nearest
from sublight.gpus import Gpu, all_gpus
from sublight.xray import binary, build
from sublight.xray.record import Code

MOST_KERNELS = 20  # of a cache folder
_PLAIN = re.compile(r"^_Z(N?)K?((?:\d+[A-Za-z_].*))$")


def codes_of_ptx(
    file: Path, kernel: str, gpus: Sequence[Gpu], *, threads: int | None = None, shared_bytes: int = 0
) -> tuple[Code, ...]:
    """Assembled for every GPU."""
    ptx = read_text(file)
    symbols = binary.entries(ptx)
    if ".version" not in ptx or not symbols:
        raise BadInput(f"{file} has no kernel in PTX: it needs .version, .target and an .entry")
    names = demangled(symbols)
    wanted = chosen(kernel, names, file)
    found: list[Code] = []
    for gpu in gpus:
        capability = compilable(gpu)
        _fits(ptx, capability, gpu, file)
        try:
            made = binary.assembled(ptx, capability)
        except BadInput as error:
            raise BadInput(f"{file}: {error}") from None
        codes = build.codes(
            made.cubin, gpu, ptx=ptx, dynamic_shared_bytes=shared_bytes, threads=threads, names=names,
            spilled=made.spilled, file=source_of(ptx),
        )  # fmt: skip
        found += [code for code in codes if code.symbol in wanted]
    return tuple(found)


def codes_of_cubin(
    file: Path,
    kernel: str,
    gpus: Sequence[Gpu],
    *,
    threads: int | None = None,
    shared_bytes: int = 0,
    tell: Callable[[str], None],
) -> tuple[Code, ...]:
    """For the GPUs of its own architecture; another one that was asked for is told of."""
    cubin = _bytes(file)
    owners = _owners(_architecture(cubin, file), gpus, str(file), tell)
    found: list[Code] = []
    for gpu in owners:
        try:
            codes = build.codes(cubin, gpu, dynamic_shared_bytes=shared_bytes, threads=threads, names={})
        except BadInput as error:
            raise BadInput(f"{file}: {error}") from None
        names = demangled([code.symbol for code in codes])
        wanted = chosen(kernel, names, file)
        found += [replace(code, name=names[code.symbol]) for code in codes if code.symbol in wanted]
    return tuple(found)


def codes_of_cache(folder: Path, kernel: str, gpus: Sequence[Gpu], *, tell: Callable[[str], None]) -> tuple[Code, ...]:
    """Kernels of a Triton cache, or of one entry of it, the newest first."""
    listed = [file for pattern in ("*.json", "*/*.json") for file in folder.glob(pattern)]
    records = [file for file in listed if not file.name.startswith("__grp__")]
    kept = [file for file in records if file.with_suffix(".cubin").is_file()]
    if not kept:
        if any(file.with_suffix(".hsaco").is_file() for file in records):
            raise BadInput(f"{folder} holds AMD kernels (.hsaco): xray reads NVIDIA's")
        raise BadInput(
            f"{folder} is no Triton cache: it has no .cubin with its .json; the usual one is ~/.triton/cache"
        )
    if kernel:
        names = sorted({file.stem for file in kept})
        kept = [file for file in kept if file.stem == kernel]
        if not kept:
            raise BadInput(f"{folder} has no kernel {kernel!r}: it has {nearest(kernel, names)}")
    kept.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    wanted = {capability_of(gpu) for gpu in gpus}
    is_own = ((file, description) for file in kept if _arch(description := _json(file)) in wanted or not wanted)
    shown = list(itertools.islice(is_own, MOST_KERNELS))
    if not shown:
        shown = [(file, _json(file)) for file in kept[:MOST_KERNELS]]
        has = ", ".join(sorted({f"sm_{_arch(description)}" for _, description in shown}))
        tell(f"{folder} has nothing for {', '.join(gpu.key for gpu in gpus)}: shown is what it has, for {has}")
    if len(kept) > MOST_KERNELS:
        tell(f"{folder} has {len(kept)} kernels: the newest {len(shown)} are shown, name one with {folder}:KERNEL")
    return tuple(code for file, description in shown for code in _of_cache(file, description, gpus))


def _of_cache(file: Path, metadata: dict[str, Any], gpus: Sequence[Gpu]) -> Iterable[Code]:
    def text(suffix: str) -> str:
        other = file.with_suffix(suffix)
        return other.read_text(encoding="utf-8", errors="replace") if other.is_file() else ""

    cubin, ptx = file.with_suffix(".cubin").read_bytes(), text(".ptx")
    for gpu in _owners(_architecture(cubin, file.with_suffix(".cubin")), gpus, str(file), lambda words: None):
        for code in build.codes(
            cubin, gpu, ptx=ptx, dynamic_shared_bytes=int(metadata.get("shared", 0)), names={}, file=source_of(ptx)
        ):
            options = {name: metadata[name] for name in OPTIONS if metadata.get(name) is not None}
            yield replace(code, name=str(metadata.get("name", code.name)), ttgir=text(".ttgir"), options=options)


def _runs(capability: int, architecture: int) -> bool:
    """A cubin runs on its own architecture and on later ones of its generation: sm_80's on an L40S, not an H100. From
    sm_100 on some have features of one architecture alone, so that only that one is sure.

    >>> [_runs(capability, 80) for capability in (75, 80, 86, 89, 90)]
    [False, True, True, True, False]
    """
    same_generation = architecture < 100 and capability // 10 == architecture // 10
    return capability == architecture or (same_generation and capability > architecture)


def _owners(architecture: int, gpus: Sequence[Gpu], what: str, tell: Callable[[str], None]) -> list[Gpu]:
    """The GPUs asked for that run this architecture; where none does, the first of the table that does."""
    own = [gpu for gpu in gpus if _runs(capability_of(gpu), architecture)]
    if others := [gpu.key for gpu in gpus if gpu not in own]:
        tell(f"{what} is for sm_{architecture}, which {', '.join(others)} cannot run")
    if own:
        return own
    table = [gpu for gpu in all_gpus() if gpu.compute_capability == divmod(architecture, 10)]
    if not table:
        raise BadInput(f"{what} is for sm_{architecture}: no GPU of the table has that; `sublight gpus` lists them")
    return table[:1]


def chosen(kernel: str, names: dict[str, str], file: Path) -> set[str]:
    """The symbols that the user means: by symbol, by full name, or by the name before < and (."""
    if not kernel:
        return set(names)
    found = {
        symbol for symbol, name in names.items() if kernel in (symbol, name, bare(name), bare(name).split("::")[-1])
    }
    if not found:
        raise BadInput(f"{file} has no kernel {kernel!r}: it has {nearest(kernel, list(names.values()))}")
    return found


def demangled(symbols: Sequence[str]) -> dict[str, str]:
    """Symbol -> name as it was written, without the types of its arguments: scale<float>."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    names = [plain_name(symbol) for symbol in symbols]
    if tool and any(symbol.startswith("_Z") for symbol in symbols):
        done = subprocess.run([tool], input="\n".join(symbols), capture_output=True, text=True)
        lines = done.stdout.splitlines()
        if done.returncode == 0 and len(lines) == len(symbols):
            names = [without_arguments(name) for name in lines]
    return dict(zip(symbols, names, strict=True))


def without_arguments(name: str) -> str:
    """
    >>> without_arguments("void ns::scale<float, (int)4>(float*, float)"), without_arguments("saxpy")
    ('ns::scale<float, (int)4>', 'saxpy')
    """
    depth, end, start = 0, len(name), 0
    for place, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == " " and depth == 0 and place < end:
            start = place + 1
        if letter == "(" and depth == 0 and not name.startswith("(anonymous", place):
            end = place
            break
    return name[start:end]


def plain_name(symbol: str) -> str:
    """The name in a mangled symbol, without template arguments.

    >>> plain_name("_Z5scaleIfEvPT_S0_"), plain_name("_ZN2ns1vEPNS_1VE"), plain_name("saxpy")
    ('scale', 'ns::v', 'saxpy')
    """
    mark = _PLAIN.match(symbol)
    if not mark:
        return symbol
    rest, parts = mark[2], []
    while number := re.match(r"\d+", rest):
        size, begin = int(number[0]), number.end()
        parts.append(rest[begin : begin + size])
        rest = rest[begin + size :]
        if not mark[1]:
            break
    return "::".join(parts)


def bare(name: str) -> str:
    """
    >>> bare("scale<float>")
    'scale'
    """
    return name.split("<", 1)[0]


def source_of(ptx: str) -> str:
    """The first file of the PTX's table that is still there."""
    for path in re.findall(r'^\s*\.file\s+\d+\s+"([^"]+)"(?:\s+"([^"]+)")?', ptx, re.MULTILINE):
        file = Path(*[part for part in path if part])
        if file.is_file():
            return str(file)
    return ""


def _fits(ptx: str, capability: int, gpu: Gpu, file: Path) -> None:
    target = re.search(r"^\s*\.target\s+sm_(\d+)([af]?)", ptx, re.MULTILINE)
    if not target:
        raise BadInput(f"{file} has no .target sm_NN: it is no PTX that can be assembled")
    wanted, own = int(target[1]), target[2]
    if (
        wanted > capability
        or (own == "a" and wanted != capability)
        or (own == "f" and wanted // 10 != capability // 10)
    ):
        raise BadInput(
            f"{file} is for sm_{wanted}{own}, which {gpu.key} (sm_{capability}) does not run: name another --gpu"
        )


def _architecture(cubin: bytes, file: Path) -> int:
    try:
        return binary.architecture(cubin)
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from None


def _arch(metadata: dict[str, Any]) -> int:
    arch = (metadata.get("target") or {}).get("arch", 0)
    return arch if isinstance(arch, int) else 0


def _json(file: Path) -> dict[str, Any]:
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} is no JSON: {error}") from None
    return description if isinstance(description, dict) else {}


def read_text(file: Path) -> str:
    return _bytes(file).decode("utf-8", errors="replace")


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}") from None

"""What `sublight xray` does: name a kernel and see it, compare two, or run a script under watch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight import cli_output, gpus
from sublight.op import BadInput

if TYPE_CHECKING:
    from sublight.xray.counters.record import Counters
    from sublight.xray.examine import Page
    from sublight.xray.record import Code

DEFAULT_GPU = "h100"
EXAMPLE = "sublight xray kernels.py:my_kernel, or an op: sublight xray softmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command's options."""

    target: str
    args: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    signature: str = ""
    constants: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    grid: str = ""
    threads: int | None = None
    shape: str = ""
    dtype: str = "bf16"
    record: bool = False
    may_run: bool = True
    measure: bool = False
    counted: str = ""
    html: str = ""
    json: str = ""


def xray(wanted: Wanted) -> int:
    """A page for every kernel that the target names, on every GPU."""
    from sublight.report import xray as report
    from sublight.report import xray_counters

    rows = _counters(wanted)
    if rows and not wanted.target:
        cli_output.show(xray_counters.page(rows), xray_counters.to_json(rows), wanted.json)
        return 0
    pages = list(_pages(wanted, wanted.target, wanted.args))
    compared = xray_counters.compared(pages, rows) if rows else ()
    if wanted.html:
        from sublight.report import xray_page

        xray_page.write([report.view(page) for page in pages], Path(wanted.html))
    shown = report.page(pages)
    if compared:
        from rich.console import Group

        shown = Group(shown, xray_counters.against(compared))
    data = report.to_json(pages) | ({"counted": xray_counters.to_json(rows)["counters"]} if rows else {})
    cli_output.show(shown, data, wanted.json)
    return 0


def diff(wanted: Wanted) -> int:
    """What changed from one kernel to another."""
    from sublight.report import xray_diff

    if len(wanted.args) != 1 or wanted.record or wanted.html:
        raise BadInput("--diff takes two: sublight xray --diff before.cubin after.cubin (or FILE:KERNEL, or ops)")
    pairs = xray_diff.paired(list(_pages(wanted, wanted.target, ())), list(_pages(wanted, wanted.args[0], ())))
    cli_output.show(xray_diff.page(pairs), xray_diff.to_json(pairs), wanted.json)
    return 0


def run_script(wanted: Wanted, at: str) -> int:
    """Run a script on the CPU under watch; 1 where something is to be mended."""
    from sublight.report import xray_run
    from sublight.xray.sanitize import run as sanitize

    if not wanted.target or Path(wanted.target).suffix != ".py":
        raise BadInput(f"--run takes a Python script: sublight xray --run script.py, not {wanted.target or 'nothing'}")
    found = sanitize.run(Path(wanted.target), wanted.args, at=sanitize.parse_sizes(at))
    cli_output.show(xray_run.page(found), found.to_json(), wanted.json)
    return 0 if found.is_clean else 1


def _pages(wanted: Wanted, target: str, args: Sequence[str]) -> Iterator[Page]:
    from sublight.report import console
    from sublight.xray.examine import examine

    if not target:
        raise BadInput(f"name a kernel: {EXAMPLE}")
    codes = [_told(code, wanted) for code in _codes(wanted, target, args)]
    with console.progress("xray") as progress:
        for done, code in enumerate(codes):
            if progress:
                progress(f"{code.name} on {code.gpu.key}", done, len(codes))
            yield examine(code)


def _codes(wanted: Wanted, target: str, args: Sequence[str]) -> tuple[Code, ...]:
    os.environ.pop("TRITON_INTERPRET", None)  # kernels must be compiled, and Triton decides when it loads
    from sublight.op import parse_dtype
    from sublight.xray.inputs.load import load

    if args and not wanted.record:
        raise BadInput(f"{args[0]}: one kernel file at a time; a script's arguments go with --record or --run")
    return load(
        target,
        _gpus(wanted.gpus),
        signature=wanted.signature,
        constants=wanted.constants,
        arguments=args,
        shape=wanted.shape,
        dtype=parse_dtype(wanted.dtype),
        threads=wanted.threads,
        record=wanted.record,
        may_run=wanted.may_run,
    )


def _gpus(names: Sequence[str]) -> list[gpus.Gpu]:
    """Those named, else this machine's, else one that many have."""
    if names:
        return list({gpu.key: gpu for gpu in map(gpus.find, names)}.values())
    here = gpus.detect()
    return [here if here and here.compute_capability else gpus.find(DEFAULT_GPU)]


def _told(code: Code, wanted: Wanted) -> Code:
    """With the launch's numbers and grid, where the user gives them."""
    changed: dict[str, Any] = {}
    if wanted.numbers:
        changed["arguments"] = {**code.arguments, **dict(_number(words) for words in wanted.numbers)}
    if wanted.grid:
        try:
            changed["grid"] = tuple(int(size) for size in wanted.grid.lower().split("x"))
        except ValueError:
            raise BadInput(f"grid {wanted.grid!r}: write blocks, as in 132 or 64x8") from None
    return dataclasses.replace(code, **changed) if changed else code


def _number(words: str) -> tuple[str, int | float]:
    name, _, value = (word.strip() for word in words.partition("="))
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    raise BadInput(f"--arg {words!r}: write NAME=NUMBER, as in n=4096")


def _counters(wanted: Wanted) -> list[Counters]:
    if not wanted.counted:
        return []
    from sublight.xray.counters import ncu_report

    if not Path(wanted.counted).is_file():
        raise BadInput(f"there is no file {wanted.counted}: write one with ncu --csv --page raw, or ncu -o report")
    return ncu_report.read(Path(wanted.counted))

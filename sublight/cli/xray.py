"""What `sublight xray` does: name a kernel and see it, compare two, or run a script under watch."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sublight import gpus, units
from sublight.cli import output as cli_output
from sublight.errors import BadInput

if TYPE_CHECKING:
    from sublight.xray.counters.measure import Measured
    from sublight.xray.counters.record import Counters
    from sublight.xray.examine import Page
    from sublight.xray.record import Code

DEFAULT_GPU = "h100"
DEFAULT_DTYPE = "bf16"
MOST_BLOCKS = (2**31 - 1, 2**16 - 1, 2**16 - 1)  # along each axis of a grid
AFTER = "after:"  # prefix of a constant that is for the second kernel of --diff alone
EXAMPLE = "sublight xray kernels.py:my_kernel, or an op: sublight xray softmax"

Kind = Literal["op", "python", "binary", "cache"]


def _flag(name: str, uses: str, default: Any = "") -> Any:
    """An option: its spelling, and the kinds of targets and the modes that use it."""
    return field(default=default, metadata={"flag": name, "uses": frozenset(uses.split())})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command's options, each with its flag, and which targets and modes use it."""

    target: str
    args: tuple[str, ...] = ()
    gpus: tuple[str, ...] = _flag("--gpu", "op python binary cache diff", ())
    signature: str = _flag("--sig", "python diff")
    constants: tuple[str, ...] = _flag("--const", "python diff", ())
    numbers: tuple[str, ...] = _flag("--arg", "op python binary cache diff", ())
    grid: str = _flag("--grid", "op python binary cache diff")
    threads: str = _flag("--threads", "binary diff")
    shared: str = _flag("--shared", "binary diff")
    nvcc: str = _flag("--nvcc", "binary diff")
    shape: str = _flag("--shape", "op diff")
    dtype: str = _flag("--dtype", "op diff")
    record: bool = _flag("--record", "python", False)
    no_exec: bool = _flag("--no-exec", "op python binary cache diff", False)
    measure: bool = _flag("--measure", "op python", False)
    counted: str = _flag("--import", "op python binary cache import")
    at: str = _flag("--at", "run")
    lanes: bool = _flag("--lanes", "op python binary cache", False)
    full: bool = _flag("--full", "op python binary cache", False)
    html: str = _flag("--html", "op python binary cache")
    json: str = ""


FLAGS = {each.metadata["flag"]: each for each in fields(Wanted) if each.metadata}


def _useless(use: str) -> list[str]:
    """The flags that this kind of target, or this mode, has no use for."""
    return [name for name, each in FLAGS.items() if use not in each.metadata["uses"]]


CALLED: dict[Kind, str] = {
    "op": "an op", "python": "a Python file", "binary": "CUDA C++, PTX or a cubin", "cache": "a Triton cache",
}  # fmt: skip


def command(wanted: Wanted, *, run: bool, diff: bool) -> int:
    """Do what the options ask, and return the exit status; options that would be ignored are refused first."""
    for name in wanted.gpus:
        gpus.find(name)  # an unknown one is refused here, before torch is loaded
    if run and diff:
        raise BadInput("--run watches one script, --diff compares two kernels: one of them at a time")
    if run:
        _refuse("--run", wanted, _useless("run"))
        return run_script(wanted)
    _refuse("without --run, xray", wanted, ["--at"])
    if diff:
        _refuse("--diff", wanted, _useless("diff"))
        return compare(wanted)
    if wanted.counted and not wanted.target:
        _refuse("--import without a kernel", wanted, _useless("import"))
    if wanted.lanes:
        _refuse("--lanes", wanted, ("--measure", "--import"))
        return show_lanes(wanted)
    return show(wanted)


def show(wanted: Wanted) -> int:
    """Show a page for every kernel that the target names, on every GPU."""
    from rich.console import Group

    from sublight.report.xray import counters as xray_counters
    from sublight.report.xray import terminal as report

    rows = _counters(wanted)
    if rows and not wanted.target:
        cli_output.show(xray_counters.page(rows), xray_counters.to_json(rows), wanted.json)
        return 0
    if any(words.startswith(AFTER) for words in wanted.constants):
        raise BadInput(f"--const {AFTER}NAME=VALUE is for the second kernel of --diff: leave {AFTER!r} out")
    pages, counted = _pages(wanted, wanted.target, wanted.args)
    rows += counted
    if wanted.html:
        from sublight.report.xray import page as xray_page
        from sublight.report.xray.facts import view

        xray_page.write([view(page) for page in pages], Path(wanted.html))
    shown = report.page(pages, target=wanted.target.partition(":")[0], full=wanted.full)
    data = report.to_json(pages)
    if rows:
        compared = xray_counters.compared(pages, rows)
        shown = Group(shown, xray_counters.against(compared, pages, rows))
        data |= {"counted": xray_counters.to_json(rows)["counters"], "compared": xray_counters.rows_of(compared)}
    cli_output.show(shown, data, wanted.json)
    return 0


def show_lanes(wanted: Wanted) -> int:
    """Show which lane holds which element, for every layout of every kernel that the target names."""
    from sublight.report.draw import page as html_page
    from sublight.report.xray import lanes as report
    from sublight.xray.lanes import layouts

    if not wanted.target:
        raise BadInput(f"name a kernel: {EXAMPLE}")
    with cli_output.stdout_kept():
        codes = _codes(wanted, wanted.target, wanted.args)
    if not any(code.ttgir for code in codes):
        return show_reach(codes, wanted)
    drawn = [(code, layouts(code.ttgir)) for code in codes]
    if wanted.html:
        html_page.write(report.document(drawn), Path(wanted.html))
    cli_output.show(report.page(drawn, full=wanted.full), report.to_json(drawn), wanted.json)
    return 0


def show_reach(codes: Sequence[Code], wanted: Wanted) -> int:
    """For kernels without layouts (CUDA C++): which lane asks for which bytes, from their addresses."""
    from sublight.report.draw import page as html_page
    from sublight.report.xray import reach as report
    from sublight.xray.ptx.reach import reaches

    drawn = [(code, reaches(code)) for code in _with_arguments(codes, wanted)]
    if wanted.html:
        html_page.write(report.document(drawn), Path(wanted.html))
    cli_output.show(report.page(drawn), report.to_json(drawn), wanted.json)
    return 0


def compare(wanted: Wanted) -> int:
    """Show what changed from one kernel to another, or from one constant to another."""
    from sublight.report.xray import diff as xray_diff

    first = [words for words in wanted.constants if not words.startswith(AFTER)]
    second = [words.removeprefix(AFTER) for words in wanted.constants if words.startswith(AFTER)]
    if len(wanted.args) > 1 or not wanted.target or not (wanted.args or second):
        raise BadInput(
            "--diff takes two: sublight xray --diff before.py:kernel after.py:kernel (or ops, or cubins); "
            f"or one kernel and --const {AFTER}NAME=VALUE"
        )
    names = {words.partition("=")[0].strip() for words in second}
    both = [words for words in first if words.partition("=")[0].strip() not in names]
    before, _ = _pages(dataclasses.replace(wanted, constants=tuple(first)), wanted.target, ())
    after, _ = _pages(dataclasses.replace(wanted, constants=(*both, *second)), (*wanted.args, wanted.target)[0], ())
    pairs = xray_diff.paired(before, after)
    shown = xray_diff.page(pairs, xray_diff.alone(before, after, pairs))
    cli_output.show(shown, xray_diff.to_json(pairs), wanted.json)
    return 0


def run_script(wanted: Wanted) -> int:
    """Run a script on the CPU and check its kernels; returns 1 if something is to be mended, 3 if it did not finish."""
    from sublight.xray.sanitize import run as sanitize

    if not wanted.target or Path(wanted.target).suffix != ".py":
        target = f", not {wanted.target}" if wanted.target else ""
        raise BadInput(f"--run takes a Python script: sublight xray --run script.py{target}")
    with cli_output.stdout_kept():
        report = sanitize.run(Path(wanted.target), wanted.args, at=sanitize.parse_sizes(wanted.at))
    from sublight.report.xray import run as xray_run  # imported last: that takes as long as a short script runs

    cli_output.show(xray_run.page(report), report.to_json(), wanted.json)
    return 1 if not report.is_clean else 0 if report.is_whole else 3


def _refuse(what: str, wanted: Wanted, flags: Iterable[str]) -> None:
    refused = [flag for flag in flags if getattr(wanted, FLAGS[flag].name)]
    if refused:
        raise BadInput(f"{what} takes no {' and no '.join(refused)}: leave {'it' if len(refused) == 1 else 'them'} out")


def _pages(wanted: Wanted, target: str, args: Sequence[str]) -> tuple[list[Page], list[Counters]]:
    """The kernels' pages; with --measure also what was timed and counted."""
    from sublight.report.draw import console
    from sublight.xray.examine import examine

    if not target:
        raise BadInput(f"name a kernel: {EXAMPLE}")
    if wanted.measure and gpus.detect() is None:
        raise BadInput("--measure needs a GPU, and torch finds none here: `sublight doctor` says why")
    with cli_output.stdout_kept():
        codes = _with_arguments(_codes(wanted, target, args), wanted)
        measured = _measure(codes, wanted) if wanted.measure else {}
    pages = []
    with console.progress("xray") as progress:
        for done, code in enumerate(codes):
            if progress:
                progress(f"{code.name} on {code.gpu.key}", done, len(codes))
            pages.append(_with_time(code, measured[done]) if done in measured else examine(code))
    return pages, [each.counters for each in measured.values() if each.counters]


def _codes(wanted: Wanted, target: str, args: Sequence[str]) -> tuple[Code, ...]:
    if "triton" not in sys.modules:  # which decides as it loads: half of it this way, half that way would not load
        os.environ.pop("TRITON_INTERPRET", None)  # for xray kernels must be compiled, not interpreted
    from sublight.cost import parse_dtype
    from sublight.xray.inputs.load import load, parted, sides_of
    from sublight.xray.load_torch import load_torch

    path, _ = parted(target)
    kind = _kind(path)
    _refuse(CALLED[kind], wanted, _useless(kind))
    _grid(wanted.grid)  # a mistake in it must not cost the time that kernels take to compile
    if args and not wanted.record:
        raise BadInput(f"{args[0]}: one kernel file at a time; a script's arguments go with --record or --run")
    if wanted.record or kind == "op":
        load_torch()
    return load(
        target,
        _gpus(wanted.gpus, path),
        signature=wanted.signature,
        constants=wanted.constants,
        numbers=dict(map(_number, wanted.numbers)),
        arguments=args,
        shape=wanted.shape,
        dtype=parse_dtype(wanted.dtype or DEFAULT_DTYPE),
        threads=sides_of(wanted.threads) or None,
        shared_bytes=_bytes(wanted.shared),
        flags=shlex.split(wanted.nvcc),
        record=wanted.record,
        may_run=not wanted.no_exec,
    )


def _kind(path: Path | None) -> Kind:
    """The kind of target, by its file or folder; without either it is an op."""
    return "op" if path is None else "cache" if path.is_dir() else "python" if path.suffix == ".py" else "binary"


def _gpus(names: Sequence[str], path: Path | None) -> list[gpus.Gpu]:
    """The GPUs named, else this machine's, else a usual one; a compiled target says itself which GPU it is for."""
    if names:
        return list({gpu.key: gpu for gpu in map(gpus.find, names)}.values())
    if path is not None and path.suffix not in (".py", ".cu", ".ptx"):
        return []
    here = gpus.detect()
    return [here if here and here.compute_capability else gpus.find(DEFAULT_GPU)]


def _with_arguments(codes: Sequence[Code], wanted: Wanted) -> list[Code]:
    """The codes with the launch's numbers and grid, where the user gives them."""
    numbers, grid = dict(_number(words) for words in wanted.numbers), _grid(wanted.grid)
    for name in numbers:
        if not any(_takes(code, name) for code in codes):
            known = ", ".join(dict.fromkeys(each for code in codes for each in code.signature)) or "0, 1, …, in order"
            raise BadInput(f"--arg {name}: no such argument; the arguments are {known}")
    changed = []
    for code in codes:
        mine = {name: number for name, number in numbers.items() if _takes(code, name)}
        changed.append(dataclasses.replace(code, arguments={**code.arguments, **mine}, grid=grid or code.grid))
    return changed


def _takes(code: Code, name: str) -> bool:
    """Whether the kernel has this argument: by name if its source is at hand, else by place (PTX keeps no names)."""
    return (
        name in code.signature
        or name in code.constants
        or (name.isdecimal() and (not code.signature or int(name) < len(code.signature)))
    )


def _grid(words: str) -> tuple[int, ...]:
    if not words:
        return ()
    sizes = words.lower().split("x")
    if len(sizes) > 3 or not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise BadInput(f"--grid {words!r}: write blocks, as in 132 or 64x8")
    blocks = tuple(map(int, sizes))
    if any(count > most for count, most in zip(blocks, MOST_BLOCKS, strict=False)):
        raise BadInput(
            f"--grid {words}: no GPU launches more than {' x '.join(f'{most:,}' for most in MOST_BLOCKS)} blocks"
        )
    return blocks


def _bytes(words: str) -> int:
    try:
        return units.parse_quantity(words) if words else 0
    except ValueError as error:
        raise BadInput(f"--shared: {error}") from None


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


def _measure(codes: Sequence[Code], wanted: Wanted) -> dict[int, Measured]:
    """By place: those that are compiled for this machine's GPU, timed, and counted where a script can run under ncu."""
    from sublight.xray.counters import measure

    here = gpus.detect()
    assert here is not None, "checked before the kernels were compiled"
    mine = {at: code for at, code in enumerate(codes) if code.gpu.key == here.key}
    if not mine:
        raise BadInput(f"--measure runs on {here.key}, the GPU that is here: leave --gpu out, or name that one, too")
    from sublight.xray.inputs.load import parted

    script, _ = parted(wanted.target)
    run = (sys.executable, str(script), *wanted.args) if wanted.record else ()
    measured = measure.measure([(code, code.function) for code in mine.values()], command=run)
    return dict(zip(mine, measured, strict=True))


def _with_time(code: Code, measured: Measured) -> Page:
    from sublight.xray.examine import examine

    page = examine(code, measured_s=measured.samples.median_s if measured.samples else None)
    missing = {"not timed": measured.no_time, "no counters": measured.no_counters}
    return dataclasses.replace(page, notes=(*page.notes, *(f"{what}: {why}" for what, why in missing.items() if why)))

"""Read what `ncu --csv` prints, in both its forms, with whatever else was printed around it.

The raw page is wide: a column for each metric, and a second header row of units. The details page, and `--metrics`
without a page, is long: a row for each metric. Numbers may have thousands separators and come in any unit.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from sublight.errors import BadInput
from sublight.xray.counters.record import Counters, counters, knows

KERNEL = "Kernel Name"
HOW = "make one with `ncu --csv --page raw … > report.csv`"
_NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?([eE][-+]?\d+)?")
_ABSENT = {"", "n/a", "nan", "-nan", "inf", "-inf", "(!) nan", "(!) n/a"}

_Row = dict[str, str]
_Values = dict[str, tuple[float, str]]


def read(path: Path) -> list[Counters]:
    """The kernels of a file, in the order of their launches."""
    try:
        return parse(path.read_text(encoding="utf-8-sig"), where=str(path))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise BadInput(f"{path} is neither a report nor a CSV file of Nsight Compute: {HOW}") from None


def parse(text: str, *, where: str = "the output of ncu") -> list[Counters]:
    """Each launch that was profiled."""
    rows = _rows(text, where)
    launches = list(_long(rows, where) if rows and "Metric Name" in rows[0] else _wide(rows, where))
    if not launches:
        raise BadInput(f"{where} has a header but no kernel: profile a run that launches one")
    return launches


def number(cell: str, what: str) -> float | None:
    """None: not counted. A list of instances after the number is left off.

    >>> number("1,234.5", "t"), number("n/a", "t"), number("8 (4; 4)", "t")
    (1234.5, None, 8.0)
    """
    bare = re.sub(r"(?<=\d)\s*\([^()]*\)$", "", cell.strip())
    if bare.lower() in _ABSENT:
        return None
    if not _NUMBER.fullmatch(bare):
        raise BadInput(f"{what}: {cell!r} is no number as ncu prints it: export again with LC_ALL=C")
    return float(bare.replace(",", ""))


def _rows(text: str, where: str) -> list[_Row]:
    """What belongs to the table: ncu's own messages and what the program printed are left out."""
    lines = [line for line in text.splitlines() if line.strip()]
    at = next((at for at, line in enumerate(lines) if KERNEL in next(csv.reader([line]))), None)
    if at is None:
        if "ERR_NVGPUCTRPERM" in text:
            raise BadInput(f"{where}: ncu was not allowed to read counters (ERR_NVGPUCTRPERM): run it as root")
        raise BadInput(f"{where} is no CSV of Nsight Compute: no line has a column {KERNEL!r}; {HOW}")
    header, *rest = csv.reader(lines[at:])
    return [dict(zip(header, cells, strict=False)) for cells in rest if _belongs(cells, header)]


def _belongs(cells: list[str], header: list[str]) -> bool:
    if not header.index(KERNEL) < len(cells) <= len(header) + 1 or cells == header:  # a comma ends some rows
        return False
    row = dict(zip(header, cells, strict=False))
    if not row[KERNEL]:  # the units of the raw page
        return "Metric Name" not in header
    return "ID" not in header or row["ID"].strip().isdigit()


def _wide(rows: list[_Row], where: str) -> Iterator[Counters]:
    units: _Row = {}
    for row in rows:
        if not row[KERNEL]:
            units = row
            continue
        values: _Values = {}
        for name, cell in row.items():
            if knows(name) and name not in ("Grid Size", "Block Size"):  # these two are columns of their own
                _add(values, name, cell, units.get(name, ""), where)
        yield _kernel(row, values)


def _long(rows: list[_Row], where: str) -> Iterator[Counters]:
    launches: dict[tuple[str, ...], tuple[_Row, _Values]] = {}
    for row in rows:
        keys = ("Process ID", "ID", KERNEL) if "ID" in row else (KERNEL, "Grid Size", "Block Size")
        _, values = launches.setdefault(tuple(row.get(key, "") for key in keys), (row, {}))
        name, unit = row.get("Metric Name", ""), row.get("Metric Unit", "")
        if knows(name, unit):
            _add(values, name, row.get("Metric Value", row.get("Average", "")), unit, where)
    for row, values in launches.values():
        yield _kernel(row, values)


def _add(values: _Values, name: str, cell: str, unit: str, where: str) -> None:
    value = number(cell, f"{where}: {name}")
    if value is not None:
        values[name] = (value, unit)


def _kernel(row: _Row, values: _Values) -> Counters:
    capability = re.fullmatch(r"(\d+)\.(\d)", row.get("CC", ""))
    return counters(
        row[KERNEL],
        values,
        grid=_dims(row.get("Grid Size", "")),
        block=_dims(row.get("Block Size", "")),
        gpu=row.get("device__attribute_display_name", ""),
        capability=10 * int(capability[1]) + int(capability[2]) if capability else None,
    )


def _dims(cell: str) -> tuple[int, ...]:
    """
    >>> _dims("(1024, 1, 1)")
    (1024, 1, 1)
    """
    match = re.fullmatch(r"\(\s*(\d+),\s*(\d+),\s*(\d+)\s*\)", cell.strip())
    return tuple(map(int, match.groups())) if match else ()

"""The device's time by line, in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublight import units
from sublight.pyprof.device import ELSEWHERE, DeviceProfile
from sublight.report.draw.tables import Fitting, plain
from sublight.report.pyprof.terminal import cut, escape

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDE, NARROW = 48, 26


def page(times: DeviceProfile, *, most: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    each = "the whole run" if times.whole_run else "1 step, which" if times.steps == 1 else f"{times.steps} steps, each"
    head = f"{each} takes the host {units.text(times.step_s, 's')}"
    if times.on_gpu:
        head += f" and the device {units.text(times.device_s, 's')}"
    else:
        head += "; no device in this trace: the host's ops by line"
    missing = next((line.device_s for line in times.lines if line.place == ELSEWHERE), 0.0)
    rows = [head]
    if times.device_s and missing > 0.01 * times.device_s:
        rows.append(
            f"{units.percent(missing / times.device_s)} of the device's time has no line: replayed, or not recorded"
        )
    if times.whole_run and [line.place for line in times.lines] == [ELSEWHERE]:
        rows.append("no step was found, and lines are taken in one: call sublight.step() at the end of each")
    looks = ("looks",) if any(line.seen_s for line in times.lines) else ()
    layouts: tuple[tuple[str, ...], ...] = (
        ("share", "device", "launches", "in ops", *looks, "line", "kernel"),
        ("share", "device", "launches", "in ops", "line", "kernel"),
        ("share", "device", "in ops", "line", "kernel"),
    )
    if not times.on_gpu:
        layouts = (("share", "in ops", *looks, "line"), ("share", "in ops", "line"))
    tables = Fitting(tuple(_table(times, most, columns) for columns in layouts))
    return Group(*(Text(row, style="" if at else "bold") for at, row in enumerate(rows)), Text(""), tables)


def _table(profile: DeviceProfile, most: int, columns: tuple[str, ...]) -> Table:
    out = plain(columns, right=("share", "device", "launches", "in ops", "looks"))
    wide = WIDE if "launches" in columns or not profile.on_gpu else NARROW
    whole_s = profile.device_s or sum(line.host_s for line in profile.lines) or 1.0
    for line in profile.lines[:most]:
        cells = {
            "share": units.percent((line.device_s if profile.device_s else line.host_s) / whole_s),
            "device": units.text(line.device_s, "s"),
            "launches": units.count(line.launches),
            "in ops": units.text(line.host_s, "s"),
            "looks": units.text(line.seen_s, "s") if line.seen_s else "–",
            "line": escape(cut(line.place, wide)),
            "kernel": escape(line.kernel if len(line.kernel) <= wide else f"{line.kernel[: wide - 1]}…"),
        }
        out.add_row(*(cells[name] for name in columns))
    return out

"""What a script's kernels did wrong on the CPU, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublight.report.xray.causes import cause_lines, causes
from sublight.xray.sanitize.run import Report

if TYPE_CHECKING:
    from rich.console import RenderableType


def page(report: Report) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    ordered = sorted(causes(report.findings), key=lambda cause: cause.lead.is_information)
    wrong = [cause for cause in ordered if not cause.lead.is_information]
    parts: list[RenderableType] = []
    for cause in ordered:
        parts += cause_lines(cause, of=cause.lead.kernel, indent=0)
    if report.failure:
        parts.append(Text(f"the script itself ended with {report.failure}", style="dim"))
    launches = f"{report.launches:,} launch{'' if report.launches == 1 else 'es'} of {', '.join(report.kernels)}"
    verdict = f"{len(wrong)} finding{'' if len(wrong) == 1 else 's'}" if wrong else "nothing wrong was found"
    if not report.is_whole:
        verdict = f"{verdict if wrong else 'nothing wrong'} until it stopped; the rest was not looked at"
    parts.append(Text(f"{launches}: {verdict}", style="bold green" if report.is_whole and not wrong else "bold"))
    return Group(*parts)

"""`sublight doctor`: what works here."""

from __future__ import annotations

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json


def doctor(json: Json = "") -> None:
    """What works here, what does not, and the fix for each."""
    from sublight import doctor as diagnosis
    from sublight.report import doctor as report

    checks = diagnosis.examine()
    cli_output.show(report.page(checks), report.to_json(checks), json)
    if diagnosis.broken(checks):
        raise typer.Exit(1)

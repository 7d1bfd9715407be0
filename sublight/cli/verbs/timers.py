"""`sublight timers`: what the clocks of this machine measure, cost and resolve."""

from __future__ import annotations

from sublight.cli import output as cli_output
from sublight.cli.options import Json


def timers(json: Json = "") -> None:
    """What clocks measure, cost and resolve here, and the mistakes with them."""
    from sublight.pyprof import timers as pyprof_timers
    from sublight.report.pyprof import timers as report

    cli_output.check_writable(json)
    clocks = pyprof_timers.clocks()
    cli_output.show(report.page(clocks), clocks.to_json(), json)

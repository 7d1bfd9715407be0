"""`%%pyprof` in a notebook: the cell's profile as a table, and its flame graph below."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from sublight.pyprof import block
from sublight.pyprof.recorder import Options
from sublight.report.draw import console
from sublight.report.pyprof import page, terminal


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"%%pyprof: {message}; it takes --trace or --counts, --rate HZ, --top N, --no-builtins")


def options(line: str) -> tuple[Options, int]:
    """
    >>> options("--trace --top 5")
    (Options(mode='trace', hz=100.0, builtins=True, events=100000), 5)
    """
    parser = _Parser(add_help=False)
    modes = parser.add_mutually_exclusive_group()
    for name in ("sample", "trace", "counts"):
        modes.add_argument(f"--{name}", dest="mode", action="store_const", const=name, default="sample")
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--top", type=int, default=terminal.FUNCTIONS)
    parser.add_argument("--no-builtins", dest="builtins", action="store_false")
    arguments = parser.parse_args(line.split())
    if not 0 < arguments.rate <= 10_000:
        parser.error(f"--rate {arguments.rate:g} is not between 0 and 10,000")
    return Options(mode=arguments.mode, hz=arguments.rate, builtins=arguments.builtins), arguments.top


def pyprof(shell: Any, line: str, cell: str) -> None:
    """What the cell raises is raised again, behind its profile."""
    try:
        wanted, top = options(line)
    except ValueError as refused:
        from IPython.core.error import UsageError

        raise UsageError(str(refused)) from None  # which is shown as one line
    source = shell.transform_cell(cell)
    name = shell.compile.cache(source)  # the shell's own name for it: its lines can be shown
    code = compile(source, name, "exec", dont_inherit=True)
    profile, error = block.run_code(code, shell.user_ns, wanted, command="this cell")
    console.stdout().print(terminal.page(profile, most=top))
    from IPython.display import HTML, display

    display(HTML(f"<div>{page.repr_html(profile)}</div>"))
    if error is not None:
        raise error

"""`sublight board`: a leaderboard of the exercises, for a class, a team, or everybody."""

from __future__ import annotations

from typing import Annotated

import typer

from sublight.cli import output as cli_output
from sublight.cli.options import Json
from sublight.errors import BadInput, one_of


def board(
    db: Annotated[
        str, typer.Option(metavar="FILE|URL", help="Where all is kept: a SQLite file, or postgresql://….")
    ] = "board.sqlite",
    add: Annotated[str | None, typer.Option(metavar="NAME", help="Make an account, print its token, and end.")] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0: any that is free.")] = 8080,
    graders: Annotated[int, typer.Option(metavar="N", help="Submissions that run at the same time.")] = 1,
    open_: Annotated[bool, typer.Option("--open", help="Anybody may make an account.")] = False,
    sandbox: Annotated[str, typer.Option(metavar="bubblewrap|namespaces", help="This one; else what works.")] = "",
    json: Json = "",
) -> None:
    """Serve a leaderboard: pages with ranking and distribution; every entry that is ranked was run here, in a sandbox.

    \b
    sublight board --add ann        an account, and its token
    sublight board                  serve; `sublight learn submit copy` sends entries
    """
    from sublight.cli import board as cli_board

    cli_output.check_writable(json)
    if json and add is None:
        raise BadInput("--json goes with --add: a server prints no result")
    if add is not None:
        return cli_board.add_account(db, add, json)
    if sandbox:
        one_of("sandbox", sandbox, ("bubblewrap", "namespaces"))
    cli_board.serve(db, host=host, port=port, graders=graders, is_open=open_, sandbox=sandbox)

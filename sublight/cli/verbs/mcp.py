"""`sublight mcp`: the other verbs as tools for an assistant."""

from __future__ import annotations

from typing import Annotated

import typer


def mcp(
    allow_run: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Scripts and kernels in this folder may be run; again for more."),
    ] = None,
    pages: Annotated[
        str, typer.Option(metavar="DIR", help="Where pages and whole results go; default: a new temporary folder.")
    ] = "",
    limit: Annotated[str, typer.Option(metavar="TIME", help="Of each tool's run, 90s or 10min.")] = "5min",
) -> None:
    """Offer limits, explain, bench, why, xray, predict and learn_check to an assistant, over stdin and stdout (MCP).

    Without --allow-run nothing of yours is run: traces, models, ops and compiled kernels are read.

    \b
    An assistant starts it itself, from a configuration such as
    {"mcpServers": {"sublight": {"command": "sublight", "args": ["mcp", "--allow-run", "/home/me/project"]}}}
    """
    from sublight.cli import mcp as cli_mcp

    cli_mcp.serve(allow_run or [], pages, limit)

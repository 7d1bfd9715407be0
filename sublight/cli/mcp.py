"""What `sublight mcp` does: a server of the Model Context Protocol on stdin and stdout, with the verbs as its tools."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight import __version__, units
from sublight.cli.mcp_tools import MAY_RUN, TOOLS, Tools
from sublight.errors import BadInput

if TYPE_CHECKING:
    from mcp.server import MCPServer

_INSTRUCTIONS = (
    "How far below a GPU's limits code runs, and why. Times are in seconds, fractions are of the limit; every result "
    "names a page for people and a file with the whole data, where there is one."
)


def serve(allow_run: list[str], pages: str, limit: str) -> None:
    """Serve until the assistant closes the connection."""
    tools = Tools(allowed=tuple(map(_folder, allow_run)), pages=_pages(pages), limit_s=_seconds(limit))
    server = server_of(tools)
    if sys.stdin.isatty():
        print("sublight: waiting for an assistant on stdin; Ctrl-C ends it", file=sys.stderr)
    server.run("stdio")


def server_of(tools: Tools) -> MCPServer[Any]:
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError:
        raise BadInput("this needs the package mcp, 2 or newer: pip install 'sublight[mcp]'") from None
    server: MCPServer[Any] = MCPServer("sublight", version=__version__, instructions=_INSTRUCTIONS, log_level="WARNING")
    for name in TOOLS:
        function = getattr(tools, name)
        hints = ToolAnnotations(read_only_hint=not (tools.allowed and name in MAY_RUN), open_world_hint=False)
        server.tool(name=name, description=function.__doc__, annotations=hints)(_as_tool(function))
    return server


def _as_tool(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a tool whose BadInput is a line for the assistant, not a traceback in the server's log."""
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(function)
    async def call(*args: Any, **words: Any) -> Any:
        try:
            return await function(*args, **words)
        except BadInput as error:
            raise ToolError(str(error)) from None

    return call


def _folder(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_dir():
        raise BadInput(f"--allow-run {name}: there is no such folder; name the one your scripts are in")
    return path.resolve()


def _pages(name: str) -> Path:
    if not name:
        return Path(tempfile.mkdtemp(prefix="sublight-mcp-"))
    path = Path(name).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise BadInput(f"--pages {name}: {error.strerror}; name a folder that can be written") from None
    return path.resolve()


def _seconds(words: str) -> float:
    try:
        return units.parse_seconds(words)
    except ValueError as error:
        raise BadInput(f"--limit: {error}") from None

"""`tilecast mcp`: serve forecasts to agents over the Model Context Protocol, on standard input and output."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilecast import __version__
from tilecast.cli import EXIT_OK
from tilecast.public.confinement import Permissions, confine
from tilecast.public.tools import Tool, call_tool, list_tools, warm_up
from tilecast.spec import SpecError

if TYPE_CHECKING:
    from mcp import types
    from mcp.server.lowlevel import Server

_INSTRUCTIONS = (
    "Forecasts of deep-learning training steps on GPU pools: seconds, memory and cost, before anything runs. Ask "
    "`fits` whether a job fits, `advise` which pool and plan to take, `forecast` for one plan on one pool, `queue` for "
    "many jobs, and `pools` for the nodes, links and prices that are assumed. Steps are seconds and come with a 90 % "
    "range: say it with the number. An error is one line that names the argument and the remedy."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Tools only read: files below --read, nodes of --context, and models of the Hub with --hub."
    parser.add_argument(
        "--read", metavar="FOLDER", action="append", default=[], help="a folder whose files tools may read; repeatable"
    )
    parser.add_argument(
        "--context",
        metavar="NAME",
        action="append",
        default=[],
        help="a context of kubectl whose nodes tools may read; repeatable",
    )
    parser.add_argument("--hub", action="store_true", help="let tools read models of the Hugging Face Hub")


def run(options: argparse.Namespace) -> int:
    try:
        import anyio
        from mcp.server.stdio import stdio_server
    except ImportError:
        raise SpecError("mcp", "needs the package mcp, which is not installed", "pip install 'tilecast[mcp]'") from None
    for folder in options.read:
        if not Path(folder).is_dir():
            raise SpecError("--read", f"{folder} is no folder", "name a folder that exists")
    folders = tuple(Path(os.path.realpath(folder)) for folder in options.read)
    server = _build_server(Permissions(folders, tuple(options.context), options.hub))

    async def serve() -> None:
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    if not options.hub:
        os.environ["HF_HUB_OFFLINE"] = "1"
    anyio.run(serve)
    return EXIT_OK


def _build_server(permissions: Permissions) -> Server[Any]:
    """Return an MCP server of the tools. They run in sequence, with the user's permissions."""
    import anyio
    from mcp import types
    from mcp.server.lowlevel import Server

    turn = anyio.Lock()

    async def list_all(_context: object, _request: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_describe_tool(tool, permissions) for tool in list_tools().values()])

    async def call(_context: object, request: types.CallToolRequestParams) -> types.CallToolResult:
        async with turn:
            return await anyio.to_thread.run_sync(
                partial(_build_tool_answer, request.name, request.arguments or {}, permissions)
            )

    return Server(
        "tilecast", version=__version__, instructions=_INSTRUCTIONS, on_list_tools=list_all, on_call_tool=call
    )


def _describe_tool(tool: Tool, permissions: Permissions) -> types.Tool:
    """Return a tool's name, purpose and arguments, without `context` if no kubectl context is allowed."""
    from mcp import types

    schema = tool.write_schema(without=() if permissions.contexts else ("context",))
    if "context" in schema["properties"]:
        schema["properties"]["context"] = {
            "description": "Instead of gpus: a cluster whose nodes are read.",
            "type": "string",
            "enum": list(permissions.contexts),
        }
    return types.Tool(
        name=tool.name,
        description=tool.description,
        input_schema=schema,
        annotations=types.ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
    )


def _build_tool_answer(name: str, given: dict[str, Any], permissions: Permissions) -> types.CallToolResult:
    """Return a tool's printed table and its JSON, or a one-line error."""
    from mcp import types

    try:
        if (context := given.get("context")) is not None and context not in permissions.contexts:
            raise SpecError("context", "is not allowed to this server", "start it with --context NAME")
        warm_up()
        with confine(permissions):
            document, text = call_tool(name, given)
    except SpecError as error:
        return types.CallToolResult(content=[types.TextContent(type="text", text=str(error))], is_error=True)
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], structured_content=document)

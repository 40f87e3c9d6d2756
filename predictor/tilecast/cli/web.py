"""`tilecast web`: serve a page to the local machine, on which a person tries jobs and pools."""

from __future__ import annotations

import argparse

from tilecast.cli import EXIT_OK
from tilecast.spec import SpecError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The page reads no file and opens no connection. It has no accounts: put a proxy with accounts before it."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a name by which browsers call it; repeatable"
    )
    parser.add_argument("--port", type=int, default=8765, help="port to listen on (default: 8765)")


def run(options: argparse.Namespace) -> int:
    try:
        import uvicorn

        from tilecast.web.server import build_app
    except ImportError:
        remedy = "pip install 'tilecast[web]'"
        raise SpecError("web", "needs the packages starlette and uvicorn, which are not installed", remedy) from None
    if not 0 < options.port < 65536:
        raise SpecError("--port", f"{options.port} is no port", "write a number from 1 to 65535")
    shown = f"[{options.host}]" if ":" in options.host else options.host
    hosts = ("localhost", "127.0.0.1", "[::1]", shown, *options.allow_host)
    print(f"http://{shown}:{options.port}/", flush=True)
    uvicorn.run(
        build_app(hosts),
        host=options.host,
        port=options.port,
        log_level="warning",
        limit_concurrency=256,
        timeout_keep_alive=5,
        server_header=False,
    )
    return EXIT_OK

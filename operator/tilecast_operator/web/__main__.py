"""Serve pages about the cluster, and write nothing.

    python -m tilecast_operator.web [--allow-host NAME]...

Address, port and the limit of a request are the settings of the operator. The credentials are those of the pod, or a
kubeconfig's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import kopf

from tilecast.spec import SpecError
from tilecast_operator import recursion, server
from tilecast_operator.kube import credentials
from tilecast_operator.objects.client import client
from tilecast_operator.settings import Settings, from_environment
from tilecast_operator.web.searches import FormSearches
from tilecast_operator.web.server import start_server
from tilecast_operator.web.watches import ClusterState

log = logging.getLogger("tilecast")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. See the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tilecast_operator.web", description="Serve pages about the cluster, and write nothing."
    )
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a name by which browsers call it; repeatable"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    recursion.set_recursion_limit()
    try:
        settings = from_environment(os.environ)
        asyncio.run(_serve(settings, tuple(options.allow_host)))
    except (SpecError, kopf.LoginError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


async def _serve(settings: Settings, hosts: tuple[str, ...]) -> None:
    """Serve until a signal ends the process.

    Raises:
        SpecError: there are no credentials.
    """
    login_arguments: dict[str, Any] = {"settings": kopf.OperatorSettings(), "logger": log}

    def log_in() -> Any:
        return credentials.to_connection(credentials.read_credentials(login_arguments))

    if log_in() is None:
        raise SpecError("KUBECONFIG", "there are no credentials", "run it in the cluster, or set KUBECONFIG")
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    api, searches = client(settings.request_timeout_s), FormSearches()
    state = ClusterState(api)
    api.log_in(log_in)
    tasks = [asyncio.create_task(state.watch(), name="watches"), asyncio.create_task(searches.load(), name="load")]
    address = server.ListenAddress(settings.listen_host, settings.listen_port)
    listening = await start_server(address, state, searches, hosts)
    log.info("listening on port %d", listening.port)
    waiting = asyncio.create_task(ended.wait(), name="signal")
    try:
        # Without its watches the process has nothing to show; a new one may do better.
        await asyncio.wait({waiting, tasks[0]}, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        waiting.cancel()
        for task in tasks:
            task.cancel()
        searches.stop()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.gather(*tasks)
        await listening.cleanup()
        await api.close()


if __name__ == "__main__":
    sys.exit(main())

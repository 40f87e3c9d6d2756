"""The one HTTP server: /metrics, /healthz, /readyz."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

Check = Callable[[], str | None]
"""Says what is wrong, or None."""


async def start(host: str, port: int, registry: CollectorRegistry, healthy: Check, ready: Check) -> web.AppRunner:
    """Serve until `cleanup()` of the returned runner."""

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    application = web.Application()
    application.router.add_get("/metrics", metrics)
    application.router.add_get("/healthz", _probe(healthy))
    application.router.add_get("/readyz", _probe(ready))
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


def _probe(check: Check) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def probe(_: web.Request) -> web.StreamResponse:
        problem = check()
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    return probe

"""The one HTTP server: /metrics, /healthz, /readyz, and PUT /observations/{namespace}/{name}."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from tilecast_operator.observed.reports import MAX_BODY_BYTES, Refused

BODY_S = 10.0
"""A report that takes longer to arrive is no report: whoever sends a byte a minute holds no connection."""

Check = Callable[[], str | None]
"""Says what is wrong, or None."""
Take = Callable[[str, str, str, bytes], Awaitable[None]]
"""Takes namespace and name of a job, the token and the body of a report; raises Refused."""


async def start(
    host: str, port: int, registry: CollectorRegistry, healthy: Check, ready: Check, take: Take
) -> web.AppRunner:
    """Serve until `cleanup()` of the returned runner."""

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    async def observation(request: web.Request) -> web.Response:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip() if kind.lower() == "bearer" else ""
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        try:
            named = request.match_info
            await take(named["namespace"], named["name"], token, body)
        except Refused as refused:
            return web.json_response({"outcome": refused.outcome, "message": str(refused)}, status=refused.status)
        return web.json_response({"outcome": "accepted"}, status=202)

    application = web.Application(client_max_size=MAX_BODY_BYTES)
    application.router.add_put("/observations/{namespace}/{name}", observation)
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

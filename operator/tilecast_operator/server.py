"""The HTTP server of the operator: /metrics, /healthz, /readyz, and PUT /observations/{namespace}/{name}."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from tilecast.spec import SpecError
from tilecast_operator.observed.reports import MAX_BODY_BYTES, RefusedReport

IDLE_S = 75.0
"""Seconds for which a connection is kept between requests."""
ANY = "::"
"""Host that stands for every address of IPv4 and IPv6."""

Check = Callable[[], str | None]
"""Function that returns a problem, or None."""
ScoreReport = Callable[[str, str, str, bytes], Awaitable[None]]
"""Function that takes a job's namespace and name, and a report's token and body. It may raise RefusedReport."""
AdmitReport = Callable[[str, str, str], AbstractContextManager[None]]
"""Function that takes a client's address, a namespace and a token. It raises RefusedReport to refuse a report."""

FindClientAddress = Callable[[web.Request], str]
"""Function that returns the address of the client that sent a report."""

ForwardReport = Callable[[web.Request, bytes], Awaitable[web.Response | None]]
"""Function that returns the response of another replica to a report, or None if this replica must handle it.

It may raise RefusedReport.
"""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits on the connections and requests of clients."""

    body_s: float = 10.0
    """Seconds within which a report must arrive. So a client that sends a byte a minute cannot hold a connection."""
    request_s: float = 10.0
    """Seconds within which a TLS handshake, or the first whole request of a connection, must be complete."""
    connections: int = 1024
    closed_at_once: int = 64
    """Number of idle connections, least recently used first, to close when there are too many connections.

    So a client that opens many connections blocks no probe and no other client.
    """
    renew_s: float = 30.0
    """Seconds between two checks of the certificate's file."""
    served_after_s: float = 120.0
    """Seconds for which a renewed certificate must be in its file before it is served.

    By then it has reached every replica, so each trusts it before it meets it.
    """


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Address on which to listen, with host, port, TLS files and limits on clients."""

    host: str
    port: int
    certificate: str = ""
    key: str = ""
    limits: ClientLimits = field(default_factory=ClientLimits)


class HttpServer:
    """HTTP server that serves until `cleanup` is called."""

    def __init__(self, runner: web.AppRunner, address: ListenAddress) -> None:
        self._runner = runner
        self._address, self._limits = address, address.limits
        self._unused: set[asyncio.BaseProtocol] = set()
        """Connections without a whole request so far."""
        self._idle: dict[web.RequestHandler, None] = {}
        """Connections without a current request, the most recently used last. Some may be closed by now."""
        self._server: asyncio.Server | None = None
        self._renewal: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """TCP port that the server listens on."""
        return 0 if self._server is None else int(self._server.sockets[0].getsockname()[1])

    @web.middleware
    async def handle_as_used(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Handle a request, and mark its connection as in use meanwhile."""
        connection = request.protocol
        self._unused.discard(connection)
        self._idle.pop(connection, None)
        try:
            return await handler(request)
        finally:
            self._idle[connection] = None

    async def start(self) -> None:
        """Start to listen.

        Raises:
            SpecError: the certificate cannot be read.
        """
        tls = None
        if self._address.certificate:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._renewal = asyncio.create_task(
                self._renew_certificate(tls, self._load_certificate(tls)), name="certificate"
            )
        self._server = await asyncio.get_running_loop().create_server(
            self._accept_connection,
            sock=_open_listening_socket(self._address.host, self._address.port),
            ssl=tls,
            ssl_handshake_timeout=self._limits.request_s if tls else None,
        )

    async def cleanup(self) -> None:
        """Close all connections."""
        if self._renewal is not None:
            self._renewal.cancel()
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _accept_connection(self) -> asyncio.BaseProtocol:
        serve = self._runner.server
        if serve is None or (len(serve.connections) >= self._limits.connections and not self._close_idle()):
            return _RefusingProtocol()
        connection = serve()
        self._unused.add(connection)
        self._idle[connection] = None
        if len(self._idle) > 2 * self._limits.connections:
            opened = set(serve.connections)
            self._idle = {one: None for one in self._idle if one in opened or one is connection}
        asyncio.get_running_loop().call_later(self._limits.request_s, self._close_unused, connection)
        return connection

    def _close_idle(self) -> bool:
        """Close some connections that have no request in progress. Return whether any was closed."""
        closed = 0
        while self._idle and closed < self._limits.closed_at_once:
            connection = next(iter(self._idle))
            del self._idle[connection]
            if connection.transport is not None:
                connection.transport.abort()
                closed += 1
        return closed > 0

    def _close_unused(self, connection: web.RequestHandler) -> None:
        if connection in self._unused:
            self._unused.discard(connection)
            if connection.transport is not None:
                connection.transport.abort()

    def _load_certificate(self, tls: ssl.SSLContext) -> tuple[int, int]:
        files = Path(self._address.certificate), Path(self._address.key)
        try:
            times = tuple(path.stat().st_mtime_ns for path in files)
            tls.load_cert_chain(*files)
        except (OSError, ssl.SSLError) as error:
            text = f"the certificate cannot be read: {error}"
            raise SpecError("TILECAST_TLS_CERTIFICATE", text, "mount a Secret of type kubernetes.io/tls") from None
        return times[0], times[1]

    async def _renew_certificate(self, tls: ssl.SSLContext, loaded: tuple[int, int]) -> None:
        """Load a renewed certificate for new connections. If it cannot be read, try again later."""
        files = Path(self._address.certificate), Path(self._address.key)
        newest, since_s = loaded, time.monotonic()
        while True:
            await asyncio.sleep(self._limits.renew_s)
            with suppress(OSError, SpecError):
                times = files[0].stat().st_mtime_ns, files[1].stat().st_mtime_ns
                if times != newest:
                    newest, since_s = times, time.monotonic()
                if times != loaded and time.monotonic() - since_s >= self._limits.served_after_s:
                    loaded = self._load_certificate(tls)


class _RefusingProtocol(asyncio.Protocol):
    """Protocol that closes a connection at once, because there are too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the connection."""
        transport.close()


async def _forward_nothing(_: web.Request, __: bytes) -> None:
    """Return None, which means that this replica handles the report itself."""


def _get_remote_address(request: web.Request) -> str:
    return request.remote or ""


async def start_server(
    address: ListenAddress,
    registry: CollectorRegistry,
    find_health_problem: Check,
    find_readiness_problem: Check,
    admit_report: AdmitReport,
    compare_report: ScoreReport,
    forward_report: ForwardReport = _forward_nothing,
    find_client_address: FindClientAddress = _get_remote_address,
) -> HttpServer:
    """Start a server. It serves until its `cleanup()` is called."""

    async def serve_metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    async def receive_observation(request: web.Request) -> web.Response:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip() if kind.lower() == "bearer" else ""
        job = request.match_info
        try:
            with admit_report(find_client_address(request), job["namespace"], token):
                try:
                    async with asyncio.timeout(address.limits.body_s):
                        body = await request.read()
                except TimeoutError:
                    raise web.HTTPRequestTimeout from None
                answer = await forward_report(request, body)
                if answer is not None:
                    return answer
                await compare_report(job["namespace"], job["name"], token, body)
        except RefusedReport as refused:
            headers = {} if refused.retry_after_s is None else {"Retry-After": str(refused.retry_after_s)}
            refusal = {"outcome": refused.outcome, "message": str(refused)}
            return web.json_response(refusal, status=refused.status, headers=headers)
        return web.json_response({"outcome": "accepted"}, status=202)

    application = web.Application(client_max_size=MAX_BODY_BYTES)
    application.router.add_put("/observations/{namespace}/{name}", receive_observation)
    application.router.add_get("/metrics", serve_metrics)
    application.router.add_get("/healthz", _make_probe_handler(find_health_problem))
    application.router.add_get("/readyz", _make_probe_handler(find_readiness_problem))
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=IDLE_S)
    server = HttpServer(runner, address)
    application.middlewares.append(server.handle_as_used)
    await runner.setup()
    await server.start()
    return server


def _open_listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. `ANY` means IPv4 and IPv6 if this machine has both."""
    if host == ANY:
        with suppress(OSError, ValueError):
            return socket.create_server((ANY, port), family=socket.AF_INET6, dualstack_ipv6=True)
        host = "0.0.0.0"  # noqa: S104
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _make_probe_handler(check: Check) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def probe(_: web.Request) -> web.StreamResponse:
        problem = check()
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    return probe

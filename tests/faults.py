"""A reverse proxy before a real API server that injects faults: refusals, broken connections, garbled watches.

Answers that no hook replaces are the API server's own. The proxy runs in its own thread and calls its hooks there.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml
from aiohttp import web
from yarl import URL

from cluster import Cluster

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
CALL_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Call:
    """A request of the operator."""

    method: str
    resource: str
    """Plural name, with the subresource, such as `trainingjobs/status`; empty where the path names none."""
    name: str
    is_watch: bool

    @property
    def is_write(self) -> bool:
        return self.method not in ("GET", "HEAD")

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and bool(self.resource) and not self.name and not self.is_watch

    @classmethod
    def of(cls, request: web.Request) -> Call:
        match request.path.strip("/").split("/"):
            case ["api", _, *rest] | ["apis", _, _, *rest]:
                pass
            case _:
                rest = []
        if len(rest) > 2 and rest[0] == "namespaces":
            rest = rest[2:]
        plural, name, sub = [*rest, "", "", ""][:3]
        is_watch = request.query.get("watch") in ("1", "true")
        return cls(request.method, f"{plural}/{sub}" if sub else plural, name, is_watch)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that replaces the API server's; status 0 breaks the connection without an answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": self.status, "message": "injected"}
        return json.dumps(status).encode()


DROP = Answer(0)


def error_event(code: int) -> bytes:
    """Return a watch event that ends a watch."""
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "injected"}
    return json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"


class Proxy:
    """Forwards everything to the API server of `cluster`, with the caller's own credentials.

    Attributes:
        before: called for each request before it is forwarded; its result is the answer, or None to forward.
        after: called when the API server has answered a request other than a watch; its result replaces the answer.
        events: called for each line of a watch; returns the lines to send in its place.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.before: Callable[[Call], Answer | None]
        self.after: Callable[[Call], Answer | None]
        self.events: Callable[[Call, bytes], Iterable[bytes]]
        self.behave()
        self.url = ""
        self._cluster = cluster
        self._server, self._tls = cluster.server(), cluster.tls()
        self._watches: dict[web.StreamResponse, tuple[Call, asyncio.Task[Any]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def behave(self) -> None:
        """Let everything pass from now on."""
        self.before = self.after = lambda asked: None
        self.events = lambda asked, line: (line,)

    def kubeconfig(self, account: Path, folder: Path) -> Path:
        """Return a copy of the kubeconfig `account` that goes through this proxy."""
        config = yaml.safe_load(account.read_text())
        config["clusters"][0]["cluster"] = {"server": self.url}
        path = folder / "proxied.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def cut(self, resource: str, last: bytes = b"") -> int:
        """Break every watch of a resource after a last line, and return how many there were."""

        async def end() -> int:
            watches = [(out, task) for out, (asked, task) in self._watches.items() if asked.resource == resource]
            for out, task in watches:
                if last:
                    await out.write(last)
                task.cancel()
            return len(watches)

        return self._call(end())

    def __enter__(self) -> Self:
        self._thread.start()
        self.url = self._call(self._serve())
        return self

    def __exit__(self, *raised: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT_S)

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_TIMEOUT_S)

    async def _serve(self) -> str:
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        self._client = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        application = web.Application(client_max_size=16 * 2**20)
        application.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _close(self) -> None:
        for _, task in self._watches.values():
            task.cancel()
        await self._runner.cleanup()
        await self._client.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        asked, body = Call.of(request), await request.read()
        if (wrong := self.before(asked)) is not None:
            return _spoiled(request, wrong)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        target = URL(self._server + request.raw_path, encoded=True)
        try:
            async with self._client.request(request.method, target, data=body or None, headers=headers) as answer:
                passed = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
                passed.pop("Content-Encoding", None)
                if asked.is_watch and answer.status == 200:
                    return await self._stream(request, asked, answer, passed)
                content = await answer.read()
                if (wrong := self.after(asked)) is not None:
                    return _spoiled(request, wrong)
                return web.Response(status=answer.status, body=content, headers=passed)
        except aiohttp.ClientError:
            return _spoiled(request, DROP)

    async def _stream(
        self, request: web.Request, asked: Call, answer: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        out = web.StreamResponse(headers=headers)
        await out.prepare(request)

        async def pump() -> None:
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    for event in self.events(asked, line + b"\n"):
                        await out.write(event)

        task = asyncio.ensure_future(pump())
        self._watches[out] = asked, task
        try:
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                raise aiohttp.ClientPayloadError from error
        finally:
            task.cancel()
            self._watches.pop(out, None)
        return _spoiled(request, DROP) if task.cancelled() else out


def _spoiled(request: web.Request, answer: Answer) -> web.StreamResponse:
    if answer.status == 0:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=502)
    headers = {"Content-Type": "application/json", **answer.headers}
    return web.Response(status=answer.status, body=answer.body, headers=headers)

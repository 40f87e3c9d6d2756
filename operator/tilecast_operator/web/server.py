"""Serve the pages by HTTP. Only GET is allowed, except for the form that tries a job, which changes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from importlib import resources

from aiohttp import web

from tilecast.spec import SpecError
from tilecast.web.answers import Form, describe_error
from tilecast.web.form_answers import (
    BODY_S,
    HEADERS,
    MAX_BODY_BYTES,
    BusyError,
    make_length_error,
    make_slowness_error,
    parse_form,
)
from tilecast.web.page import EXAMPLE, write_error, write_style
from tilecast_operator.server import IDLE_S, HttpServer, ListenAddress
from tilecast_operator.web import pages
from tilecast_operator.web.pages import PageQuery
from tilecast_operator.web.searches import FormSearches
from tilecast_operator.web.watches import ClusterState

KEPT_S = 1.0
"""Seconds that a page is kept after it was written."""
MOST_PAGES = 64
"""Most different pages that wait or are kept."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""Names by which browsers may call in any case, as behind `kubectl port-forward`."""
_PAGES: dict[str, Callable[[ClusterState, PageQuery, float], str]] = {
    "/": pages.write_pools,
    "/jobs": pages.write_jobs,
    "/job": pages.write_single_job,
    "/forecasts": pages.write_forecasts,
    "/queue": pages.write_queue,
}
_PROBES = ("/healthz", "/readyz")
_HTML = "text/html; charset=utf-8"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def start_server(
    address: ListenAddress, state: ClusterState, searches: FormSearches, hosts: tuple[str, ...]
) -> HttpServer:
    """Start a server of the pages, which serves until its `cleanup()`.

    Args:
        address: address on which to listen.
        state: objects of the cluster.
        searches: searches that answer the form.
        hosts: names by which browsers may call it, besides `LOCAL_HOSTS`. Others are refused, since a stranger's page
            could use a name of its own to read these pages.
    """
    allowed = {name.lower() for name in (*LOCAL_HOSTS, *hosts)}

    @web.middleware
    async def check_host(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path not in _PROBES and _strip_port(request.headers.get("Host", "")).lower() not in allowed:
            raise web.HTTPBadRequest(text="this name is not allowed; an administrator adds it to web.hosts")
        return await handler(request)

    async def show_form(_: web.Request) -> web.Response:
        return _make_page(pages.write_play(state, None, "", time.time()))

    async def show_form_with_answer(request: web.Request) -> web.Response:
        status, text, form = await _answer_form_request(request, searches)
        return _make_page(pages.write_play(state, form, text, time.time()), status)

    async def show_answer(request: web.Request) -> web.Response:
        status, text, _ = await _answer_form_request(request, searches)
        return _make_page(text, status)

    async def show_style(_: web.Request) -> web.Response:
        return web.Response(text=write_style() + pages.STYLE, content_type="text/css")

    async def show_script(_: web.Request) -> web.Response:
        text = (resources.files("tilecast.web") / "static" / "page.js").read_text(encoding="utf-8")
        return web.Response(text=text, content_type="text/javascript")

    async def show_health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def show_readiness(_: web.Request) -> web.Response:
        is_read = state.is_read
        return web.Response(text="ok" if is_read else "the first lists are not read", status=200 if is_read else 503)

    async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)
        response.headers.popall("Server", None)

    application = web.Application(client_max_size=MAX_BODY_BYTES)
    application.on_response_prepare.append(add_headers)
    writer = PageWriter(state)
    for path in _PAGES:
        application.router.add_get(path, _make_page_handler(writer, path))
    application.router.add_get("/play", _redirect_to_form)
    application.router.add_get("/play/", show_form)
    application.router.add_post("/play/", show_form_with_answer)
    application.router.add_post("/play/answer", show_answer)
    application.router.add_get("/play/page.css", show_style)
    application.router.add_get("/play/page.js", show_script)
    application.router.add_get(_PROBES[0], show_health)
    application.router.add_get(_PROBES[1], show_readiness)
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=IDLE_S)
    server = HttpServer(runner, address)
    application.middlewares.extend((server.handle_as_used, check_host))
    await runner.setup()
    await server.start()
    return server


class PageWriter:
    """Writer of pages, one after another in a thread, so that probes and other requests are answered meanwhile.

    A page is cached for `KEPT_S` seconds, or until the API server goes away or comes back. Equal requests share it.
    Belongs to one event loop.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._turn = asyncio.Lock()
        self._pages: dict[tuple[object, ...], asyncio.Task[bytes]] = {}

    async def write(self, path: str, query: PageQuery) -> bytes:
        """Return a page.

        Raises:
            web.HTTPServiceUnavailable: too many different pages are waiting or cached.
        """
        key = (path, query, self._state.is_read, *(table.problem for table in self._state.tables))
        task = self._pages.get(key)
        if task is None:
            if len(self._pages) >= MOST_PAGES:
                raise web.HTTPServiceUnavailable(text="many pages wait; try again in some seconds")
            task = self._pages[key] = asyncio.create_task(self._write(path, query))
            loop = asyncio.get_running_loop()
            task.add_done_callback(lambda _: loop.call_later(KEPT_S, self._pages.pop, key))
        return await asyncio.shield(task)

    async def _write(self, path: str, query: PageQuery) -> bytes:
        async with self._turn:
            text = await asyncio.to_thread(_PAGES[path], self._state, query, time.time())
            # A character that UTF-8 cannot encode comes from an escape in JSON.
            return text.encode(errors="replace")


def _make_page_handler(writer: PageWriter, path: str) -> _Handler:
    async def show(request: web.Request) -> web.Response:
        query = PageQuery.from_values(request.query.get("q", ""), request.query.get("page", ""))
        return web.Response(body=await writer.write(path, query), headers={"Content-Type": _HTML})

    return show


async def _redirect_to_form(_: web.Request) -> web.Response:
    return web.Response(status=308, headers={"Location": "play/"})


def _make_page(text: str, status: int = 200) -> web.Response:
    return web.Response(body=text.encode(errors="replace"), status=status, headers={"Content-Type": _HTML})


async def _answer_form_request(request: web.Request, searches: FormSearches) -> tuple[int, str, Form]:
    """Return the HTTP status, the answer as HTML, and the form that a request contains."""
    form = EXAMPLE
    try:
        form = await _read_form(request)
        return *await searches.find(form), form
    except SpecError as error:
        return 400, write_error(describe_error(error)), form
    except BusyError as error:
        return 503, write_error(str(error)), form


async def _read_form(request: web.Request) -> Form:
    """Return the form in the body of a request.

    Raises:
        SpecError: the body is too long, comes too slowly, or is not a form.
    """
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise make_length_error() from None
    except TimeoutError:
        raise make_slowness_error() from None
    return parse_form(body)


def _strip_port(host: str) -> str:
    """Return the name of a Host header without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host

"""Serve the page to the local machine.

Answers are computed in another process, one at a time, so that a long search neither blocks the page nor uses the
server's memory. Requests wait in a bounded queue. When it is full, further requests are told to try again.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import asynccontextmanager
from importlib import resources
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from tilecast.public.tools import warm_up
from tilecast.spec import SpecError
from tilecast.web.answers import Form, describe_error, write_answer
from tilecast.web.page import EXAMPLE, write_error, write_page, write_style

MAX_BODY_BYTES = 128 * 1024
"""Largest body of a request, in bytes."""
BODY_S = 10.0
"""Seconds within which a request's body must arrive."""
ANSWER_S = 120.0
"""Seconds after which a search is stopped and its process replaced."""
MOST_WAITING = 16
"""Most requests that wait for a search or have one running."""
MOST_CACHED = 256
"""Most answers that are cached."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class BusyError(Exception):
    """Error that the queue of searches is full, or that a search took too long."""


class Answers:
    """Cached answers to forms, computed in sequence by a separate process."""

    def __init__(self) -> None:
        self._pool = self._start_pool()
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._kept: OrderedDict[Form, tuple[int, str]] = OrderedDict()

    @staticmethod
    def _start_pool() -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=warm_up)
        # A first task starts the process, so that the first visitor does not wait for it.
        pool.submit(int)
        return pool

    async def find(self, form: Form) -> tuple[int, str]:
        """Return the HTTP status and the HTML of the answer to a form.

        Raises:
            BusyError: too many requests wait, or the search took longer than `ANSWER_S`.
        """
        if form in self._kept:
            self._kept.move_to_end(form)
            return self._kept[form]
        if self._waiting >= MOST_WAITING:
            raise BusyError("many searches wait; try again in some seconds")
        self._waiting += 1
        try:
            async with self._turn:
                if form not in self._kept:
                    self._keep(form, await self._compute(form))
                return self._kept[form]
        finally:
            self._waiting -= 1

    async def _compute(self, form: Form) -> tuple[int, str]:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.get_running_loop().run_in_executor(self._pool, answer, form)
        except (TimeoutError, BrokenExecutor):
            self.stop()
            self._pool = self._start_pool()
            raise BusyError("the search took too long or needed too much memory; offer fewer GPUs") from None

    def _keep(self, form: Form, found: tuple[int, str]) -> None:
        self._kept[form] = found
        while len(self._kept) > MOST_CACHED:
            self._kept.popitem(last=False)

    def stop(self) -> None:
        """End the search process, even during a search."""
        for process in multiprocessing.active_children():
            process.terminate()
        self._pool.shutdown(wait=False, cancel_futures=True)


def answer(form: Form) -> tuple[int, str]:
    """Return the HTTP status and the HTML of the answer to a form. Runs in the search process."""
    try:
        return 200, write_answer(form)
    except SpecError as error:
        return 400, write_error(describe_error(error))


async def read_form(request: Request) -> Form:
    """Return the form in a request's body.

    Raises:
        SpecError: the body is too long, arrives too slowly, or is no form.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise SpecError("form", f"has more than {MAX_BODY_BYTES:,} bytes", "paste less")
    except (TimeoutError, ClientDisconnect):
        raise SpecError("form", f"did not arrive within {BODY_S:g} s", "send it again") from None
    try:
        return Form.from_values(dict(parse_qsl(body.decode(), max_num_fields=50)))
    except (UnicodeDecodeError, ValueError):
        raise SpecError("form", "cannot be read", "use the page") from None


def build_app(hosts: tuple[str, ...]) -> Starlette:
    """Return the web application.

    Args:
        hosts: host names under which browsers may call it. Others are refused, because a stranger's page could use
            them.
    """

    @asynccontextmanager
    async def run_searches(app: Starlette) -> AsyncIterator[None]:
        app.state.answers = Answers()
        yield
        app.state.answers.stop()

    async def show_page(_: Request) -> Response:
        return HTMLResponse(write_page(EXAMPLE), headers=HEADERS)

    async def show_answer(request: Request) -> Response:
        status, text, _ = await _find(request)
        return HTMLResponse(text, status, headers=HEADERS)

    async def show_page_with_answer(request: Request) -> Response:
        status, text, form = await _find(request)
        return HTMLResponse(write_page(form, text), status, headers=HEADERS)

    async def _find(request: Request) -> tuple[int, str, Form]:
        form = EXAMPLE
        try:
            form = await read_form(request)
            return *await request.app.state.answers.find(form), form
        except SpecError as error:
            return 400, write_error(str(error)), form
        except BusyError as error:
            return 503, write_error(str(error)), form

    async def show_style(_: Request) -> Response:
        return PlainTextResponse(write_style(), headers=HEADERS, media_type="text/css")

    async def show_script(_: Request) -> Response:
        text = (resources.files("tilecast.web") / "static" / "page.js").read_text(encoding="utf-8")
        return PlainTextResponse(text, headers=HEADERS, media_type="text/javascript")

    routes = [
        Route("/", show_page, methods=["GET"]),
        Route("/", show_page_with_answer, methods=["POST"]),
        Route("/answer", show_answer, methods=["POST"]),
        Route("/page.css", show_style, methods=["GET"]),
        Route("/page.js", show_script, methods=["GET"]),
    ]
    trusted = Middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)
    return Starlette(routes=routes, middleware=[trusted], lifespan=run_searches)

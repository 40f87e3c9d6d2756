"""Serve the page to the local machine.

Answers are computed in another process, one at a time, so that a long search neither blocks the page nor uses the
server's memory. Requests wait in a bounded queue. When it is full, further requests are told to try again.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import asynccontextmanager
from importlib import resources

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from tilecast.public.tools import warm_up
from tilecast.spec import SpecError
from tilecast.web.answers import Form
from tilecast.web.form_answers import (
    BODY_S,
    HEADERS,
    MAX_BODY_BYTES,
    Answer,
    AnswerQueue,
    BusyError,
    answer_form,
    make_length_error,
    make_slowness_error,
    parse_form,
)
from tilecast.web.page import EXAMPLE, write_error, write_page, write_style

ANSWER_S = 120.0
"""Seconds after which a search is stopped and its process replaced."""
MOST_CACHED = 256
"""Most answers that are cached."""


class FormAnswers:
    """Cached answers to forms, computed in sequence by a separate process."""

    def __init__(self) -> None:
        self._pool = self._start_pool()
        self.find = AnswerQueue(self._compute, MOST_CACHED).find

    @staticmethod
    def _start_pool() -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=warm_up)
        # A first task starts the process, so that the first visitor does not wait for it.
        pool.submit(int)
        return pool

    async def _compute(self, form: Form) -> Answer:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.get_running_loop().run_in_executor(self._pool, answer_form, form)
        except (TimeoutError, BrokenExecutor):
            self.stop()
            self._pool = self._start_pool()
            raise BusyError("the search took too long or needed too much memory; offer fewer GPUs") from None

    def stop(self) -> None:
        """End the search process, even during a search."""
        for process in multiprocessing.active_children():
            process.terminate()
        self._pool.shutdown(wait=False, cancel_futures=True)


async def read_form(request: Request) -> Form:
    """Return the form in a request's body.

    Raises:
        SpecError: the body is too long, arrives too slowly, or is not a form.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise make_length_error()
    except (TimeoutError, ClientDisconnect):
        raise make_slowness_error() from None
    return parse_form(bytes(body))


def build_app(hosts: tuple[str, ...]) -> Starlette:
    """Return the web application.

    Args:
        hosts: host names under which browsers may call the application. Other names are refused, because a stranger's
            page could use them.
    """

    @asynccontextmanager
    async def run_searches(app: Starlette) -> AsyncIterator[None]:
        app.state.answers = FormAnswers()
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

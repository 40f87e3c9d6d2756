"""Read the page's form from a request, and answer forms one after another, for any server.

`tilecast_operator.web` serves the same form beside the operator, with another server and another kind of process.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias
from urllib.parse import parse_qsl

from tilecast.spec import SpecError
from tilecast.web.answers import Form, describe_error, write_answer
from tilecast.web.page import write_error

MAX_BODY_BYTES = 128 * 1024
"""Largest body of a request, in bytes."""
BODY_S = 10.0
"""Seconds within which a request's body must arrive."""
MOST_WAITING = 16
"""Most requests that wait for a search or have one running."""
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
)
"""Headers of every answer."""
Answer: TypeAlias = tuple[int, str]
"""HTTP status and HTML."""


class BusyError(Exception):
    """Error that the queue of searches is full, or that a search broke a limit."""


class AnswerQueue:
    """Cached answers to forms, computed in sequence. Belongs to one event loop.

    Args:
        compute: function that computes the answer to a form. It may raise BusyError.
        most_cached: most answers that are cached.
    """

    def __init__(self, compute: Callable[[Form], Awaitable[Answer]], most_cached: int) -> None:
        self._compute = compute
        self._most_cached = most_cached
        self._waiting = 0
        self._cached: OrderedDict[Form, Answer] = OrderedDict()
        self.turn = asyncio.Lock()
        """Lock that is held while an answer is computed."""

    async def find(self, form: Form) -> Answer:
        """Return the answer to a form, from the cache or else when its turn comes.

        Raises:
            BusyError: too many requests wait, or the search broke a limit.
        """
        if form in self._cached:
            self._cached.move_to_end(form)
            return self._cached[form]
        if self._waiting >= MOST_WAITING:
            raise BusyError("many searches wait; try again in some seconds")
        self._waiting += 1
        try:
            async with self.turn:
                if form not in self._cached:
                    self._cache_answer(form, await self._compute(form))
                return self._cached[form]
        finally:
            self._waiting -= 1

    def _cache_answer(self, form: Form, answer: Answer) -> None:
        self._cached[form] = answer
        while len(self._cached) > self._most_cached:
            self._cached.popitem(last=False)


def answer_form(form: Form) -> Answer:
    """Return the answer to a form. Runs in the search process."""
    try:
        return 200, write_answer(form)
    except SpecError as error:
        return 400, write_error(describe_error(error))


def parse_form(body: bytes) -> Form:
    """Return the form in the body of a request.

    Raises:
        SpecError: the body is not a form, or its values are too long.
    """
    try:
        values = dict(parse_qsl(body.decode(), max_num_fields=50))
    except ValueError:
        raise SpecError("form", "cannot be read", "use the page") from None
    return Form.from_values(values)


def make_length_error() -> SpecError:
    """Return the error for a body of more than `MAX_BODY_BYTES`."""
    return SpecError("form", f"has more than {MAX_BODY_BYTES:,} bytes", "paste less")


def make_slowness_error() -> SpecError:
    """Return the error for a body that does not arrive within `BODY_S`."""
    return SpecError("form", f"did not arrive within {BODY_S:g} s", "send it again")

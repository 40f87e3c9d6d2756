"""Answer the form of `tilecast web` in a process of its own, one search at a time, with limits of time and memory."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from functools import cache

from tilecast import environment
from tilecast.public.tools import warm_up
from tilecast.spec import SpecError
from tilecast.web.answers import Form, describe_error, write_answer
from tilecast.web.page import write_error
from tilecast_operator.search_process import SearchInterruptedError, SearchLimits, SearchProcess

LIMITS = SearchLimits(60.0, 640)
MOST_WAITING = 16
"""Most requests that wait for their search, or have it running."""
MOST_KEPT = 32
"""Most answers that are kept."""


class BusyError(Exception):
    """Too many searches wait, or a search broke a limit."""


@cache
def prepare() -> None:
    """Use the links and the utilization model that the environment names, and load what a search needs."""
    environment.apply_environment(os.environ)
    warm_up()


def answer_form(form: Form | None) -> tuple[int, str]:
    """Return the HTTP status and the HTML of the answer to a form. For None, only load what a search needs."""
    prepare()
    if form is None:
        return 200, ""
    try:
        return 200, write_answer(form)
    except SpecError as error:
        return 400, write_error(describe_error(error))


class Searches:
    """Answers to forms, computed one after another. Belongs to one event loop."""

    def __init__(self, limits: SearchLimits = LIMITS) -> None:
        self._process = SearchProcess(answer_form, limits)
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._kept: OrderedDict[Form, tuple[int, str]] = OrderedDict()

    async def load(self) -> None:
        """Load what a search needs, so that the first visitor does not wait for it."""
        async with self._turn:
            await asyncio.to_thread(self._process.call_function, None)

    async def find(self, form: Form) -> tuple[int, str]:
        """Return the HTTP status and the HTML of the answer to a form.

        Raises:
            BusyError: too many requests wait, or the search broke a limit.
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
                    self._keep(form, await asyncio.to_thread(self._process.call_function, form))
                return self._kept[form]
        except SearchInterruptedError as error:
            raise BusyError(f"the search {error}; offer fewer GPUs") from None
        finally:
            self._waiting -= 1

    def _keep(self, form: Form, found: tuple[int, str]) -> None:
        self._kept[form] = found
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def stop(self) -> None:
        """End the process, also in the middle of a search."""
        self._process.stop()

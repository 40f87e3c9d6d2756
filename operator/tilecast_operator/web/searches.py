"""Answer the form of `tilecast web` in a process of its own, one search at a time, with limits of time and memory."""

from __future__ import annotations

import asyncio
import os
from functools import cache

from tilecast import environment
from tilecast.public.tools import warm_up
from tilecast.web.answers import Form
from tilecast.web.form_answers import Answer, AnswerQueue, BusyError, answer_form
from tilecast_operator.search_process import SearchInterruptedError, SearchLimits, SearchProcess

LIMITS = SearchLimits(60.0, 640)
MOST_KEPT = 32
"""Most answers that are kept."""


@cache
def prepare() -> None:
    """Use the links and the utilization model that the environment names, and load what a search needs."""
    environment.apply_environment(os.environ)
    warm_up()


def answer_or_load(form: Form | None) -> Answer:
    """Return the answer to a form. For None, only load what a search needs."""
    prepare()
    return (200, "") if form is None else answer_form(form)


class FormSearches:
    """Answers to forms, computed one after another. Belongs to one event loop."""

    def __init__(self, limits: SearchLimits = LIMITS) -> None:
        self._process = SearchProcess(answer_or_load, limits)
        self._queue = AnswerQueue(self._compute, MOST_KEPT)

    async def load(self) -> None:
        """Load what a search needs, so that the first visitor does not wait for it."""
        async with self._queue.turn:
            await asyncio.to_thread(self._process.call_function, None)

    async def find(self, form: Form) -> Answer:
        """Return the answer to a form.

        Raises:
            BusyError: too many requests wait, or the search broke a limit.
        """
        return await self._queue.find(form)

    async def _compute(self, form: Form) -> Answer:
        try:
            return await asyncio.to_thread(self._process.call_function, form)
        except SearchInterruptedError as error:
            raise BusyError(f"the search {error}; offer fewer GPUs") from None

    def stop(self) -> None:
        """End the process, also in the middle of a search."""
        self._process.stop()

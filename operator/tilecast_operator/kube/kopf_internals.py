"""Replacements of internals of kopf. `tests/test_kopf.py` fails when kopf changes them.

Four problems cannot be solved with kopf's public names:

- kopf's watch ends the process when the API server refuses a list, or ends a watch with an error other than 410. It
never
  reports an object that was deleted while nobody watched, and it trusts the server to lose no event. `watch_forever`
  replaces it: it lists objects again, and removes whatever is missing from a list.
- kopf's set of toggles wakes the task of every object for every object of the first list, which takes minutes for
  thousands of nodes (`docs/kopf.md`). `Toggles` replaces it.
- kopf does not report when it restarts a watch, which is the only sign of life of a cluster where nothing happens.
  `add_response_callback` reports it.
- kopf logs the kinds that are not installed at every change of a CRD. `OncePerMessageFilter` passes each such message
  once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from kopf._cogs.aiokits import aiotoggles
from kopf._cogs.clients import api, errors, watching
from kopf._core.reactor import observation

Event: TypeAlias = Any
"""A dict with `type` (None for an object of a list) and `object`, or the marker for the end of the list."""
Watch: TypeAlias = Callable[..., AsyncIterator[Event]]
Request: TypeAlias = Callable[..., Awaitable[Any]]

BACKOFF_FIRST_S = 0.5
BACKOFF_MOST_S = 10.0

log = logging.getLogger("tilecast")


class EndlessBackoffs:
    """Endless, growing waits between attempts of a request, in seconds."""

    def __iter__(self) -> Iterator[float]:
        wait_s = BACKOFF_FIRST_S
        while True:
            yield wait_s
            wait_s = min(2 * wait_s, BACKOFF_MOST_S)


def watch_forever(
    watch: Watch,
    list_end: object,
    failures: tuple[type[Exception], ...],
    relist_s: float,
    empty_deep_parts: Callable[[Event], object],
    reread_first_s: float = 1.0,
    repeats_s: Sequence[float] = (2.0, 10.0, 60.0),
) -> Watch:
    """Return a replacement of kopf's watch that logs a failure and ends normally. The caller must start it again.

    Args:
        watch: function that lists objects and then follows them. Its arguments are `resource`, `namespace` and others.
        list_end: marker that `watch` yields after the last object of its list.
        failures: errors that end one watch, but not the process.
        relist_s: seconds for which a list is trusted. A later event ends the watch.
        empty_deep_parts: function that empties the parts of an event that are nested too deep, in place.
        reread_first_s: seconds before objects are listed again after an error. It doubles as long as no list succeeds.
        repeats_s: delays, in seconds, after which each change of a CRD is reported again.
    """
    everything: dict[object, dict[str, dict[str, Any]]] = {}
    failed: Counter[object] = Counter()

    async def watch_until_failure(**kwargs: Any) -> AsyncIterator[Event]:
        place = kwargs.get("resource"), kwargs.get("namespace")
        known = everything.setdefault(place, {})
        there: set[str] | None = set()
        ends_s = time.monotonic() + relist_s
        try:
            async with (
                aclosing(watch(**kwargs)) as single,  # type: ignore[type-var]
                aclosing(repeat_crd_events(single, repeats_s)) as events,
            ):
                async for event in events:
                    if event is list_end and there is not None:
                        for uid in known.keys() - there:
                            yield {"type": "DELETED", "object": known.pop(uid)}
                        there = None
                        failed.pop(place, None)
                    elif isinstance(event, dict):
                        # Cut the object before anybody walks it, kopf included: it may be nested 10,000 deep.
                        empty_deep_parts(event)
                        _track_object(event, known, there)
                    yield event
                    if there is None and time.monotonic() > ends_s:
                        return
        except failures as error:
            log.warning("%s: %s; reading them anew", kwargs.get("resource"), error or type(error).__name__)
            await asyncio.sleep(min(reread_first_s * 2 ** min(failed[place], 16), BACKOFF_MOST_S))
            failed[place] += 1

    return watch_until_failure


def add_response_callback(request: Request, on_response: Callable[[str], None]) -> Request:
    """Wrap `request` so that it calls `on_response` whenever the API server begins to answer a watch.

    Args:
        request: function that sends a request. It returns once the API server answers, and raises if it refuses.
        on_response: function to call with the plural name of the resource.
    """

    async def request_and_report(method: str, url: str, **kwargs: Any) -> Any:
        response = await request(method, url, **kwargs)
        parts = urlsplit(url)
        if "watch=true" in parts.query.split("&"):
            on_response(parts.path.rpartition("/")[2])
        return response

    return request_and_report


async def repeat_crd_events(events: AsyncIterator[Event], waits_s: Sequence[float]) -> AsyncGenerator[Event, None]:
    """Yield all events, and repeat each change of a CRD after each of `waits_s`, in seconds.

    At such an event kopf asks what the API server serves. That may be a moment before the API server serves a new CRD.
    Without a repetition, kopf would never see the objects of the CRD.
    """
    due: list[tuple[float, int, Event]] = []
    order, pending = itertools.count(), None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(events, _OVER))
            wait_s = max(0.0, due[0][0] - time.monotonic()) if due else None
            done, _ = await asyncio.wait({pending}, timeout=wait_s)
            if not done:
                yield heapq.heappop(due)[2]
                continue
            event, pending = pending.result(), None
            if event is _OVER:
                return
            if isinstance(event, dict) and event["type"] and event["object"].get("kind") == "CustomResourceDefinition":
                for later_s in waits_s:
                    heapq.heappush(due, (time.monotonic() + later_s, next(order), event))
            yield event
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)


_OVER = object()


def _track_object(event: dict[str, Any], known: dict[str, dict[str, Any]], there: set[str] | None) -> None:
    """Update the record of existing objects. It has the names that are needed to report a deletion later."""
    body = event["object"]
    metadata = body.get("metadata") or {}
    uid = metadata.get("uid")
    if uid is None:
        return
    if event["type"] == "DELETED":
        known.pop(uid, None)
        return
    if there is not None:
        there.add(uid)
    # kopf reads the spec of a deleted CRD, which is not kept.
    if uid not in known and body.get("kind") != "CustomResourceDefinition":
        names = {key: metadata[key] for key in ("name", "namespace", "uid") if key in metadata}
        known[uid] = {"apiVersion": body.get("apiVersion"), "kind": body.get("kind"), "metadata": names}


FAILURES = (errors.APIError, watching.WatchingError, ValueError, RecursionError)
"""Errors that end one watch, but not the process."""


class Toggles(aiotoggles.ToggleSet):
    """kopf's set of toggles, except that waiting tasks wake only when the state of the set changes."""

    async def make_toggle(self, value: bool = False, /, *, name: str | None = None) -> aiotoggles.Toggle:
        """Return a new toggle of the set."""
        toggle = aiotoggles.Toggle(value, name=name, condition=self._condition)
        await self._change_toggles(lambda: self._toggles.add(toggle))
        return toggle

    async def drop_toggle(self, toggle: aiotoggles.Toggle) -> None:
        """Remove a toggle from the set."""
        await self._change_toggles(lambda: self._toggles.discard(toggle))

    async def _change_toggles(self, act: Callable[[], None]) -> None:
        async with self._condition:
            before = self.is_on()
            act()
            if self.is_on() != before:
                self._condition.notify_all()


class OncePerMessageFilter(logging.Filter):
    """Log filter that passes every message once.

    At every change of a CRD, kopf looks again for the kinds to watch, and logs those that the cluster does not serve.
    """

    def __init__(self) -> None:
        super().__init__()
        self._texts: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True the first time that a message is logged, and False later."""
        text = record.getMessage()
        is_new = text not in self._texts
        self._texts.add(text)
        return is_new


def install_replacements(
    relist_s: float, on_response: Callable[[str], None], empty_deep_parts: Callable[[Event], object]
) -> None:
    """Install all replacements of kopf's internals in this process.

    Args:
        relist_s: seconds for which a list is trusted.
        on_response: function to call with the resource whenever the API server begins to answer a watch of it.
        empty_deep_parts: function that empties the parts of an event that are nested too deep, in place.
    """
    api.request = add_response_callback(api.request, on_response)  # type: ignore[assignment]
    watching.continuous_watch = watch_forever(
        watching.continuous_watch, watching.Bookmark.LISTED, FAILURES, relist_s, empty_deep_parts
    )
    aiotoggles.ToggleSet = Toggles  # type: ignore[misc]
    observation.logger.addFilter(OncePerMessageFilter())

"""The only module that touches what kopf does not publish; `tests/test_kopf.py` fails on the day kopf changes it.

Two things cannot be had through kopf's public names. Its watch ends the process when the API server refuses a list or
ends a watch in an error other than 410, and tells of no object that was deleted while nobody watched: `enduring` takes
its place. And its set of toggles wakes the task of every object for every object of the first list, which takes minutes
for thousands of nodes (`docs/operations.md`): `Toggles` takes its place.
"""

from __future__ import annotations

from collections.abc import Callable

from kopf._cogs.aiokits import aiotoggles
from kopf._cogs.clients import errors, watching

from tilecast_operator.cluster.informer import enduring

FAILURES = (errors.APIError, watching.WatchingError, ValueError, RecursionError)
"""What ends one watch and not the process."""


class Toggles(aiotoggles.ToggleSet):
    """Wakes those who wait for its state when the state changes."""

    async def make_toggle(self, value: bool = False, /, *, name: str | None = None) -> aiotoggles.Toggle:
        """A new toggle of the set."""
        toggle = aiotoggles.Toggle(value, name=name, condition=self._condition)
        await self._change(lambda: self._toggles.add(toggle))
        return toggle

    async def drop_toggle(self, toggle: aiotoggles.Toggle) -> None:
        """Take a toggle out of the set."""
        await self._change(lambda: self._toggles.discard(toggle))

    async def _change(self, act: Callable[[], None]) -> None:
        async with self._condition:
            before = self.is_on()
            act()
            if self.is_on() != before:
                self._condition.notify_all()


def install(relist_s: float) -> None:
    """Put both in their places; `relist_s` is how long a list is trusted."""
    watching.continuous_watch = enduring(watching.continuous_watch, watching.Bookmark.LISTED, FAILURES, relist_s)
    aiotoggles.ToggleSet = Toggles  # type: ignore[misc]

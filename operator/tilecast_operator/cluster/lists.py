"""Whether the cache holds what the API server counts: a first list that is not over, or a watch that went silent,
would leave no other trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from tilecast_operator.cluster.api import UNREACHABLE, Api, ApiError
from tilecast_operator.cluster.cache import CacheTable
from tilecast_operator.cluster.kinds import KINDS
from tilecast_operator.cluster.view import Document

LISTING_PAUSE_S = 30.0
"""A first list is taken to be over after so long without a new object, whatever the API server counts."""
UNCOUNTED_PAUSE_S = 10.0
"""The same where it counts nothing, as of nodes that a selector chooses."""


class ListCheck:
    """Counts what the API server has of some kinds.

    Args:
        client: of the API server.
        tables: by kind; those of `first` make the first list.
        first: kinds without which nothing can be done.
        uncounted: kinds that a selector chooses, so that their number says nothing.
    """

    def __init__(
        self, client: Api, tables: Mapping[str, CacheTable[Any]], first: tuple[str, ...], uncounted: tuple[str, ...]
    ) -> None:
        self._client = client
        self._tables = tables
        self._first = [kind for kind in first if kind in tables]
        self._uncounted = uncounted
        self._is_complete = False
        self._versions: dict[str, int] = {}
        """The newest resource version that the API server has said, by resource."""
        self._went_back = ""
        """How it has gone back; empty where it has not."""
        self._differs_since: dict[str, float] = {}
        self._difference: dict[str, str] = {}

    async def is_complete(self) -> bool:
        """Whether everything has been seen once: as much as the API server counts, or, where it counts none or more
        come and go than can be counted, all that came before a long pause."""
        if self._is_complete:
            return True
        seen = {kind: len(self._tables[kind]) for kind in self._first}
        there = {kind: await self._count(kind) for kind in self._first}
        is_short = any(count is not None and count != seen[kind] for kind, count in there.items())
        paused_s = time.monotonic() - max(table.last_new_s for table in self._tables.values())
        pause_s = LISTING_PAUSE_S if is_short else UNCOUNTED_PAUSE_S
        is_counted = None not in there.values()
        self._is_complete = (is_counted and not is_short) or paused_s > pause_s
        return self._is_complete

    async def is_whole(self, kind: str, seen: int) -> bool:
        """Whether the API server counts as many objects of a kind as were seen."""
        return await self._count(kind) == seen

    async def compare(self, interval_s: float) -> None:
        """Compare the two now and then, for ever."""
        while True:
            await asyncio.sleep(interval_s)
            for kind, table in self._tables.items():
                there, here, resource = await self._count(kind), len(table), KINDS[kind].plural
                if there is None or there == here:
                    self._differs_since.pop(resource, None)
                else:
                    self._difference[resource] = f"the API server has {there} objects, {here} were seen"
                    self._differs_since.setdefault(resource, time.monotonic())

    def stale(self, limit_s: float) -> str | None:
        """Which watch has differed for longer, and how. One of a store that went back will never tell what is there:
        that counts at once."""
        if self._went_back:
            return self._went_back
        for resource, since_s in self._differs_since.items():
            if time.monotonic() - since_s > limit_s:
                return f"the watch of {resource} is stale: {self._difference[resource]}"
        return None

    async def _count(self, kind: str) -> int | None:
        """How many objects the API server has; None where it does not say."""
        try:
            page = await self._client.get(KINDS[kind].path(), {"limit": "1"})
        except (ApiError, *UNREACHABLE):
            return None
        self._note_version(KINDS[kind].plural, str((page.get("metadata") or {}).get("resourceVersion", "")))
        return None if kind in self._uncounted else _total(page)

    def _note_version(self, resource: str, text: str) -> None:
        """Take note of the version of a list. Those of one store only grow, unless it is restored from a snapshot."""
        if not text.isdigit():
            return
        version, before = int(text), self._versions.get(resource, 0)
        if version < before:
            self._went_back = f"the store of {resource} was restored: it is at {version}, and was at {before}"
        self._versions[resource] = max(version, before)


def _total(page: Document) -> int | None:
    """How many objects a list has of which one page was read."""
    metadata, items = page.get("metadata") or {}, page.get("items") or ()
    if not metadata.get("continue"):
        return len(items)
    left = metadata.get("remainingItemCount")
    return None if left is None else len(items) + int(left)

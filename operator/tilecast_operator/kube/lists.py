"""Compare the number of cached objects with the number on the API server.

Nothing else shows that a first list is incomplete, or that a watch has stalled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilecast_operator.kube.cache import CacheTable
from tilecast_operator.kube.client import UNREACHABLE, Api, ApiError
from tilecast_operator.kube.kinds import Document, Kinds


@dataclass(eq=False)
class ListCheck:
    """Comparison of object counts on the API server with those in the cache.

    Args:
        client: client of the API server.
        tables: tables by kind.
        first: kinds that must be listed before the operator can work.
        uncounted: kinds that a selector limits, so that the API server's count says nothing.
        kinds: cache of the API groups and kinds that the API server serves.
        pause_s: seconds without a new object after which the first list counts as complete, whatever the API server
            counts.
        uncounted_pause_s: like `pause_s`, if the API server gives no count.
    """

    client: Api
    tables: Mapping[str, CacheTable[Any]]
    first: tuple[str, ...]
    uncounted: tuple[str, ...]
    kinds: Kinds
    pause_s: float
    uncounted_pause_s: float

    def __post_init__(self) -> None:
        self._is_complete = False
        self._versions: dict[str, int] = {}
        """Newest resource version that the API server has reported, by resource."""
        self._went_back = ""
        """Message on how a resource version fell. Empty if none did."""
        self._differs_since: dict[str, float] = {}
        self._difference: dict[str, str] = {}

    async def is_first_list_complete(self) -> bool:
        """Return whether the cache has every object of the kinds in `first`.

        It becomes True once the object counts of cache and API server agree. If the API server gives no count or the
        counts never agree, it becomes True after a long pause without a new object.
        """
        if self._is_complete:
            return True
        seen = {kind: len(self.tables[kind]) for kind in self.first if kind in self.tables}
        there = {kind: await self._count_on_server(kind) for kind in seen}
        is_short = any(count is not None and count != seen[kind] for kind, count in there.items())
        paused_s = time.monotonic() - max(table.last_new_s for table in self.tables.values())
        pause_s = self.pause_s if is_short else self.uncounted_pause_s
        is_counted = None not in there.values()
        self._is_complete = (is_counted and not is_short) or paused_s > pause_s
        return self._is_complete

    async def has_seen_all(self, kind: str, cached_count: int) -> bool:
        """Return whether the API server counts exactly `cached_count` objects of a kind."""
        return await self._count_on_server(kind) == cached_count

    async def compare_counts(self, interval_s: float) -> None:
        """Compare the counts every `interval_s` seconds, without end."""
        while True:
            await asyncio.sleep(interval_s)
            for kind, table in self.tables.items():
                there, here, resource = await self._count_on_server(kind), len(table), self.kinds[kind].plural
                if there is None or there == here:
                    self._differs_since.pop(resource, None)
                else:
                    self._difference[resource] = f"the API server has {there} objects, {here} were seen"
                    self._differs_since.setdefault(resource, time.monotonic())

    def find_stale_watch(self, limit_s: float) -> str | None:
        """Return a message about a watch that misses objects, or None.

        A watch misses objects if cache and API server have had different counts for longer than `limit_s` seconds, or
        if etcd was restored from a snapshot.
        """
        if self._went_back:
            return self._went_back
        for resource, since_s in self._differs_since.items():
            if time.monotonic() - since_s > limit_s:
                return f"the watch of {resource} is stale: {self._difference[resource]}"
        return None

    async def _count_on_server(self, kind: str) -> int | None:
        """Return the number of objects of a kind on the API server, or None if the server does not give it."""
        try:
            page = await self.client.get(self.kinds[kind].path(), {"limit": "1"})
        except (ApiError, *UNREACHABLE):
            return None
        self._check_version(self.kinds[kind].plural, str((page.get("metadata") or {}).get("resourceVersion", "")))
        return None if kind in self.uncounted else _count_listed_objects(page)

    def _check_version(self, resource: str, text: str) -> None:
        """Check that the resource version of a list has not fallen.

        It falls only if etcd was restored from a snapshot.
        """
        if not text.isdigit():
            return
        version, before = int(text), self._versions.get(resource, 0)
        if version < before:
            self._went_back = f"the store of {resource} was restored: it is at {version}, and was at {before}"
        self._versions[resource] = max(version, before)


def _count_listed_objects(page: Document) -> int | None:
    """Return the length of a whole list from one of its pages, or None if the page does not give it."""
    metadata, items = page.get("metadata") or {}, page.get("items") or ()
    if not metadata.get("continue"):
        return len(items)
    left = metadata.get("remainingItemCount")
    return None if left is None else len(items) + int(left)

"""Controller of quarantined objects. It writes Events, sets metrics, and reads the objects again when due."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.client import UNREACHABLE, ApiError
from tilecast_operator.kube.documents import EventContent
from tilecast_operator.kube.kinds import Key
from tilecast_operator.kube.lease import NotLeaderError
from tilecast_operator.objects.kinds import KINDS, complete_item
from tilecast_operator.outcome import INPUT_QUARANTINED

log = logging.getLogger("tilecast")

LOOK_S = 5.0
"""Seconds between two checks."""


class QuarantineController:
    """Controller of quarantined objects, which may have crashed the operator. Belongs to one event loop."""

    def __init__(self, context: SharedContext) -> None:
        self._context = context
        self._posted: dict[Key, str] = {}
        self._shown: set[str] = set()
        context.cache.quarantine.changed = self._show_counts

    async def run_checks(self) -> None:
        """Check the quarantined objects every `LOOK_S` seconds, until cancelled."""
        while True:
            await self.check_objects()
            await asyncio.sleep(LOOK_S)

    async def check_objects(self) -> None:
        """Write an Event about every quarantined object, and read again those whose next try is due."""
        quarantine = self._context.cache.quarantine
        for key in quarantine.list_due_keys():
            await self._reload_object(key)
        held = list(quarantine.iterate_quarantined())
        self._posted = {key: self._posted[key] for key, _, _ in held if key in self._posted}
        for key, uid, text in held:
            if self._posted.get(key) != text:
                try:
                    await self._context.writer.post_event(key, uid, EventContent("Warning", INPUT_QUARANTINED, text))
                    self._posted[key] = text
                except (ApiError, NotLeaderError, *UNREACHABLE) as error:
                    log.info("%s: Event not written yet: %s", key, error or type(error).__name__)

    async def _reload_object(self, key: Key) -> None:
        """Read a quarantined object from the API server into the cache."""
        path, query = KINDS[key.kind].path(key.namespace), {"fieldSelector": f"metadata.name={key.name}"}
        try:
            items = (await self._context.client.get(path, query)).get("items") or ()
        except (ApiError, *UNREACHABLE) as error:
            log.warning("%s: cannot be read again: %s", key, error or type(error).__name__)
            return
        self._posted.pop(key, None)
        cache = self._context.cache
        cache.table(key).forget_object(key)
        if not items:
            cache.quarantine.remove_object(key)
        for item in items:
            cache.put_object(complete_item(key.kind, item))

    def _show_counts(self, counts: Counter[str]) -> None:
        """Set the metric that counts quarantined objects of each kind."""
        for kind in self._shown - counts.keys():
            self._context.metrics.quarantined.labels(kind).set(0)
        for kind, count in counts.items():
            self._context.metrics.quarantined.labels(kind).set(count)
        self._shown |= counts.keys()

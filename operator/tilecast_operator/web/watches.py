"""Watch the objects that the pages show, and record since when the API server has been away."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from tilecast.api import gpu_pool, queue_advice, training_job
from tilecast.api.fields import Document
from tilecast_operator.kube.client import Api
from tilecast_operator.kube.watch import PACE, Informer, WatchDelays
from tilecast_operator.objects.kinds import KINDS
from tilecast_operator.web.rows import JobRow, PoolRow, QueueRow

RowT = TypeVar("RowT")

MOST_OBJECTS = 20_000
"""Most objects of a kind that are kept. The pages say how many are not."""
_STATUS = re.compile(r"([1-5][0-9]{2}):")

log = logging.getLogger("tilecast")


class TableWatch(Informer, Generic[RowT]):
    """List and watch of all objects of a kind. It stores a row of each object. Belongs to one event loop.

    Args:
        api: the client.
        kind: name of the kind.
        read: function that returns the row of an object.
        pace: waits between requests.
        most: largest number of objects that are stored.
    """

    def __init__(
        self,
        api: Api,
        kind: str,
        read: Callable[[Document], RowT],
        pace: WatchDelays = PACE,
        most: int = MOST_OBJECTS,
    ) -> None:
        super().__init__(api, KINDS[kind].path(), {}, self._record_answer, pace)
        self.plural = KINDS[kind].plural
        self._read, self._most = read, most
        self._rows: dict[tuple[str, str], RowT] = {}
        self._listed: dict[tuple[str, str], RowT] = {}
        self._left_out_of_list = 0
        self.left_out = 0
        """Objects that are not kept, because there are too many."""
        self.is_read = False
        """Whether a first list was read."""
        self.heard_s: float | None = None
        """Unix time at which the API server last said something; None before."""
        self.problem = ""
        """What is wrong since `heard_s`; empty while the API server answers."""

    def list_rows(self) -> list[RowT]:
        """Return the rows, sorted by namespace and name."""
        # `sorted` copies the items at once, so that another thread may ask while the event loop changes the table.
        return [row for _, row in sorted(self._rows.items(), key=lambda item: item[0])]

    def __len__(self) -> int:
        return len(self._rows)

    def _record_answer(self) -> None:
        self.heard_s, self.problem = time.time(), ""

    def _begin_list(self) -> None:
        self._listed, self._left_out_of_list = {}, 0

    def _add_listed(self, item: Document) -> None:
        if len(self._listed) < self._most:
            self._listed[_get_key(item)] = self._read(item)
        else:
            self._left_out_of_list += 1

    def _end_list(self) -> None:
        self._rows, self._listed, self.left_out = self._listed, {}, self._left_out_of_list
        self.is_read = True

    def _read_version_of_unchanged_object(self, line: bytes) -> str:
        self._record_answer()
        return ""

    def _apply_change(self, kind: str, item: Document, line: bytes) -> None:
        key = _get_key(item)
        if kind == "DELETED":
            if self._rows.pop(key, None) is None:
                self.left_out = max(self.left_out - 1, 0)
        elif key in self._rows or len(self._rows) < self._most:
            self._rows[key] = self._read(item)
        elif kind == "ADDED":
            self.left_out += 1

    def _on_failure(self, why: str) -> None:
        log.warning("%s: %s; the pages show what was read before", self.plural, why)
        refused = _STATUS.match(why)
        self.problem = f"answers with status {refused[1]}" if refused else "does not answer"


def _get_key(item: Document) -> tuple[str, str]:
    metadata = item["metadata"]
    return str(metadata.get("namespace", "")), str(metadata["name"])


class ClusterState:
    """All objects that the pages show. Belongs to one event loop."""

    def __init__(self, api: Api, pace: WatchDelays = PACE, most: int = MOST_OBJECTS) -> None:
        self.pools = TableWatch(api, gpu_pool.KIND, PoolRow.from_object, pace, most)
        self.jobs = TableWatch(api, training_job.KIND, JobRow.from_object, pace, most)
        self.queues = TableWatch(api, queue_advice.KIND, QueueRow.from_object, pace, most)

    @property
    def tables(self) -> tuple[TableWatch[PoolRow], TableWatch[JobRow], TableWatch[QueueRow]]:
        """All tables."""
        return self.pools, self.jobs, self.queues

    @property
    def is_read(self) -> bool:
        """Whether every first list was read."""
        return all(table.is_read for table in self.tables)

    async def watch(self) -> None:
        """List and watch until the task is cancelled."""
        async with asyncio.TaskGroup() as group:
            for table in self.tables:
                group.create_task(table.run(), name=table.plural)

"""The GPUs that pods hold, by node: a list and a watch of its own, which keeps two numbers of each GPU pod.

A framework would keep something of every pod of the cluster; here a pod without GPUs leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tilecast_operator.cluster.api import Api, ApiError
from tilecast_operator.free_gpus import requested

log = logging.getLogger("tilecast")

PATH = "/api/v1/pods"
QUERY = {"fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"}
PAGE = 200
WATCH_S = 300
RETRY_S = 5.0
PACE_S = 0.5
"""Between requests that ended as they may, so that a proxy which ends each at once is not flooded."""


class PodInformer:
    """Reads pods until it is cancelled; calls `changed` with GPUs by node, or with None while they are not known."""

    def __init__(self, api: Api, changed: Callable[[Mapping[str, int] | None], None]) -> None:
        self._api = api
        self._changed = changed
        self._held: dict[str, tuple[str, int]] = {}
        """Node and GPUs of each pod that has some, by uid."""

    async def run(self) -> None:
        """List, watch, and begin again when the watch ends."""
        while True:
            try:
                version = await self._list()
                self._tell()
                while True:
                    version = await self._watch(version)
                    await asyncio.sleep(PACE_S)
            except Exception as error:
                is_expired = isinstance(error, ApiError) and error.status == 410
                if not is_expired:
                    why = str(error) or type(error).__name__
                    log.warning("pods: %s; what is free is not known until they are read again", why)
                    self._changed(None)
                await asyncio.sleep(PACE_S if is_expired else RETRY_S)

    async def _list(self) -> str:
        held: dict[str, tuple[str, int]] = {}
        query = {**QUERY, "limit": str(PAGE)}
        while True:
            page = await self._api.get(PATH, query)
            for pod in page.get("items") or ():
                if gpus := requested(pod):
                    held[pod["metadata"]["uid"]] = (pod["spec"]["nodeName"], gpus)
            onward = page["metadata"].get("continue")
            if not onward:
                self._held = held
                return str(page["metadata"].get("resourceVersion", ""))
            query["continue"] = onward

    async def _watch(self, version: str) -> str:
        """Follow the changes until the server ends the answer; returns where to go on.

        Raises:
            ApiError: the version is too old, or the server refuses.
        """
        query = {**QUERY, "watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version}
        query["timeoutSeconds"] = str(WATCH_S)
        async for line in self._api.lines(PATH, query, idle_s=WATCH_S + 30.0):
            event = json.loads(line)
            pod = event.get("object") or {}
            if event.get("type") == "ERROR":
                raise ApiError(int(pod.get("code") or 500), str(pod.get("message", ""))[:200])
            version = str(pod["metadata"].get("resourceVersion", version))
            if event.get("type") != "BOOKMARK":
                self._take(event["type"], pod)
        return version

    def _take(self, kind: str, pod: Mapping[str, Any]) -> None:
        uid, gpus = pod["metadata"]["uid"], requested(pod)
        before = self._held.get(uid)
        now = (str(pod["spec"].get("nodeName", "")), gpus) if gpus and kind != "DELETED" else None
        if before == now:
            return
        if now is None:
            self._held.pop(uid, None)
        else:
            self._held[uid] = now
        self._tell()

    def _tell(self) -> None:
        used: Counter[str] = Counter()
        for node, gpus in self._held.values():
            used[node] += gpus
        self._changed(used)

"""List and watch nodes and pods, which change thousands of times a minute.

kopf would store state for every pod of the cluster and parse every heartbeat of every node. Here the bytes of a
heartbeat are compared with the previous ones, and parsed only if they differ in more than their times.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tilecast_operator.kube.client import Api, ApiError, compute_retry_wait_s, list_pages
from tilecast_operator.kube.kinds import Document

log = logging.getLogger("tilecast")

PAGE = 200
WATCH_S = 300


@dataclass(frozen=True, slots=True)
class WatchDelays:
    """Waits between an informer's requests, in seconds."""

    relist_s: float = 3600.0
    """Seconds for which a list is trusted."""
    between_s: float = 0.5
    """Wait after a request that ended normally. So a proxy that ends every request at once is not flooded."""
    retry_first_s: float = 0.5
    retry_most_s: float = 5.0
    """Longest wait after an error; `retry_first_s` is the first."""


PACE = WatchDelays()


class Informer(ABC):
    """List and watch of one resource, repeated until its task is cancelled.

    Args:
        api: the client.
        path: path of the list.
        query: parameters that select objects of the list.
        on_response: function to call after each successful list or watch request.
        pace: waits between requests.
    """

    def __init__(
        self, api: Api, path: str, query: Mapping[str, str], on_response: Callable[[], None], pace: WatchDelays
    ) -> None:
        self._api = api
        self._path = path
        self._query = query
        self._on_answer = on_response
        self._pace = pace

    async def run(self) -> None:
        """List and watch objects. List again after a while, or after an error."""
        await self._api.wait_for_login()
        attempt = 0
        while True:
            try:
                ends_s = time.monotonic() + self._pace.relist_s
                version = await self._list()
                attempt = 0
                while time.monotonic() < ends_s:
                    version = await self._watch(version)
                    await asyncio.sleep(self._pace.between_s)
            except Exception as error:
                is_expired = isinstance(error, ApiError) and error.status == 410
                attempt += 1
                if not is_expired:
                    self._on_failure(str(error) or type(error).__name__)
                pace = self._pace
                again_s = compute_retry_wait_s(attempt, error, pace.retry_first_s, pace.retry_most_s)
                await asyncio.sleep(pace.between_s if is_expired else again_s)

    async def _list(self) -> str:
        self._begin_list()
        async for page in list_pages(self._api, self._path, self._query, PAGE):
            for item in page.get("items") or ():
                self._add_listed(item)
            version = str(page["metadata"].get("resourceVersion", ""))
        self._on_answer()
        self._end_list()
        return version

    async def _watch(self, version: str) -> str:
        """Apply the changes of a watch until the server ends it. Return the resource version for the next watch.

        Raises:
            ApiError: the version is too old, or the server refuses.
        """
        query = {**self._query, "watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version}
        query["timeoutSeconds"] = str(WATCH_S)
        async for line in self._api.stream_lines(self._path, query, idle_s=WATCH_S + 30.0):
            version = self._read_version_of_unchanged_object(line) or self._apply_event(line, version)
        self._on_answer()
        return version

    def _apply_event(self, line: bytes, version: str) -> str:
        event = self._api.parse(line.decode())
        item = event.get("object") or {}
        if event.get("type") == "ERROR":
            raise ApiError(int(item.get("code") or 500), str(item.get("message", ""))[:200])
        if event.get("type") != "BOOKMARK":
            self._apply_change(event["type"], item, line)
        return str(item["metadata"].get("resourceVersion", version))

    def _read_version_of_unchanged_object(self, line: bytes) -> str:
        """Return the resource version in an event that changes nothing. For any other event, return an empty text."""
        return ""

    @abstractmethod
    def _begin_list(self) -> None:
        """Forget the objects of an unfinished list before a new list."""

    @abstractmethod
    def _add_listed(self, item: Document) -> None:
        """Record an object that the current list returned."""

    @abstractmethod
    def _end_list(self) -> None:
        """End the list, and remove the known objects that were not in it."""

    @abstractmethod
    def _apply_change(self, kind: str, item: Document, line: bytes) -> None:
        """Apply one change of an object, from a parsed line of the watch."""

    @abstractmethod
    def _on_failure(self, why: str) -> None:
        """Handle a failed request. Until the next list, changes of objects may be missed."""


class NodeInformer(Informer):
    """Informer of nodes. It does not parse an event in which only times have changed.

    Args:
        api: the client.
        on_node: function to call with a node that exists or has changed.
        on_node_gone: function to call with a node that was deleted.
        selector: label selector of the nodes, empty for all.
        on_response: function to call after each successful list or watch request.
        pace: waits between requests.
    """

    def __init__(
        self,
        api: Api,
        on_node: Callable[[Document], None],
        on_node_gone: Callable[[Document], None],
        selector: str,
        on_response: Callable[[], None],
        pace: WatchDelays = PACE,
    ) -> None:
        query = {"labelSelector": selector} if selector else {}
        super().__init__(api, "/api/v1/nodes", query, on_response, pace)
        self._on_node, self._on_node_gone = on_node, on_node_gone
        self._known: dict[str, Document] = {}
        """Kind and names of each node, by UID."""
        self._seen: dict[str, Document] = {}
        """Kind and names of the nodes in an unfinished list."""
        self._digests: dict[bytes, bytes] = {}
        """Digest of each node's last event, by UID."""

    def _begin_list(self) -> None:
        self._seen = {}

    def _add_listed(self, item: Document) -> None:
        node = {**item, "kind": "Node"}
        self._seen[str(item["metadata"].get("uid", ""))] = _make_node_identity(node)
        self._on_node(node)

    def _end_list(self) -> None:
        for uid in self._known.keys() - self._seen.keys():
            self._forget_node(uid, self._known[uid])
        self._known = self._seen

    def _read_version_of_unchanged_object(self, line: bytes) -> str:
        head = _HEAD.match(line)
        return head[2].decode() if head and self._digests.get(head[1]) == digest_event(line, head.end()) else ""

    def _apply_change(self, kind: str, item: Document, line: bytes) -> None:
        uid, node = str(item["metadata"].get("uid", "")), {**item, "kind": "Node"}
        if kind == "DELETED":
            self._known.pop(uid, None)
            self._forget_node(uid, node)
            return
        self._known[uid] = _make_node_identity(node)
        self._on_node(node)
        if head := _HEAD.match(line):
            self._digests[head[1]] = digest_event(line, head.end())

    def _forget_node(self, uid: str, node: Document) -> None:
        self._digests.pop(uid.encode(), None)
        self._on_node_gone(node)

    def _on_failure(self, why: str) -> None:
        log.warning("nodes: %s; reading them anew", why)


_HEAD = re.compile(
    rb'\{"type":"MODIFIED","object":\{"kind":"Node","apiVersion":"v1","metadata":\{"name":"[^"]*",'
    rb'"uid":"([^"]*)","resourceVersion":"(\d+)"'
)
"""Beginning of an event of a changed node, as the API server writes it. Events that begin otherwise are parsed."""
_BEATS = (b'"lastHeartbeatTime":"', b'"time":"')
_TIME = len("2000-01-01T00:00:00Z")


def digest_event(line: bytes, start: int = 0) -> bytes:
    """Return a digest of an event from byte `start` on, without the times of heartbeats and managed fields."""
    state = hashlib.blake2b(digest_size=16)
    parts = [line[start:]]
    for mark in _BEATS:
        parts = [piece for part in parts for piece in _split_at_times(part, mark)]
    for part in parts:
        state.update(part)
    return state.digest()


def _split_at_times(text: bytes, mark: bytes) -> list[bytes]:
    """Return the parts of an event's bytes around the times that follow the key `mark`."""
    first, *rest = text.split(mark)
    # A label may have the mark's name, but its value has no colon.
    return [first, *(part[_TIME:] if part[_TIME - 7 : _TIME - 6] == b":" else part for part in rest)]


def _make_node_identity(node: Document) -> Document:
    """Return a node reduced to name and UID, which are enough to report its deletion."""
    metadata = node["metadata"]
    return {"kind": "Node", "metadata": {"name": metadata["name"], "uid": metadata.get("uid", "")}}

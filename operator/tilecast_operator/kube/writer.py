"""Write objects: only as the leader, counted, limited in number, and conditional on the object that was seen."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tilecast_operator.kube.cache import CachedObject, ObjectCache
from tilecast_operator.kube.client import Api, ApiError
from tilecast_operator.kube.documents import (
    EventContent,
    WriterIdentity,
    make_annotations_patch,
    make_apply_document,
    make_event_document,
    make_status_patch,
)
from tilecast_operator.kube.fair_limiter import NOBODY, FairLimiter, PermitRequest
from tilecast_operator.kube.kinds import Document, Key, Kinds
from tilecast_operator.kube.lease import Leadership

log = logging.getLogger("tilecast")

UNTYPED = ("typed live object", "to smd typed")
"""Phrases with which the API server refuses an apply to an object that its own CRD would refuse."""

AnswerT = TypeVar("AnswerT")


@dataclass(eq=False)
class Writer:
    """Writer for all controllers. Belongs to one event loop.

    Every method raises NotLeaderError in a replica that does not lead.

    Args:
        client: client of the API server.
        cache: cache for the results of writes.
        leadership: permission of this replica to write.
        count: function to call with the resource and the outcome of each write: `ok`, an HTTP status, or `unreachable`.
        now: function that returns the time in the format of Kubernetes.
        author: names that identify the writer.
        kinds: cache of the API groups and kinds that the API server serves.
        max_requests: largest number of concurrent requests.
    """

    client: Api
    cache: ObjectCache
    leadership: Leadership
    count: Callable[[str, str], None]
    now: Callable[[], str]
    author: WriterIdentity
    kinds: Kinds
    max_requests: int

    def __post_init__(self) -> None:
        self._turns = FairLimiter(self.max_requests)

    async def annotate(
        self, key: Key, cached: CachedObject[Any], annotations: Mapping[str, str], *, is_conditional: bool = True
    ) -> CachedObject[Any]:
        """Apply the complete set of the operator's annotations to an object, and return the object.

        Args:
            key: key of the object.
            cached: the object as the caller read it from the cache.
            annotations: all annotations of the operator.
            is_conditional: whether the write fails if the object has changed since it was read.

        Raises:
            ApiError: the API server refused the write, with status 409 if the object has changed.
        """
        fields = self._apply_document(key, cached, is_conditional, annotations=annotations)
        return self.cache.table(key).store_written_object(await self.apply_fields(key, fields))

    async def write_status(
        self, key: Key, cached: CachedObject[Any], status: Mapping[str, Any], *, is_conditional: bool = True
    ) -> CachedObject[Any]:
        """Apply a whole status to an object. `annotate` describes the arguments and errors."""
        fields = self._apply_document(key, cached, is_conditional, status=status)
        return self.cache.table(key).store_written_object(await self.apply_fields(key, fields, "/status"))

    async def apply_fields(
        self, key: Key, document: Document, subresource: str = "", *, force: bool = True
    ) -> dict[str, Any]:
        """Write the fields of a document by server-side apply, and return the object. Errors are as in `annotate`."""
        resource, path = self.kinds[key.kind].plural + subresource, self._make_object_path(key) + subresource
        try:
            return await self._send_and_count(
                resource, _make_permit_request(key), lambda: self.client.apply(path, document, force=force)
            )
        except ApiError as error:
            if error.status != 500 or not force or not any(text in str(error) for text in UNTYPED):
                raise
        # The object was stored before its CRD became as strict as it is now.
        if subresource:
            operations = make_status_patch(document)
            return await self._send_and_count(
                resource, _make_permit_request(key), lambda: self.client.patch(path, operations)
            )
        merged = make_annotations_patch(document, self.author.annotations)
        return await self._send_and_count(resource, _make_permit_request(key), lambda: self.client.merge(path, merged))

    async def patch(
        self, path: str, resource: str, operations: Sequence[Mapping[str, Any]], permit_request: PermitRequest = NOBODY
    ) -> dict[str, Any]:
        """Apply a JSON patch to an object with a permit of the requesting namespace, and return the object."""
        return await self._send_and_count(resource, permit_request, lambda: self.client.patch(path, operations))

    async def delete(self, key: Key, cached: CachedObject[Any]) -> None:
        """Delete an object, unless the object has changed since the caller read it as `cached`."""
        try:
            await self._send_and_count(
                self.kinds[key.kind].plural,
                _make_permit_request(key),
                lambda: self.client.delete(self._make_object_path(key), cached.uid, cached.resource_version),
            )
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def post_event(self, key: Key, uid: str, note: EventContent, *, is_change: bool = False) -> bool:
        """Create the Event of a note, unless the Event exists. Return whether the Event exists afterwards.

        If the API server rejects the Event for good, log a warning and return False.

        Args:
            key: key of the object.
            uid: UID of the object.
            note: type, reason and message of the Event.
            is_change: whether the object's state has just changed. If so, an Event about an earlier equal state does
                not count as existing.

        Raises:
            ApiError: the API server answered 429 or 500 and above, so a new attempt may succeed.
        """
        now = self.now()
        occasions = ("", now) if is_change else ("",)
        for occasion in occasions:
            body = make_event_document(note, self.author, key, self.kinds[key.kind].api_version, uid, now, occasion)
            path = f"/api/v1/namespaces/{body['metadata']['namespace']}/events"
            try:
                if await self._send_and_count(
                    "events", _make_permit_request(key), partial(self._create_if_absent, path, body)
                ):
                    return True
            except ApiError as error:
                if error.status == 429 or error.status >= 500:
                    raise
                log.warning("%s: Event not written: %s", key, error)
                return False
        return True

    def _make_object_path(self, key: Key) -> str:
        return self.kinds[key.kind].path(key.namespace, key.name)

    def _apply_document(
        self, key: Key, cached: CachedObject[Any], is_conditional: bool, **parts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a server-side apply document. If `is_conditional`, it applies only to the object as it was seen."""
        version = cached.resource_version if is_conditional and cached.resource_version else None
        api_version = self.kinds[key.kind].api_version
        return make_apply_document(key, api_version, uid=cached.uid, resource_version=version, **parts)

    async def _create_if_absent(self, path: str, document: Document) -> Document | None:
        """Create an object and return it. If it exists already, return None."""
        try:
            return await self.client.create(path, document)
        except ApiError as error:
            if error.status == 409:
                return None
            raise

    async def _send_and_count(
        self, resource: str, permit_request: PermitRequest, request: Callable[[], Awaitable[AnswerT]]
    ) -> AnswerT:
        async with self._turns.acquire(None, permit_request), self.leadership.guard_write():
            outcome = "unreachable"
            try:
                answer = await request()
                outcome = "ok"
                return answer
            except ApiError as error:
                outcome = str(error.status)
                raise
            finally:
                self.count(resource, outcome)


def _make_permit_request(key: Key) -> PermitRequest:
    """Return the request of an object's namespace for a permit to write."""
    return PermitRequest(key.namespace)

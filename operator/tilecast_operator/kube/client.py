"""Client of the Kubernetes API for what kopf does not offer: server-side apply, Events, reads and watches.

Server-side apply makes the operator the owner of exactly the fields that it writes, and changes nothing if they already
have these values.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeAlias

import aiohttp

from tilecast_operator.kube.documents import make_delete_options
from tilecast_operator.kube.server_clock import ServerClock

_NO_WEBHOOK = ("failed calling webhook", "failed to call webhook")
_PATH = re.compile(r"/[-._:/a-zA-Z0-9]+")
_DOTS = {".", ".."}
_APPLY = "application/apply-patch+yaml"
"""Content type of server-side apply. The API server accepts JSON, because JSON is YAML."""
_PATCH = "application/json-patch+json"
_MERGE_PATCH = "application/merge-patch+json"
_JSON = "application/json"
_TEXT = "application/json, */*"
"""Accepted content types if the answer is text and an error is JSON, as kubectl requests logs."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Address and credentials of the API server."""

    server: str
    headers: Mapping[str, str]
    ssl_context: ssl.SSLContext
    proxy: str | None = None


@dataclass(frozen=True, slots=True)
class _HttpRequest:
    """HTTP request to the API server, with method, path, content and query."""

    method: str
    path: str
    content: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    content_type: str = _JSON
    accept: str = _JSON
    is_fenced: bool = False
    """Whether it may be sent only while this replica leads."""


Login: TypeAlias = Callable[[], Connection | None]
"""Function that returns the current credentials. The token of a pod is replaced every hour."""


class ApiError(Exception):
    """Error response of the API server.

    Attributes:
        status: HTTP status of the response.
        retry_after_s: requested wait in seconds, or None.
    """

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.retry_after_s = retry_after_s


MOST_RETRY_AFTER_S = 120.0
"""Longest wait, in seconds, that a response of the API server or of a proxy may request."""

UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError)
"""Errors that mean that a server did not answer."""


def is_webhook_down(error: Exception) -> bool:
    """Return whether a write failed because an admission webhook did not respond.

    Only the text of the API server's message shows this.
    """
    return isinstance(error, ApiError) and error.status >= 500 and any(words in str(error) for words in _NO_WEBHOOK)


def compute_retry_wait_s(attempt: int, error: Exception | None, first_s: float, most_s: float) -> float:
    """Return the wait in seconds after failed attempt number `attempt`, counted from 1.

    It doubles with each attempt up to `most_s`, and is at least as long as the API server requested.
    """
    wait_s = min(first_s * 2.0 ** min(attempt - 1, 16), most_s)
    asked_s = error.retry_after_s if isinstance(error, ApiError) else None
    return wait_s if asked_s is None else max(wait_s, asked_s)


class Api:
    """Client of one API server.

    Args:
        timeout_s: time limit of one request, in seconds.
        field_manager: name under which the API server records the fields that are written.
        parse: function that parses an object or a list from the API server.
    """

    def __init__(self, timeout_s: float, field_manager: str, parse: Callable[[str], dict[str, Any]]) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        # Nobody reads the warnings of field validation about fields that an older CRD lacks, and the API server parses
        # everything twice for them.
        self._managed = {"fieldManager": field_manager, "fieldValidation": "Ignore"}
        self.parse = parse
        self._connection: Connection | None = None
        self._login: Login = lambda: None
        self._session: aiohttp.ClientSession | None = None
        self._logged_in = asyncio.Event()
        self.clock = ServerClock()
        self.fence: Callable[[], None] = lambda: None
        """Function that raises if no change may be requested now.

        It is called when a connection exists and nothing is sent yet. So a process that was stopped while it waited for
        the connection notices that it may no longer write.
        """

    def log_in(self, login: Login) -> None:
        """Log in now, and again whenever the credentials expire."""
        self._login, self._connection = login, login()
        self._logged_in.set()

    async def wait_for_login(self) -> None:
        """Wait for the first login."""
        await self._logged_in.wait()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def apply(self, path: str, document: Mapping[str, Any], *, force: bool = True) -> dict[str, Any]:
        """Write the fields in `document` by server-side apply, and return the whole object.

        Args:
            path: path of the object, or of its status.
            document: all fields that this writer manages. A field that is left out is given up.
            force: whether to take over fields that another writer manages.

        Raises:
            ApiError: the API server refused. The status is 409 if another writer manages a field and `force` is False.
            aiohttp.ClientError, TimeoutError: the API server did not answer.
        """
        query = self._managed | {"force": "true" if force else "false"}
        return await self._send_request(_HttpRequest("PATCH", path, document, query, _APPLY, is_fenced=True))

    async def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Apply a JSON patch (RFC 6902) to an object, and return the whole object. Errors are as in `apply`."""
        return await self._send_request(_HttpRequest("PATCH", path, operations, self._managed, _PATCH, is_fenced=True))

    async def merge(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Apply a merge patch (RFC 7386) to an object, and return the whole object. Errors are as in `apply`."""
        return await self._send_request(
            _HttpRequest("PATCH", path, document, self._managed, _MERGE_PATCH, is_fenced=True)
        )

    async def dry_run(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the object that a merge patch (RFC 7386) would produce. Errors are as in `apply`.

        Webhooks are called, and nothing is stored.
        """
        return await self._send_request(
            _HttpRequest("PATCH", path, document, self._managed | {"dryRun": "All"}, _MERGE_PATCH)
        )

    async def create(self, path: str, document: Mapping[str, Any], *, is_fenced: bool = True) -> dict[str, Any]:
        """Create an object. Errors are as in `apply`.

        Args:
            path: path of the list.
            document: the object.
            is_fenced: whether only the leader may create it. False for reviews, which the API server does not store.
        """
        return await self._send_request(_HttpRequest("POST", path, document, self._managed, is_fenced=is_fenced))

    async def replace(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Replace an object.

        A resource version other than that of `document` raises ApiError 409. Errors are as in `apply`.
        """
        return await self._send_request(_HttpRequest("PUT", path, document, self._managed))

    async def get(self, path: str, query: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        """Return an object or a list. Errors are as in `apply`."""
        return await self._send_request(_HttpRequest("GET", path, query=query))

    async def read_bytes(self, path: str, query: Mapping[str, str], limit: int) -> bytes:
        """Return the first `limit` bytes of a response that is not JSON, such as a log. Errors are as in `apply`."""
        async with self._open_request(_HttpRequest("GET", path, query=query, accept=_TEXT), self._timeout) as response:
            read, size = list[bytes](), 0
            async for chunk in response.content.iter_any():
                read.append(chunk[: limit - size])
                size += len(read[-1])
                if size >= limit:
                    response.close()
                    break
            if response.status >= 300:
                raise self._make_refusal_error(response, b"".join(read).decode(errors="replace"))
            return b"".join(read)

    async def delete(self, path: str, uid: str, resource_version: str) -> dict[str, Any]:
        """Delete an object. A changed UID or resource version raises ApiError 409. Other errors are as in `apply`."""
        return await self._send_request(
            _HttpRequest("DELETE", path, make_delete_options(uid, resource_version), is_fenced=True)
        )

    async def stream_lines(self, path: str, query: Mapping[str, str], idle_s: float) -> AsyncIterator[bytes]:
        """Yield the lines of a streamed response until the server ends it. Errors are as in `apply`.

        Args:
            path: path of a list.
            query: parameters of the query.
            idle_s: seconds without data after which to give up.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout.total, sock_read=idle_s)
        async with self._open_request(_HttpRequest("GET", path, query=query), timeout) as response:
            if response.status >= 300:
                raise self._make_refusal_error(response, await response.text(errors="replace"))
            rest = b""
            async for chunk in response.content.iter_any():
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    yield line

    async def _send_request(self, request: _HttpRequest) -> dict[str, Any]:
        async with self._open_request(request, self._timeout) as response:
            text = await response.text(errors="replace")
            if response.status < 300:
                answer = self.parse(text)
                self.clock.set_from_header(response.headers.get("Date", ""))
                return answer
            raise self._make_refusal_error(response, text)

    def _make_refusal_error(self, response: aiohttp.ClientResponse, text: str) -> ApiError:
        """Return the error of a refused request. Log in again if the credentials have expired."""
        if response.status == 401:
            self._connection = self._login()
        return ApiError(
            response.status, _parse_error_message(text), _parse_retry_after_s(response.headers.get("Retry-After"))
        )

    def _open_request(
        self, request: _HttpRequest, timeout: aiohttp.ClientTimeout
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._connection is None:
            raise ApiError(401, "not logged in yet")
        path = request.path
        if not _PATH.fullmatch(path) or not _DOTS.isdisjoint(path.split("/")):
            # Names in the path come from objects that users write; none may lead to another object.
            raise ApiError(404, f"there is no object {path[:200]!r}")
        if self._session is None:
            tracing = aiohttp.TraceConfig()
            tracing.on_request_headers_sent.append(self._check_fence)
            tracing.on_request_chunk_sent.append(self._check_fence)
            self._session = aiohttp.ClientSession(timeout=self._timeout, trace_configs=[tracing])
        content = None if request.content is None else json.dumps(request.content, allow_nan=False).encode()
        return self._session.request(
            request.method,
            self._connection.server.rstrip("/") + path,
            params=request.query,
            data=content,
            headers={**self._connection.headers, "Content-Type": request.content_type, "Accept": request.accept},
            ssl=self._connection.ssl_context,
            proxy=self._connection.proxy,
            timeout=timeout,
            trace_request_ctx=request.is_fenced,
        )

    async def _check_fence(self, _: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        """Check the fence when the headers are prepared, and again just before they are sent with the body.

        The process may have been stopped in between.
        """
        if context.trace_request_ctx:
            self.fence()


async def list_pages(api: Api, path: str, query: Mapping[str, str], limit: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the pages of a list, each with up to `limit` objects. Errors are as in `Api.apply`."""
    query = {**query, "limit": str(limit)}
    while True:
        page = await api.get(path, query)
        yield page
        onward = (page.get("metadata") or {}).get("continue")
        if not onward:
            return
        query["continue"] = onward


def _parse_error_message(text: str) -> str:
    try:
        return str(json.loads(text).get("message", ""))[:500]
    except (ValueError, AttributeError):
        return text[:200]


def _parse_retry_after_s(text: str | None) -> float | None:
    """Return the wait in a Retry-After header, within bounds, or None if it is not a number of seconds."""
    try:
        asked_s = float(text or "")
    except ValueError:
        return None
    return min(asked_s, MOST_RETRY_AFTER_S) if asked_s >= 0 else None

"""Check a report before its body is read: its client must be within its limits, and its token must look valid."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tilecast import untrusted
from tilecast_operator.observed.reports import AUDIENCE, RefusedReport

BURST_S = 10.0
"""Seconds of a client's allowed rate that it may send at once after it was quiet."""
MAX_IN_FLIGHT = 8
"""Most concurrent reports of one client.

It is below the number of concurrent TokenReviews, so that no client takes all.
"""
MAX_TOKEN = 8192
SKEW_S = 60.0
ACCOUNT = "system:serviceaccount:"


@dataclass(eq=False)
class ReportGuard:
    """Guard that refuses reports before their body is read. Belongs to one event loop.

    Args:
        rate: reports per second that a client may send.
        clock: Unix time of the API server, in seconds.
        on_refusal: function to call with the outcome of each refusal.
        timer: monotonic time, in seconds.
        max_clients: most clients whose rates are remembered.
    """

    rate: float
    clock: Callable[[], float]
    on_refusal: Callable[[str], None]
    timer: Callable[[], float] = time.monotonic
    max_clients: int = 4096

    def __post_init__(self) -> None:
        self._most = max(1.0, self.rate * BURST_S)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Number of reports that each client may still send, and since when. The client seen last comes last."""
        self._in_flight: dict[str, int] = {}

    @contextmanager
    def admit_report(self, address: str, namespace: str, token: str) -> Iterator[None]:
        """Admit a report for the duration of a `with` block.

        Args:
            address: address of the client.
            namespace: namespace that it reports to.
            token: its bearer token.

        Raises:
            RefusedReport: the report is not read. The message says why.
        """
        client = _find_client_network(address)
        try:
            self._spend_allowance(client)
            require_token(token, namespace, self.clock())
        except RefusedReport as refused:
            self.on_refusal(refused.outcome)
            raise
        self._in_flight[client] = self._in_flight.get(client, 0) + 1
        try:
            yield
        finally:
            self._in_flight[client] -= 1
            if not self._in_flight[client]:
                del self._in_flight[client]

    def _spend_allowance(self, client: str) -> None:
        now_s = self.timer()
        left, since_s = self._left.pop(client, (self._most, now_s))
        left = min(self._most, left + (now_s - since_s) * self.rate)
        is_late = left < 1.0
        self._left[client] = (left if is_late else left - 1.0, now_s)
        if len(self._left) > self.max_clients:
            self._left.popitem(last=False)
        if is_late:
            raise _make_rate_error(math.ceil((1.0 - left) / self.rate))
        if self._in_flight.get(client, 0) >= MAX_IN_FLIGHT:
            raise _make_rate_error(1)


def _make_rate_error(wait_s: int) -> RefusedReport:
    return RefusedReport("limited", 429, f"this client sends too many reports; report again in {wait_s} s", wait_s)


def _find_client_network(address: str) -> str:
    """Return the IPv4 address, or the /64 network of the IPv6 address, that counts as one client."""
    try:
        host = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(host, ipaddress.IPv6Address):
        return str(host.ipv4_mapped or ipaddress.ip_network((host, 64), strict=False))
    return str(host)


def require_token(token: str, namespace: str, now_s: float) -> None:
    """Check the claims of a token. A TokenReview verifies its signature later.

    Raises:
        RefusedReport: there is no token, or it is not valid now, is for another audience, or is of another namespace.
    """
    if not token:
        raise RefusedReport("unauthenticated", 401, "there is no bearer token; project one with audience tilecast")
    claims = _read_claims(token)
    audiences, ends_s, begins_s = claims.get("aud"), claims.get("exp"), claims.get("nbf", 0)
    if AUDIENCE not in (audiences if isinstance(audiences, list) else [audiences]):
        raise RefusedReport(
            "unauthenticated", 401, f"the token is not for audience {AUDIENCE}; project one into the pod"
        )
    times = [float(item) for item in (begins_s, ends_s) if isinstance(item, int | float)]
    if len(times) < 2 or not times[0] - SKEW_S <= now_s <= times[1] + SKEW_S:
        raise RefusedReport("unauthenticated", 401, "the token is not valid now; read it anew from its file")
    if not str(claims.get("sub", "")).startswith(f"{ACCOUNT}{namespace}:"):
        raise RefusedReport("forbidden", 403, f"the token is not of a service account of namespace {namespace}")


def _read_claims(token: str) -> dict[str, Any]:
    parts = token.split(".")
    if len(token) <= MAX_TOKEN and len(parts) == 3 and all(parts):
        try:
            claims = untrusted.parse_json(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        except (binascii.Error, ValueError):
            claims = None
        if isinstance(claims, dict):
            return claims
    raise RefusedReport("unauthenticated", 401, "the token is no JWT; project one with audience tilecast into the pod")

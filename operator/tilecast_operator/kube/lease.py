"""Elect the replica that writes. It renews a Lease of coordination.k8s.io, and the others watch the Lease."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from tilecast_operator.kube.client import UNREACHABLE, Api, ApiError
from tilecast_operator.kube.documents import LeaseSpec, make_lease_document
from tilecast_operator.kube.kinds import Document

log = logging.getLogger("tilecast")

FENCE = 0.7
"""Fraction of a lease in which the leader may write, counted from sending the renewal.

The rest is for writes in transit.
"""
RENEW = 0.2
"""Fraction of a lease between two renewals."""
LOOK = 0.1
"""Fraction of a lease between two reads by a replica that does not lead."""
REQUEST = 0.3
"""Fraction of a lease that a request about it may take."""


class NotLeaderError(Exception):
    """Error that a replica which does not lead tried to write."""


class Leadership:
    """Permission of this replica to write, with its expiry time. Belongs to one event loop.

    Args:
        is_alone: whether there is only one replica, which needs no lease.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self._until_s = math.inf if is_alone else -math.inf
        self._is_leading = is_alone
        self._limits: set[asyncio.Timeout] = set()
        self._listeners: list[Callable[[bool], None]] = []
        self._end: asyncio.TimerHandle | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this replica may write now."""
        return time.monotonic() < self._until_s

    def require_leadership(self) -> None:
        """Raise NotLeaderError if this replica may not write now."""
        if not self.is_leader:
            raise NotLeaderError("another replica leads")

    def add_listener(self, listener: Callable[[bool], None]) -> None:
        """Add a function that is called with True when this replica begins to lead, and with False when it ends."""
        self._listeners.append(listener)

    @asynccontextmanager
    async def guard_write(self) -> AsyncIterator[None]:
        """Allow one write in a `with` block. The write is cancelled if the lease expires first.

        Raises:
            NotLeaderError: another replica leads.
            TimeoutError: the lease has expired meanwhile.
        """
        self.require_leadership()
        if math.isinf(self._until_s):
            yield
            return
        async with asyncio.timeout_at(self._until_s) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def extend_lead(self, until_s: float) -> None:
        """Make this replica the leader until `until_s`, a time of the monotonic clock in seconds."""
        # Report the end of the previous lease if no timer ran in between, so that refused work is due again
        self._report_lost_lead()
        self._until_s = until_s
        loop = asyncio.get_running_loop()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(until_s)
        if self._end is not None:
            self._end.cancel()
        self._end = loop.call_at(until_s, self._report_lost_lead)
        if self.is_leader and not self._is_leading:
            self._set_leading(True)

    def stop_leading(self) -> None:
        """Give up leadership at once."""
        self._until_s = -math.inf
        self._report_lost_lead()

    def _report_lost_lead(self) -> None:
        if self._is_leading and not self.is_leader:
            self._set_leading(False)

    def _set_leading(self, is_leading: bool) -> None:
        self._is_leading = is_leading
        for listener in self._listeners:
            listener(is_leading)


@dataclass(frozen=True, slots=True)
class _ObservedLease:
    """The Lease as this replica last read it."""

    resource_version: str
    spec: LeaseSpec
    address: str
    since_s: float
    """Time at which this state of the Lease was first seen, by the monotonic clock, in seconds."""

    @classmethod
    def from_object(cls, body: Document, annotation: str, since_s: float) -> _ObservedLease:
        metadata = body["metadata"]
        address = str((metadata.get("annotations") or {}).get(annotation, ""))
        return cls(str(metadata["resourceVersion"]), LeaseSpec.from_object(body), address, since_s)

    @property
    def expires_s(self) -> float:
        """Time from which another replica may take the Lease, by the monotonic clock, in seconds."""
        return self.since_s + self.spec.duration_s


@dataclass(eq=False)
class Election:
    """Leader election by a Lease. This replica takes a free Lease and renews it. Belongs to one event loop.

    Args:
        client: client of the API server.
        lease_name: `namespace/name` of the Lease.
        instance: name of this replica. A unique suffix is added.
        address: URL at which other replicas reach this one, empty if they cannot.
        annotation: annotation of the Lease with its holder's address.
        lease_s: duration of a lease, in whole seconds.
        leadership: permission that every renewal extends.
    """

    client: Api
    lease_name: str
    instance: str
    address: str
    annotation: str
    lease_s: int
    leadership: Leadership

    def __post_init__(self) -> None:
        self.identity = f"{self.instance}_{uuid.uuid4()}"
        """Name of this replica in the Lease. Only readers of the Lease know it."""
        self._namespace, _, self._name = self.lease_name.partition("/")
        self._record: _ObservedLease | None = None
        self._is_released = False

    @property
    def leader(self) -> str:
        """Name of the last known leader, or empty."""
        return "" if self._record is None else self._record.spec.holder

    @property
    def leader_address(self) -> str | None:
        """URL of the leader. None if this replica leads or no leader is known."""
        known = self._record
        is_other = known is not None and known.spec.holder not in ("", self.identity)
        return known.address or None if known and is_other and time.monotonic() < known.expires_s else None

    async def run_election(self) -> None:
        """Take part in the election until it is cancelled or the lease is released."""
        problem = ""
        while not self._is_released:
            try:
                async with asyncio.timeout(REQUEST * self.lease_s):
                    await self._renew_or_take()
                problem = ""
            except (ApiError, *UNREACHABLE) as error:
                why = str(error) or type(error).__name__
                if why != problem:
                    log.warning("lease %s: %s", self.lease_name, why)
                problem = why
                if isinstance(error, ApiError) and error.status in (404, 409):
                    self._record = None
            await asyncio.sleep(self.lease_s * (RENEW if self.leadership.is_leader and not problem else LOOK))

    async def release_lease(self) -> None:
        """Stop leading and release the Lease. If the release fails, the Lease expires later."""
        self._is_released = True
        self.leadership.stop_leading()
        if self._record is None or self._record.spec.holder != self.identity:
            return
        try:
            async with asyncio.timeout(REQUEST * self.lease_s):
                await self._read_lease()
                if self._record is not None and self._record.spec.holder == self.identity:
                    await self._write_lease("", 1)
        except (ApiError, *UNREACHABLE) as error:
            log.warning("lease %s is not released: %s", self.lease_name, error)

    async def _renew_or_take(self) -> None:
        """Renew the Lease, or take it if it is free."""
        began_s = time.monotonic()
        if not self.leadership.is_leader or self._record is None:
            await self._read_lease()
        known = self._record
        holder = "" if known is None else known.spec.holder
        if holder in ("", self.identity) or (known is not None and time.monotonic() >= known.expires_s):
            await self._write_lease(self.identity, self.lease_s)
            if not self._is_released:
                self.leadership.extend_lead(began_s + FENCE * self.lease_s)

    async def _read_lease(self) -> None:
        """Read the Lease. If it is unchanged, do not change the time at which it was first seen."""
        try:
            body = await self.client.get(self._make_lease_path())
        except ApiError as error:
            if error.status != 404:
                raise
            self._record = None
            return
        known = self._record
        if known is None or known.resource_version != str(body["metadata"]["resourceVersion"]):
            self._record = _ObservedLease.from_object(body, self.annotation, time.monotonic())

    async def _write_lease(self, holder: str, lease_s: int) -> None:
        """Write the Lease, unless another replica has written it since it was read."""
        known, now = self._record, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = known.spec.holder if known else ""
        is_same = holder in ("", before)
        if not is_same:
            log.info("lease %s: %s leads after %s", self.lease_name, holder, before or "nobody")
        spec = LeaseSpec(
            holder=holder,
            duration_s=lease_s,
            acquired=known.spec.acquired or now if known and is_same else now,
            renewed=now,
            transitions=(known.spec.transitions if known else 0) + (not is_same and known is not None),
        )
        version, annotations = known.resource_version if known else None, {self.annotation: self.address}
        document = make_lease_document(self._namespace, self._name, spec, annotations, version)
        if known is None:
            answer = await self.client.create(self._make_lease_path(is_list=True), document, is_fenced=False)
        else:
            answer = await self.client.replace(self._make_lease_path(), document)
        self._record = _ObservedLease.from_object(answer, self.annotation, time.monotonic())

    def _make_lease_path(self, *, is_list: bool = False) -> str:
        root = f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"
        return root if is_list else f"{root}/{self._name}"

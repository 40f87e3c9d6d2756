"""Test, from a process outside the election, whether any replica still renews the Lease.

The times in a Lease are those of its holder's clock, which may be a day off. Only a change seen here counts.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from tilecast_operator.kube.client import UNREACHABLE, Api, ApiError
from tilecast_operator.kube.documents import LeaseSpec


class LeaderLivesError(Exception):
    """Error that a replica still leads, because the Lease was renewed."""


class _LeaseState(NamedTuple):
    version: str
    """UID and resource version of the Lease. Empty if there is none."""
    duration_s: float


@dataclass(eq=False)
class StaleLease:
    """Check that the operator's Lease has expired and is not renewed, so that another process may write.

    Args:
        client: client of the API server.
        lease_name: `namespace/name` of the Lease.
        look_s: seconds between two reads of the Lease.
        fresh_s: seconds for which `require_unchanged` trusts the last read.
        margin_s: seconds from the expiry of the Lease until its former holder has surely stopped writing.
    """

    client: Api
    lease_name: str
    _: KW_ONLY
    look_s: float = 2.0
    fresh_s: float = 1.0
    margin_s: float = 5.0

    def __post_init__(self) -> None:
        namespace, _, name = self.lease_name.partition("/")
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        self._version = ""
        self._looked_s = 0.0

    async def wait_until_stale(self, older_than_s: float) -> None:
        """Wait until the Lease has been unchanged for `older_than_s` seconds and for longer than its duration.

        Raises:
            LeaderLivesError: the Lease changes.
            ApiError, OSError: the first or the last read failed. Other reads may fail.
        """
        first = await self._read_lease()
        self._version = first.version
        ends_s = time.monotonic() + max(older_than_s, first.duration_s + self.margin_s)
        while (left_s := ends_s - time.monotonic()) > 0:
            await asyncio.sleep(min(self.look_s, left_s))
            try:
                await self._require_same_version()
            except (ApiError, *UNREACHABLE):
                continue
        await self._require_same_version()

    async def require_unchanged(self) -> None:
        """Raise LeaderLivesError if the Lease has changed since `wait_until_stale`."""
        if time.monotonic() - self._looked_s > self.fresh_s:
            await self._require_same_version()

    async def _require_same_version(self) -> None:
        if (await self._read_lease()).version != self._version:
            raise LeaderLivesError(f"lease {self.lease_name} is renewed: the operator lives")

    async def _read_lease(self) -> _LeaseState:
        began_s, look = time.monotonic(), _LeaseState("", 0.0)
        try:
            body = await self.client.get(self._path)
            version = f"{body['metadata'].get('uid', '')}/{body['metadata']['resourceVersion']}"
            look = _LeaseState(version, LeaseSpec.from_object(body).duration_s)
        except ApiError as error:
            if error.status != 404:
                raise
        self._looked_s = began_s
        return look

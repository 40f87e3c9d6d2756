"""Find which API groups, kinds and fields the API server serves, with a cache."""

from __future__ import annotations

import json

from tilecast_operator.kube.client import Api, ApiError
from tilecast_operator.kube.kinds import ResourceKind


class ServedApis:
    """Cache of the API groups and fields that the API server serves. Groups that are not served are requested again."""

    def __init__(self, client: Api) -> None:
        self._client = client
        self._versions: dict[str, str] = {}
        self._has_field: dict[tuple[ResourceKind, str], bool] = {}

    async def served_version(self, group: str, *, is_refresh: bool = False) -> str | None:
        """Return the preferred version of an API group. If the group is not served, return None.

        Args:
            group: name of the API group.
            is_refresh: whether to ask the API server even if the answer is cached.
        """
        if is_refresh or group not in self._versions:
            self._versions.pop(group, None)
            try:
                document = await self._client.get(f"/apis/{group}")
            except ApiError as error:
                if error.status == 404:
                    return None
                raise
            self._versions[group] = str(document["preferredVersion"]["version"])
        return self._versions[group]

    async def serves_kind(self, kind: ResourceKind) -> bool:
        """Return whether the API server serves the version of a kind."""
        try:
            await self._client.get(f"/apis/{kind.api_version}")
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def has_field(self, kind: ResourceKind, name: str) -> bool:
        """Return whether any schema of a kind's API group has a field called `name`."""
        if (kind, name) not in self._has_field:
            document = await self._client.get(f"/openapi/v3/apis/{kind.api_version}")
            self._has_field[kind, name] = f'"{name}"' in json.dumps(document)
        return self._has_field[kind, name]

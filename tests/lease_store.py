"""A store with a Lease as an API server keeps it, and operators that share it over real HTTP."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from operator_store import Store
from tilecast_operator.kube.client import ApiError

PLACE = "tilecast-system/tilecast"
PATH = "/apis/coordination.k8s.io/v1/namespaces/tilecast-system/leases"


class LeaseStore(Store):
    """Store that also has leases, and accepts every token."""

    def __init__(self) -> None:
        super().__init__()
        self.leases: dict[str, dict[str, Any]] = {}
        self.is_away = False
        """Whether requests about the lease fail, as for a replica that is cut off."""

    @property
    def holder(self) -> str:
        """Holder of the lease, without the suffix that makes the name unique."""
        return str(self.leases[f"{PATH}/tilecast"]["spec"].get("holderIdentity", "")).partition("_")[0]

    async def get(self, path: str, query: Any = None) -> dict[str, Any]:
        if not path.startswith(PATH):
            return await super().get(path, query)
        await self._reach()
        if path not in self.leases:
            raise ApiError(404, "not found")
        return copy.deepcopy(self.leases[path])

    async def create(self, path: str, document: Any, **options: Any) -> dict[str, Any]:
        if path.endswith("/tokenreviews"):
            user = {"username": "system:serviceaccount:default:trainer"}
            return {"status": {"authenticated": True, "audiences": ["tilecast"], "user": user}}
        if path != PATH:
            return await super().create(path, document, **options)
        await self._reach()
        name = f"{PATH}/{document['metadata']['name']}"
        if name in self.leases:
            raise ApiError(409, "already exists")
        return self._keep(name, document)

    async def replace(self, path: str, document: Any) -> dict[str, Any]:
        await self._reach()
        if document["metadata"]["resourceVersion"] != self.leases[path]["metadata"]["resourceVersion"]:
            raise ApiError(409, "changed")
        return self._keep(path, document)

    def _keep(self, path: str, document: Any) -> dict[str, Any]:
        self.version += 1
        metadata = {**document["metadata"], "resourceVersion": str(self.version)}
        self.leases[path] = {**document, "metadata": metadata}
        return copy.deepcopy(self.leases[path])

    async def _reach(self) -> None:
        await asyncio.sleep(0)
        if self.is_away:
            raise TimeoutError


class CutOff:
    """The store as one replica sees it, which can be cut off from the lease while the others are not."""

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self.is_cut = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get(self, path: str, query: Any = None) -> dict[str, Any]:
        return await self._through(path, self._store.get(path, query))

    async def replace(self, path: str, document: Any) -> dict[str, Any]:
        return await self._through(path, self._store.replace(path, document))

    async def _through(self, path: str, answer: Any) -> dict[str, Any]:
        if self.is_cut and path.startswith(PATH):
            answer.close()
            raise TimeoutError
        body: dict[str, Any] = await answer
        return body

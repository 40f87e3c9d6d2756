"""Restrict the operator to the jobs of selected namespaces."""

from __future__ import annotations

from tilecast.api import training_job
from tilecast.jobs import JOB_KINDS
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.client import ApiError
from tilecast_operator.kube.kinds import Key
from tilecast_operator.objects.kinds import KINDS, complete_item
from tilecast_operator.objects.view import NamespaceView
from tilecast_operator.selector import LabelSelector

NAMESPACE = "Namespace"
PAGE = 500


class NamespaceShard:
    """Filter that selects namespaces by their labels. Belongs to one event loop.

    The cache postpones a job until its namespace is seen, and drops jobs of namespaces that are not selected. So when a
    namespace becomes selected, its jobs are listed.
    """

    def __init__(self, context: SharedContext, selector: LabelSelector) -> None:
        self._context = context
        self._selector = selector
        cache = context.cache
        self._tables = (cache.training_jobs, cache.jobs)
        for table in self._tables:
            table.is_ours = self._is_in_shard
        cache.namespaces.add_listener(self._on_namespace_change)
        context.runtime.register(NAMESPACE, self._list_jobs)

    def _is_in_shard(self, namespace: str) -> bool | None:
        """Return whether the labels of a namespace select it, or None as long as they are unknown."""
        seen = self._context.cache.namespaces.get(Key(NAMESPACE, "", namespace))
        return None if seen is None else self._selector.selects(seen.value.labels)

    def _on_namespace_change(
        self, key: Key, before: CachedObject[NamespaceView] | None, now: CachedObject[NamespaceView] | None
    ) -> None:
        if now is None:
            return
        was_ours = None if before is None else self._selector.selects(before.value.labels)
        is_ours = self._selector.selects(now.value.labels)
        if was_ours is is_ours:
            return
        for table in self._tables:
            table.add_or_drop_namespace(key.name)
        if was_ours is False:
            self._context.runtime.add(key)

    async def _list_jobs(self, key: Key) -> None:
        """List all jobs of a namespace and store them in the cache."""
        kinds = (training_job.KIND, *(JOB_KINDS if self._context.settings.jobs else ()))
        for kind in kinds:
            query: dict[str, str] = {"limit": str(PAGE)}
            while True:
                try:
                    page = await self._context.client.get(KINDS[kind].path(key.name), query)
                except ApiError as error:
                    if error.status == 404:  # the cluster has no such kind
                        break
                    raise
                for item in page.get("items") or ():
                    self._context.cache.put_object(complete_item(kind, item))
                if not (onward := (page.get("metadata") or {}).get("continue")):
                    break
                query["continue"] = onward

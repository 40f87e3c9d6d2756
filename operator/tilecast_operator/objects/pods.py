"""Watch the GPUs that pods hold."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from tilecast.jobs.quantities import count_pod_gpus
from tilecast_operator.kube.client import Api
from tilecast_operator.kube.kinds import Document
from tilecast_operator.kube.watch import PACE, Informer, WatchDelays

log = logging.getLogger("tilecast")


class PodInformer(Informer):
    """Watch of pods that reports the GPUs held on each node, or None while the number is unknown."""

    def __init__(
        self,
        api: Api,
        on_change: Callable[[Mapping[str, int] | None], None],
        on_response: Callable[[], None] = lambda: None,
        pace: WatchDelays = PACE,
    ) -> None:
        query = {"fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"}
        super().__init__(api, "/api/v1/pods", query, on_response, pace)
        self._on_change = on_change
        self._held: dict[str, tuple[str, int]] = {}
        """Node and number of GPUs of each pod with GPUs, by UID."""
        self._seen: dict[str, tuple[str, int]] = {}
        """Node and number of GPUs of the pods in an unfinished list."""

    def _begin_list(self) -> None:
        self._seen = {}

    def _add_listed(self, item: Document) -> None:
        if gpus := count_pod_gpus(item):
            self._seen[item["metadata"]["uid"]] = (item["spec"]["nodeName"], gpus)

    def _end_list(self) -> None:
        self._held = self._seen
        self._report_usage()

    def _apply_change(self, kind: str, item: Document, line: bytes) -> None:
        uid, gpus = item["metadata"]["uid"], count_pod_gpus(item)
        before = self._held.get(uid)
        now = (str(item["spec"].get("nodeName", "")), gpus) if gpus and kind != "DELETED" else None
        if before == now:
            return
        if now is None:
            self._held.pop(uid, None)
        else:
            self._held[uid] = now
        self._report_usage()

    def _on_failure(self, why: str) -> None:
        log.warning("pods: %s; what is free is not known until they are read again", why)
        self._on_change(None)

    def _report_usage(self) -> None:
        used: Counter[str] = Counter()
        for node, gpus in self._held.values():
            used[node] += gpus
        self._on_change(used)

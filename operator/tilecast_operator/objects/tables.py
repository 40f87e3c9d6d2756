"""Cache of the operator, with one table for each watched kind of object."""

from __future__ import annotations

import time
from typing import Any

from tilecast import nodes
from tilecast.api import gpu_pool, pool_learning, queue_advice, training_job
from tilecast.jobs import JOB_KINDS, Priorities, PriorityClass
from tilecast_operator.kube.cache import CacheTable, ObjectCache
from tilecast_operator.kube.journal import Journal
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.quarantine import Quarantine
from tilecast_operator.objects import view
from tilecast_operator.objects.quarantine import open_quarantine
from tilecast_operator.objects.view import View


class Cache(ObjectCache):
    """All watched objects, in one table for each kind. Belongs to one event loop.

    Args:
        journal: Journal in which an object is noted while it is read.
        quarantine: Quarantine that limits which parts of objects are read.
    """

    def __init__(self, journal: Journal | None = None, quarantine: Quarantine | None = None) -> None:
        journal, quarantine = journal or Journal("", ()), quarantine or open_quarantine("", (), time.time)
        select_part = quarantine.find_readable_part
        self.nodes: CacheTable[nodes.Node] = CacheTable(nodes.read_node, select_part)
        self.slices: CacheTable[nodes.ResourceSlice | None] = CacheTable(nodes.read_resource_slice, select_part)
        """ResourceSlices. None stands for a slice that is not needed but must be counted."""
        self.pools: CacheTable[View] = CacheTable(View.from_object, select_part)
        self.learnings: CacheTable[view.LearningView] = CacheTable(view.LearningView.from_object, select_part)
        self.queue_advices: CacheTable[View] = CacheTable(View.from_object, select_part)
        self.training_jobs: CacheTable[View] = CacheTable(View.from_object, select_part)
        self.jobs: CacheTable[Document] = CacheTable(view.trim_job, select_part)
        self.namespaces: CacheTable[view.NamespaceView] = CacheTable(view.NamespaceView.from_object, select_part)
        self.local_queues: CacheTable[Document] = CacheTable(view.trim_kueue_object, select_part)
        self.cluster_queues: CacheTable[Document] = CacheTable(view.trim_kueue_object, select_part)
        self.flavors: CacheTable[Document] = CacheTable(view.trim_kueue_object, select_part)
        self.workload_priorities: CacheTable[PriorityClass] = CacheTable(PriorityClass.from_object, select_part)
        self.pod_priorities: CacheTable[PriorityClass] = CacheTable(PriorityClass.from_object, select_part)
        tables: dict[str, CacheTable[Any]] = {
            "Node": self.nodes,
            "ResourceSlice": self.slices,
            gpu_pool.KIND: self.pools,
            pool_learning.KIND: self.learnings,
            queue_advice.KIND: self.queue_advices,
            training_job.KIND: self.training_jobs,
            "Namespace": self.namespaces,
            "LocalQueue": self.local_queues,
            "ClusterQueue": self.cluster_queues,
            "ResourceFlavor": self.flavors,
            "WorkloadPriorityClass": self.workload_priorities,
            "PriorityClass": self.pod_priorities,
            **dict.fromkeys(JOB_KINDS, self.jobs),
        }
        super().__init__(tables, journal, quarantine)

    def may_exist(self, key: Key) -> bool:
        """Return whether an object may exist. It is False only for a job that is not in the cache."""
        return key.kind not in (training_job.KIND, *JOB_KINDS) or self.table(key).get(key) is not None

    @property
    def priorities(self) -> Priorities:
        """All priority classes of the cluster."""
        tables = (self.workload_priorities, self.pod_priorities)
        return Priorities(*({key.name: item for key, item in table.items()} for table in tables))

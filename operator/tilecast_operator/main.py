"""Handlers that kopf calls. Each puts its object into the cache and returns.

There are only `event` handlers. They add no finalizer and no annotation to an object, so that no deletion of a job
waits for this process. An object that they miss is listed again later. Nothing uses kopf's indices: for each indexed
object kopf wakes the tasks of all objects, which takes minutes for thousands of nodes. Optional kinds are watched only
if the settings say so.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import kopf

from tilecast import environment, untrusted
from tilecast.api import gpu_pool, pool_learning, queue_advice, training_job
from tilecast.api.base import GROUP
from tilecast.jobs import JOB_KINDS
from tilecast.spec import SpecError
from tilecast_operator import prometheus, recursion, server
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.kube import credentials, kopf_internals
from tilecast_operator.kube.watch import NodeInformer, WatchDelays
from tilecast_operator.metrics import Metrics
from tilecast_operator.objects.client import client
from tilecast_operator.objects.documents import COMPONENT
from tilecast_operator.objects.kinds import KINDS
from tilecast_operator.objects.pods import PodInformer
from tilecast_operator.settings import Settings, from_environment

WATCH_SERVER_S = 600
WATCH_CLIENT_S = 660
"""Seconds after which the client ends a watch if the server has not.

A watch is renewed every ten minutes, in case a proxy has dropped it silently.
"""
CHUNK = 500
EXIT_S = 25
"""Longest time for an orderly exit, in seconds, below the 30 s that a pod has."""
YOUNG = 10_000
"""Allocations minus deallocations at which Python searches for reference cycles.

Most objects of a request are freed without that search.
"""
THREADS = 2
"""Number of threads for handlers that are not coroutines. There are no such handlers."""

try:
    OWN = from_environment(os.environ)
    environment.apply_environment(os.environ)
except SpecError as error:
    raise SystemExit(f"error: {error}") from None


@kopf.on.startup()
async def startup(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Configure kopf, and start the workers and the server."""
    gc.collect()
    gc.freeze()  # modules stay, so later collections need not scan them
    gc.set_threshold(YOUNG)
    configure_kopf(settings, OWN)
    memo.api = client(OWN.request_timeout_s)
    memo.operator = operator = OperatorParts(OWN, memo.api, METRICS, clock=memo.api.clock)
    memo.server = await server.start_server(
        server.ListenAddress(OWN.listen_host, OWN.listen_port, OWN.tls_certificate, OWN.tls_key),
        operator.metrics.registry,
        operator.find_health_problem,
        operator.find_readiness_problem,
        operator.guard.admit_report,
        operator.observations.put,
        operator.relay.forward_report,
        operator.relay.find_client_address,
    )
    operator.start()
    cache, add = operator.cache, operator.runtime.add_task
    pace = WatchDelays(OWN.relist_s)
    nodes = NodeInformer(
        memo.api, cache.put_object, cache.remove_object, OWN.node_selector, partial(_record_response, "nodes"), pace
    )
    add(nodes.run(), "nodes")
    if OWN.read_pods:
        add(PodInformer(memo.api, operator.set_pod_usage, partial(_record_response, "pods"), pace).run(), "pods")
    if OWN.prometheus_url:
        add(prometheus.poll_steps(OWN, operator.observations), "prometheus")
        add(prometheus.poll_steps(OWN, operator.devices), "prometheus-gpus")


@kopf.on.cleanup()
async def cleanup(memo: kopf.Memo, **_: Any) -> None:
    """Stop everything that `startup` started."""
    await memo.operator.stop()
    await memo.server.cleanup()
    await memo.api.close()


@kopf.on.login()
async def login(memo: kopf.Memo, **kwargs: Any) -> kopf.ConnectionInfo | None:
    """Log in to the API server for kopf and for the operator's own client, as the pod or with a kubeconfig."""
    info = credentials.read_credentials(kwargs)
    memo.api.log_in(lambda: credentials.to_connection(credentials.read_credentials(kwargs)))
    return info


async def update_cache(type: str | None, memo: kopf.Memo, body: kopf.Body, **_: Any) -> None:  # noqa: A002
    """Pass the object of a watch event to the cache."""
    cache = memo.operator.cache
    (cache.remove_object if type == "DELETED" else cache.put_object)(body)


def iterate_watched_kinds(settings: Settings) -> Iterable[str]:
    """Yield the kinds of objects that are watched through kopf.

    Nodes and pods are not among them, because kopf would parse every heartbeat.
    """
    yield from (gpu_pool.KIND, training_job.KIND)
    if settings.jobs:
        yield from JOB_KINDS
    if settings.learning:
        yield pool_learning.KIND
    if settings.queue:
        yield queue_advice.KIND
    if settings.jobs or settings.learning or settings.queue or settings.namespace_selector:
        yield "Namespace"
    if settings.jobs and settings.queue:
        yield "PriorityClass"
    if settings.read_resource_slices:
        yield "ResourceSlice"
    if settings.read_kueue:
        yield from ("ClusterQueue", "ResourceFlavor", *(("LocalQueue",) if settings.jobs else ()))
        if settings.jobs and settings.queue:
            yield "WorkloadPriorityClass"


for _name in iterate_watched_kinds(OWN):
    _kind = KINDS[_name]
    if _kind.is_any_version:
        kopf.on.event(_kind.group, _kind.plural)(update_cache)
    else:
        kopf.on.event(_kind.group, _kind.version, _kind.plural)(update_cache)

METRICS = Metrics()


def _record_response(resource: str) -> None:
    """Record that the API server answered a list or a watch of a resource."""
    METRICS.watched.labels(resource).set_to_current_time()


kopf_internals.install_replacements(OWN.relist_s, _record_response, untrusted.empty_containers_below)
faulthandler.enable()  # a signal that kills the process logs what it interrupts
recursion.set_recursion_limit()


class NoDiffBaseStorage(kopf.DiffBaseStorage):
    """Storage of kopf that keeps no copy of the last handled state of an object.

    kopf would copy every object of every event, including its status. `event` handlers never use the copy.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return an empty record."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Return None, because there is no record."""
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""


def configure_kopf(kopf_settings: kopf.OperatorSettings, operator_settings: Settings) -> None:
    """Configure kopf to write nothing to users' objects and to retry without end."""
    kopf_settings.peering.standalone = True
    kopf_settings.posting.enabled = False
    kopf_settings.posting.loggers = False
    kopf_settings.posting.reporting_component = COMPONENT
    kopf_settings.posting.reporting_instance = operator_settings.instance
    kopf_settings.watching.server_timeout = WATCH_SERVER_S
    kopf_settings.watching.client_timeout = WATCH_CLIENT_S
    kopf_settings.watching.chunk_size = CHUNK
    kopf_settings.networking.request_timeout = operator_settings.request_timeout_s
    kopf_settings.networking.error_backoffs = kopf_internals.EndlessBackoffs()
    kopf_settings.execution.max_workers = THREADS
    # No handler has state to keep or a deletion to delay. If one ever does, it is kept under our own name.
    kopf_settings.persistence.finalizer = f"{GROUP}/finalizer"
    kopf_settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    kopf_settings.persistence.diffbase_storage = NoDiffBaseStorage()
    kopf_settings.process.ultimate_exiting_timeout = EXIT_S
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)

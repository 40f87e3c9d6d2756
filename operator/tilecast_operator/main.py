"""What kopf calls. Every handler puts what it was given into the cache and returns.

Only `event` handlers watch objects: they put no finalizer and no annotation on anything, so that no job waits for this
process to be deleted, and whatever they miss is seen again. Nothing is indexed: kopf wakes every object for each one
that is indexed, which takes minutes for thousands of nodes. What is optional is watched only where the settings say so.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import kopf

from tilecast import environment
from tilecast.api import gpu_pool, training_job
from tilecast.api.base import GROUP
from tilecast.jobs import JOB_KINDS
from tilecast.spec import SpecError
from tilecast_operator import prometheus, server
from tilecast_operator.assembly import Assembly
from tilecast_operator.cluster import kopf_internals
from tilecast_operator.cluster.api import Api, Connection
from tilecast_operator.cluster.documents import COMPONENT
from tilecast_operator.cluster.informer import PodInformer
from tilecast_operator.cluster.kinds import KINDS
from tilecast_operator.metrics import Metrics
from tilecast_operator.settings import Settings, from_environment

WATCH_SERVER_S = 600
WATCH_CLIENT_S = 660
"""A watch is begun anew every ten minutes, in case a proxy dropped it without a word."""
CHUNK = 500
EXIT_S = 25
"""Below the 30 s that a pod is given."""
RECURSION_LIMIT = 60_000
"""The API server takes documents that are nested 10,000 deep, and Python reads 1,000: one such job, and nobody's would
be seen again. A level takes up to four calls here."""
THREADS = 2
"""For handlers that are no coroutines; there are none."""

try:
    OWN = from_environment(os.environ)
    environment.apply(os.environ)
except SpecError as error:
    raise SystemExit(f"error: {error}") from None


@kopf.on.startup()
async def startup(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Configure kopf, start the workers and the server."""
    configure(settings, OWN)
    memo.api = Api(OWN.request_timeout_s)
    memo.operator = operator = Assembly(OWN, memo.api, Metrics())
    memo.server = await server.start(
        OWN.listen_host,
        OWN.listen_port,
        operator.metrics.registry,
        operator.unhealthy,
        operator.unready,
        operator.observations.put,
    )
    operator.start()
    memo.tasks = []
    if OWN.read_pods:
        memo.tasks.append(asyncio.create_task(PodInformer(memo.api, operator.see_pods).run(), name="pods"))
    if OWN.prometheus_url:
        memo.tasks.append(asyncio.create_task(prometheus.poll(OWN, operator.observations), name="prometheus"))


@kopf.on.cleanup()
async def cleanup(memo: kopf.Memo, **_: Any) -> None:
    """Stop everything that `startup` started."""
    for task in memo.tasks:
        task.cancel()
    await memo.operator.stop()
    await memo.server.cleanup()
    await memo.api.close()


@kopf.on.login()
async def login(memo: kopf.Memo, **kwargs: Any) -> kopf.ConnectionInfo | None:
    """Log in for kopf and for the writer alike: as the pod, or with a kubeconfig."""
    found = _credentials(kwargs)
    memo.api.connect(lambda: _connection(_credentials(kwargs)))
    return found


async def event(type: str | None, memo: kopf.Memo, body: kopf.Body, **_: Any) -> None:  # noqa: A002
    """An object is there, or gone."""
    cache = memo.operator.cache
    (cache.lose if type == "DELETED" else cache.see)(body)


def watched(settings: Settings) -> Iterable[str]:
    """The kinds that are watched."""
    yield from ("Node", gpu_pool.KIND, training_job.KIND)
    if settings.jobs:
        yield from (*JOB_KINDS, "Namespace")
    if settings.read_resource_slices:
        yield "ResourceSlice"
    if settings.read_kueue:
        yield from ("ClusterQueue", "ResourceFlavor", *(("LocalQueue",) if settings.jobs else ()))


for _name in watched(OWN):
    _kind = KINDS[_name]
    if _kind.is_any_version:
        kopf.on.event(_kind.group, _kind.plural)(event)
    else:
        kopf.on.event(_kind.group, _kind.version, _kind.plural)(event)

kopf_internals.install(OWN.relist_s)
sys.setrecursionlimit(max(sys.getrecursionlimit(), RECURSION_LIMIT))


def configure(kopf_settings: kopf.OperatorSettings, own: Settings) -> None:
    """Have kopf leave no trace on anybody's object, and give up nothing."""
    kopf_settings.peering.standalone = True
    kopf_settings.posting.enabled = False
    kopf_settings.posting.loggers = False
    kopf_settings.posting.reporting_component = COMPONENT
    kopf_settings.posting.reporting_instance = own.instance
    kopf_settings.watching.server_timeout = WATCH_SERVER_S
    kopf_settings.watching.client_timeout = WATCH_CLIENT_S
    kopf_settings.watching.chunk_size = CHUNK
    kopf_settings.networking.request_timeout = own.request_timeout_s
    kopf_settings.networking.error_backoffs = kopf_internals.Backoffs()
    kopf_settings.execution.max_workers = THREADS
    # No handler has state to keep or a deletion to delay; should one ever, it would be under our own name.
    kopf_settings.persistence.finalizer = f"{GROUP}/finalizer"
    kopf_settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    kopf_settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    kopf_settings.process.ultimate_exiting_timeout = EXIT_S
    if own.node_selector:
        kopf_settings.watching.label_selectors["nodes"] = own.node_selector
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)


def _credentials(kwargs: dict[str, Any]) -> kopf.ConnectionInfo | None:
    """Those of the pod or of the kubeconfig; for a kubeconfig that calls a program, the official client is asked."""
    found = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
    has_any = found and (found.token or found.username or found.certificate_path or found.certificate_data)
    return kopf.login_via_client(**kwargs) if found and not has_any and find_spec("kubernetes") else found


def _connection(found: kopf.ConnectionInfo | None) -> Connection | None:
    if found is None:
        return None
    return Connection(found.server, found.as_http_headers(), found.as_ssl_context(), found.proxy_url)

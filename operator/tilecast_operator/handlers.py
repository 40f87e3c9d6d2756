"""What kopf calls, and the only place that imports it. Every handler stores what it was given and returns.

Only `event` handlers watch objects: they put no finalizer and no annotation on anything, so that no job waits for this
process to be deleted, and whatever they miss is seen again. Nothing is indexed: kopf wakes every object for each one
that is indexed, which takes minutes for thousands of nodes. What is optional is watched only where the settings say so.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import kopf
from kopf._cogs.aiokits import aiotoggles
from kopf._cogs.clients import errors, watching

from tilecast import environment
from tilecast.api.base import GROUP, VERSION
from tilecast.jobs import JOB_KINDS
from tilecast.spec import SpecError
from tilecast_operator import prometheus, server, settings, watches
from tilecast_operator.api import Api, Connection
from tilecast_operator.pods import PodFeed
from tilecast_operator.reconcile import Corridor
from tilecast_operator.report.events import COMPONENT
from tilecast_operator.report.metrics import Metrics

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
    OWN = settings.from_environment(os.environ)
    environment.apply(os.environ)
except SpecError as error:
    raise SystemExit(f"error: {error}") from None


@kopf.on.startup()
async def startup(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Configure kopf, start the workers and the server."""
    own = OWN
    _configure(settings, own)
    memo.api = Api(own.request_timeout_s)
    memo.corridor = corridor = Corridor(own, memo.api, Metrics())
    memo.server = await server.start(
        own.listen_host,
        own.listen_port,
        corridor.metrics.registry,
        corridor.unhealthy,
        corridor.unready,
        corridor.put_observation,
    )
    corridor.start()
    feed = PodFeed(memo.api, corridor.see_pods)
    memo.pods = asyncio.create_task(feed.run(), name="pods") if own.read_pods else None
    memo.prometheus = (
        asyncio.create_task(prometheus.poll(own, corridor), name="prometheus") if own.prometheus_url else None
    )


@kopf.on.cleanup()
async def cleanup(memo: kopf.Memo, **_: Any) -> None:
    """Stop everything that `startup` started."""
    for task in (memo.pods, memo.prometheus):
        if task is not None:
            task.cancel()
    await memo.corridor.stop()
    await memo.server.cleanup()
    await memo.api.close()


@kopf.on.login()
async def login(memo: kopf.Memo, **kwargs: Any) -> kopf.ConnectionInfo | None:
    """Log in for kopf and for the writer alike: as the pod, or with a kubeconfig."""
    found = _credentials(kwargs)
    memo.api.connect(lambda: _connection(_credentials(kwargs)))
    return found


@kopf.on.event("", "v1", "nodes")
async def node_event(type: str | None, memo: kopf.Memo, body: kopf.Body, **_: Any) -> None:  # noqa: A002
    """A node is there, or gone."""
    act = memo.corridor.lose_node if type == "DELETED" else memo.corridor.see_node
    act(body)


@kopf.on.event(GROUP, VERSION, "gpupools")
async def pool_event(type: str | None, memo: kopf.Memo, body: kopf.Body, **_: Any) -> None:  # noqa: A002
    """A GPUPool is there, or gone."""
    act = memo.corridor.lose if type == "DELETED" else memo.corridor.see
    act(body)


@kopf.on.event(GROUP, VERSION, "trainingjobs")
async def job_event(type: str | None, memo: kopf.Memo, body: kopf.Body, **_: Any) -> None:  # noqa: A002
    """A TrainingJob is there, or gone."""
    act = memo.corridor.lose if type == "DELETED" else memo.corridor.see
    act(body)


_FAILURES = (errors.APIError, watching.WatchingError, ValueError, RecursionError)
_watch = watching.continuous_watch
watching.continuous_watch = watches.enduring(_watch, watching.Bookmark.LISTED, _FAILURES, OWN.relist_s)


class _Toggles(aiotoggles.ToggleSet):
    """Wakes those who wait for its state when the state changes. Kopf's own wakes the task of every object for every
    object of the first list, which took minutes for thousands of nodes."""

    async def make_toggle(self, value: bool = False, /, *, name: str | None = None) -> aiotoggles.Toggle:
        toggle = aiotoggles.Toggle(value, name=name, condition=self._condition)
        await self._change(lambda: self._toggles.add(toggle))
        return toggle

    async def drop_toggle(self, toggle: aiotoggles.Toggle) -> None:
        await self._change(lambda: self._toggles.discard(toggle))

    async def _change(self, act: Callable[[], None]) -> None:
        async with self._condition:
            before = self.is_on()
            act()
            if self.is_on() != before:
                self._condition.notify_all()


aiotoggles.ToggleSet = _Toggles  # type: ignore[misc]
sys.setrecursionlimit(max(sys.getrecursionlimit(), RECURSION_LIMIT))


async def slice_event(type: str | None, memo: kopf.Memo, body: kopf.Body, **_: Any) -> None:  # noqa: A002
    """A ResourceSlice is there, or gone."""
    act = memo.corridor.lose_slice if type == "DELETED" else memo.corridor.see_slice
    act(body)


async def kueue_event(type: str | None, memo: kopf.Memo, body: kopf.Body, **_: Any) -> None:  # noqa: A002
    """A LocalQueue, ClusterQueue or ResourceFlavor is there, or gone."""
    act = memo.corridor.lose_kueue if type == "DELETED" else memo.corridor.see_kueue
    act(body)


async def existing_event(type: str | None, memo: kopf.Memo, body: kopf.Body, **_: Any) -> None:  # noqa: A002
    """A job of another kind is there, or gone."""
    act = memo.corridor.jobs.lose if type == "DELETED" else memo.corridor.jobs.see
    act(body)


async def namespace_event(
    type: str | None,  # noqa: A002
    memo: kopf.Memo,
    name: str,
    labels: kopf.Labels,
    **_: Any,
) -> None:
    """A namespace is there, or gone; its label may ask for advice."""
    if type == "DELETED":
        memo.corridor.jobs.lose_namespace(name)
    else:
        memo.corridor.jobs.see_namespace(name, labels)


if OWN.jobs:
    for _kind in JOB_KINDS.values():
        kopf.on.event(_kind.group, _kind.version, _kind.plural)(existing_event)
    kopf.on.event("", "v1", "namespaces")(namespace_event)
if OWN.read_resource_slices:
    kopf.on.event("resource.k8s.io", "resourceslices")(slice_event)
if OWN.read_kueue:
    for _plural in ("clusterqueues", "resourceflavors", *(("localqueues",) if OWN.jobs else ())):
        kopf.on.event("kueue.x-k8s.io", _plural)(kueue_event)


def _configure(kopf_settings: kopf.OperatorSettings, own: settings.Settings) -> None:
    kopf_settings.peering.standalone = True
    kopf_settings.posting.enabled = False
    kopf_settings.posting.loggers = False
    kopf_settings.posting.reporting_component = COMPONENT
    kopf_settings.posting.reporting_instance = own.instance
    kopf_settings.watching.server_timeout = WATCH_SERVER_S
    kopf_settings.watching.client_timeout = WATCH_CLIENT_S
    kopf_settings.watching.chunk_size = CHUNK
    kopf_settings.networking.request_timeout = own.request_timeout_s
    kopf_settings.networking.error_backoffs = watches.Backoffs()
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

"""Detect Kueue's API version and release, and its support for jobs that wait for Tilecast.

Kueue's feature gates are not part of any API. But the effect of the gate `AdmissionGatedBy` can be tested: with it,
Kueue's webhook refuses a Workload whose list of gates has the same name twice. Without it, Kueue does not read the
list. A merge patch with `dryRun` tests this and stores nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from tilecast.api.fields import Document, as_mapping, value_at_path
from tilecast.jobs import ADMISSION_GATES, ADVISOR, HOLD_QUEUE, NEXT_QUEUE, QUEUE, kueue
from tilecast_operator.controllers.runtime import SharedContext
from tilecast_operator.kube.client import UNREACHABLE, ApiError, is_webhook_down
from tilecast_operator.kube.discovery import ServedApis
from tilecast_operator.kube.documents import EventContent
from tilecast_operator.kube.kinds import Key
from tilecast_operator.objects.kinds import KINDS, KUEUE

log = logging.getLogger("tilecast")

GATE = "AdmissionGatedBy"
Gate: TypeAlias = Literal["present", "absent", "unknown"]
REMEDY = (
    f"switch {GATE} on in Kueue (alpha and off in 0.17 and 0.18, on from 0.19), or let the job wait in a held queue: "
    f"label {QUEUE}: {HOLD_QUEUE}, annotation {NEXT_QUEUE}: QUEUE"
)
"""Remedy if the gate is off."""

TRUST_S = 5.0
"""Seconds for which a positive test of the gate is trusted. A restart of Kueue takes longer."""

_CRD = Key("CustomResourceDefinition", "", f"workloads.{KUEUE}")
_LABELS = ("app.kubernetes.io/version", "helm.sh/chart")
_TWICE = {"metadata": {"annotations": {ADMISSION_GATES: f"{ADVISOR},{ADVISOR}"}}}
"""Patch that Kueue refuses if it reads the list of gates."""
_SAYS = {
    "present": f"the feature gate {GATE} is on; jobs in mode Initial may wait behind it, or in a held queue",
    "absent": f"the feature gate {GATE} is off; a job that carries {ADMISSION_GATES} is not held by it and is let go "
    f"as it is: {REMEDY}",
    "unknown": f"whether the feature gate {GATE} is on is asked with the first Workload; until it is known, jobs in "
    "mode Initial are placed from a held queue alone",
}


@dataclass(frozen=True, slots=True)
class KueueFeatures:
    """Version and features of the cluster's Kueue."""

    served: str = ""
    """Version of Kueue's API that the API server prefers. Empty without Kueue."""
    release: str = ""
    """Release of Kueue from the labels of its CRDs. Empty if no label states it."""
    stop_policy: bool = False
    """Whether a LocalQueue can be stopped."""
    gate: Gate = "unknown"
    """Whether a job waits as long as its list of gates contains Tilecast's name."""


class KueueDetector:
    """Detector of Kueue's version and features. Writes an Event when they change. Belongs to one event loop."""

    def __init__(self, context: SharedContext, discovery: ServedApis) -> None:
        self._context = context
        self._discovery = discovery
        self._uid = ""
        """UID of the CRD that Events are about."""
        self._present_s = -math.inf
        """Time at which Kueue last showed that it reads the list of gates."""
        self.features = KueueFeatures()
        self._posted = KueueFeatures()
        """Features that this replica reported last."""

    async def run_checks(self) -> None:
        """Detect the features of Kueue every `watch_check_s` seconds, until cancelled."""
        await self._context.client.wait_for_login()
        while True:
            try:
                await self.check_features()
            except Exception as error:
                log.warning("what Kueue can do is not known: %s", error or type(error).__name__)
            await asyncio.sleep(self._context.settings.watch_check_s)

    async def check_features(self) -> None:
        """Detect the version, release and features of Kueue, and record them.

        Raises:
            ApiError, OSError: The API server did not answer.
        """
        version = await self._discovery.served_version(KUEUE, is_refresh=True)
        if version is None:
            await self._record_features(KueueFeatures())
            return
        workload, queue = [await self._get_crd(plural) for plural in ("workloads", "localqueues")]
        self._uid = str(value_at_path(workload, ("metadata", "uid")) or "")
        before = self.features.gate if self.features.served else "unknown"
        features = KueueFeatures(version, _read_release(workload), _has_stop_policy(queue, version), before)
        for some in await self._list_items(version, "workloads", limit="1"):
            gate = await self._probe_gate(await self.find_workload_path(some))
            features = replace(features, gate=before if gate == "unknown" else gate)
        await self._record_features(features)

    async def list_workloads(self, namespace: str, uid: str) -> list[Document] | None:
        """Return the Workloads of a job. Return None if there is no Kueue. Raise the errors of `check_features`."""
        version = await self._discovery.served_version(KUEUE)
        if version is None:
            return None
        return await self._list_items(version, "workloads", namespace, labelSelector=f"{KUEUE}/job-uid={uid}")

    async def find_workload_path(self, workload: Document) -> str:
        """Return the path of a Workload in the API."""
        metadata = workload["metadata"]
        return _make_kueue_path(
            await self._discovery.served_version(KUEUE) or "", "workloads", metadata["namespace"], metadata["name"]
        )

    async def check_gate(self, workloads: Sequence[Document]) -> Gate:
        """Return the state of Kueue's feature gate, tested on a job's Workloads.

        Raise the errors of `check_features`.
        """
        is_fresh = time.monotonic() - self._present_s < TRUST_S
        if not is_fresh and not workloads and self.features.gate == "unknown":
            # Kueue may be restarting and have yet to create the job's own Workload.
            workloads = await self._list_items(
                await self._discovery.served_version(KUEUE) or "", "workloads", limit="1"
            )
        if is_fresh or not workloads:
            return self._apply_gate_setting("present" if is_fresh else self.features.gate)
        gate = await self._probe_gate(await self.find_workload_path(workloads[0]))
        if gate not in ("unknown", self.features.gate):
            await self._record_features(replace(self.features, gate=gate))
        return self._apply_gate_setting(gate)

    async def is_queue_held(self, namespace: str, queue: str) -> bool:
        """Return whether a LocalQueue is stopped or missing, so that Kueue admits no job from it.

        Raise the errors of `check_features`.
        """
        version = await self._discovery.served_version(KUEUE) or ""
        queues = await self._list_items(version, "localqueues", namespace, fieldSelector=f"metadata.name={queue}")
        return all(kueue.is_stopped(item) for item in queues)

    def _apply_gate_setting(self, gate: Gate) -> Gate:
        """Return the state of the gate, with the setting `kueue_admission_gate` applied.

        The setting "absent" overrides every detected state. The setting "present" overrides only an unknown state.
        """
        setting = self._context.settings.kueue_admission_gate
        if setting == "absent":
            return "absent"
        return "present" if setting == "present" and gate == "unknown" else gate

    async def _probe_gate(self, path: str) -> Gate:
        """Return the state of the feature gate, tested by a dry-run write to the Workload at `path`."""
        try:
            await self._context.client.dry_run(path, _TWICE)
        except ApiError as error:
            if is_webhook_down(error):
                raise
            if ADMISSION_GATES not in str(error):
                return "unknown"
            self._present_s = time.monotonic()
            return "present"
        self._present_s = -math.inf
        return "absent"

    async def _record_features(self, features: KueueFeatures) -> None:
        """Store the features and show them in metrics. If they have changed, the leader writes an Event."""
        self.features = features
        self._context.metrics.set_kueue_metrics(features.served, features.release, features.stop_policy, features.gate)
        if not features.served:
            self._posted = features
        if features == self._posted or not self._uid or not self._context.leadership.is_leader:
            return
        if not self._context.settings.place:  # no job waits for Tilecast
            return
        name = f"Kueue {features.release}".rstrip()
        held = "" if features.stop_policy else "; its LocalQueues cannot be held"
        kind: Literal["Warning", "Normal"] = "Warning" if features.gate == "absent" else "Normal"
        note = EventContent(kind, "KueueFeatures", f"{name} ({features.served}): {_SAYS[features.gate]}{held}")
        log.info("%s", note.text)
        try:
            await self._context.writer.post_event(_CRD, self._uid, note, is_change=bool(self._posted.served))
            self._posted = features
        except (ApiError, *UNREACHABLE) as error:
            # A job may wait for what was found. A failed Event is no reason to release the job without advice.
            log.warning("%s: Event not written: %s", _CRD, error or type(error).__name__)

    async def _get_crd(self, plural: str) -> Document:
        path = KINDS["CustomResourceDefinition"].path()
        listed = await self._context.client.get(path, {"fieldSelector": f"metadata.name={plural}.{KUEUE}"})
        return next(iter(listed.get("items") or ()), {})

    async def _list_items(self, version: str, plural: str, namespace: str = "", **query: str) -> list[Document]:
        listed = await self._context.client.get(_make_kueue_path(version, plural, namespace), query)
        return list(listed.get("items") or ())


def _make_kueue_path(version: str, plural: str, namespace: str = "", name: str = "") -> str:
    scope = f"/namespaces/{namespace}" if namespace else ""
    return f"/apis/{KUEUE}/{version}{scope}/{plural}" + (f"/{name}" if name else "")


def _read_release(crd: Document) -> str:
    """Return the release of Kueue in the labels of a CRD."""
    labels = as_mapping(value_at_path(crd, ("metadata", "labels")))
    text = next((str(labels[name]) for name in _LABELS if labels.get(name)), "")
    return text.removeprefix("kueue-").removeprefix("v")


def _has_stop_policy(crd: Document, version: str) -> bool:
    schemas = (item for item in value_at_path(crd, ("spec", "versions")) or () if item.get("name") == version)
    path = ("schema", "openAPIV3Schema", "properties", "spec", "properties", "stopPolicy")
    return any(value_at_path(item, path) is not None for item in schemas)

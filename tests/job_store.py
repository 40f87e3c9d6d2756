"""A store of jobs of other kinds with a simulated Kueue, and an operator that serves it."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from operator_store import QUICK, TIMINGS, Store, patched
from tilecast import nodes
from tilecast.advice import Advice, Request, advise
from tilecast.api import documents
from tilecast.hardware import Pool
from tilecast.jobs import ADMISSION_GATES, ADVISOR, JOB_KINDS
from tilecast_operator.assembly import OperatorParts
from tilecast_operator.kube.client import ApiError
from tilecast_operator.metrics import Metrics
from tilecast_operator.settings import Settings
from tilecast_operator.timings import ControllerDelays

EXAMPLES = Path(__file__).parent.parent / "examples"
PLACING = replace(QUICK, jobs=True, place=True)
JOBS = "/apis/batch/v1/namespaces/default/jobs"
KUEUE = "/apis/kueue.x-k8s.io"
WORKLOADS = f"{KUEUE}/v1beta2/namespaces/default/workloads"
H100 = "NVIDIA-H100-80GB-HBM3"


class JobStore(Store):
    """Store that also takes JSON patches and serves one Workload for each queued job.

    It behaves like a Kueue whose feature gate AdmissionGatedBy is on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.workloads: dict[str, dict[str, Any]] = {}
        self.has_kueue = True
        self.gate: ApiError | None = ApiError(403, f"denied: metadata.annotations[{ADMISSION_GATES}]: Invalid value")
        """Error of Kueue's webhook for a Workload that names a gate twice."""
        self.queues: dict[str, dict[str, Any]] = {}
        """Specs of LocalQueues by name."""
        self.groups = {f"/apis/{kind.api_version}" for kind in JOB_KINDS.values()}
        self.patches: list[str] = []
        self.refuse: list[ApiError] = []

    async def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        await asyncio.sleep(0)
        self.before_write(path)
        if self.refuse:
            raise self.refuse.pop(0)
        table = self.workloads if path.startswith(WORKLOADS) else self.objects
        key = path.rpartition("/")[2] if table is self.workloads else path
        if key not in table:
            raise ApiError(404, "not found")
        document = table[key]
        if operations[0]["value"] != document["metadata"]["resourceVersion"]:
            raise ApiError(409, "changed")
        document = patched(document, operations)
        self.patches.append(path)
        if table is self.workloads:
            self.workloads[key] = document
            return document
        return self.put(path, document)

    async def dry_run(self, path: str, document: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        assert document["metadata"]["annotations"] == {ADMISSION_GATES: f"{ADVISOR},{ADVISOR}"}
        if self.gate is not None:
            raise self.gate
        return self.workloads[path.rpartition("/")[2]]

    async def get(self, path: str, query: Any = None) -> dict[str, Any]:
        if path in self.objects:
            await asyncio.sleep(0)
            return copy.deepcopy(self.objects[path])
        if path.endswith("/customresourcedefinitions"):
            return {"items": [crd(query["fieldSelector"].removeprefix("metadata.name="))]}
        if path.endswith("/workloads") and path != WORKLOADS:
            return {"items": list(self.workloads.values())[:1]}
        if path.endswith("/localqueues"):
            spec = self.queues.get(query["fieldSelector"].removeprefix("metadata.name="))
            return {"items": [] if spec is None else [{"spec": spec}]}
        if query and "limit" in query:
            return await super().get(path, query)
        if path == WORKLOADS:
            uid = query["labelSelector"].partition("=")[2]
            return {"items": [item for item in self.workloads.values() if item["metadata"]["labels"]["uid"] == uid]}
        if path == KUEUE and self.has_kueue:
            return {"preferredVersion": {"version": "v1beta2"}}
        if path in self.groups:
            return {"kind": "APIResourceList"}
        if path.startswith("/apis/") and not path.startswith("/apis/tilecast.dev/"):
            raise ApiError(404, "not found")
        return await super().get(path, query)

    async def apply(self, path: str, document: Any, *, force: bool = True) -> dict[str, Any]:
        body = await super().apply(path, document, force=force)
        if not path.startswith(JOBS):
            return body
        # Applied fields belong to our field manager from now on.
        fields = {"f:metadata": {"f:annotations": {f"f:{key}": {} for key in document["metadata"]["annotations"]}}}
        ours = {"manager": "tilecast-advisor", "operation": "Apply", "fieldsV1": fields}
        if body["metadata"].get("managedFields") == [ours]:
            return body
        return self.put(path, {**body, "metadata": {**body["metadata"], "managedFields": [ours]}})

    def job(self, name: str = "job", new_name: str = "a", **annotations: str | None) -> dict[str, Any]:
        """Store an example and return it; annotations are named by the last part of their key, None removes one."""
        (document,) = documents.load_documents((EXAMPLES / "existing" / f"{name}.yaml").read_text())
        document["metadata"] |= {"name": new_name, "namespace": "default", "creationTimestamp": "2026-01-01T00:00:00Z"}
        for key, value in annotations.items():
            document["metadata"]["annotations"].pop(f"tilecast.dev/{key}", None)
            if value is not None:
                document["metadata"]["annotations"][f"tilecast.dev/{key}"] = value
        return self.put(f"{JOBS}/{new_name}", document)

    def workload(self, job: Mapping[str, Any]) -> None:
        spec = {"podSets": [{"name": "main", "template": {"spec": {}}}]}
        labels = {"uid": job["metadata"]["uid"]}
        meta = {"name": f"for-{job['metadata']['name']}", "namespace": "default", "labels": labels}
        self.workloads[meta["name"]] = {"metadata": {**meta, "resourceVersion": "1"}, "spec": spec}

    def decide(self, kind: str, name: str = "a", message: str = "") -> None:
        """Set the condition that Kueue's decision about a job puts on its Workload."""
        conditions = [{"type": kind, "status": "True", "message": message}]
        workload = self.workloads[f"for-{name}"]
        self.workloads[f"for-{name}"] = {**workload, "status": {"conditions": conditions}}

    def admit(self, running: OperatorParts, name: str = "a") -> None:
        """Have Kueue admit a job and start it."""
        self.decide("Admitted", name)
        body = copy.deepcopy(self.now(name))
        body["spec"]["suspend"] = False
        running.cache.put_object(self.put(f"{JOBS}/{name}", body))

    def now(self, name: str = "a") -> dict[str, Any]:
        return self.objects[f"{JOBS}/{name}"]

    def annotations(self, name: str = "a") -> dict[str, str]:
        return dict(self.now(name)["metadata"].get("annotations", {}))

    def events_seen(self) -> list[tuple[str, str]]:
        return sorted((item["reason"], item["message"]) for item in self.events.values())


def crd(name: str) -> dict[str, Any]:
    """Return the parts of one of Kueue's CRDs that the operator reads."""
    schema = {"properties": {"spec": {"properties": {"stopPolicy": {"type": "string"}}}}}
    versions = [{"name": "v1beta2", "schema": {"openAPIV3Schema": schema}}]
    metadata = {"name": name, "uid": "crd", "labels": {"app.kubernetes.io/version": "v0.18.2"}}
    return {"metadata": metadata, "spec": {"versions": versions}}


@asynccontextmanager
async def serving(
    store: JobStore,
    settings: Settings = PLACING,
    advisor: Callable[[Request, Sequence[Pool]], Advice] = advise,
    timings: ControllerDelays = TIMINGS,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[OperatorParts]:
    """Run an operator that knows the pools of the example cluster."""
    running = OperatorParts(settings, store, Metrics(), advisor, clock, timings=timings)
    everyone, own, slices = nodes.parse_objects((EXAMPLES / "clusters" / "mixed.yaml").read_text())
    assert not own and not slices
    store.node_count = len(everyone)
    for document in everyone:
        running.cache.put_object(document)
    running.start()
    await until(lambda: running.find_readiness_problem() is None, "the pools")
    try:
        yield running
    finally:
        await running.stop()


async def until(holds: Callable[[], object], what: str) -> None:
    for _ in range(12_000):
        if holds():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"waited in vain for {what}")


def training_job(name: str, created: str = "2026-01-01T00:00:00Z", **spec: Any) -> dict[str, Any]:
    target = {"apiVersion": "batch/v1", "kind": "Job", "name": "a"}
    training = {"globalBatchSize": 1024, "precision": "fp16"}
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "default", "creationTimestamp": created},
        "spec": {"model": {"preset": "resnet-50"}, "training": training, "targetRef": target, **spec},
    }

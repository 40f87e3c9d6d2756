"""The kind TrainJob of Kubeflow Trainer, API trainer.kubeflow.org/v1alpha1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilecast.api.fields import Document, FieldChange, Path, value_at_path
from tilecast.jobs.interface import (
    RANDOM_PART,
    Job,
    JobKind,
    Placement,
    Pods,
    add_tolerations,
    merge_node_selector,
    read_pod_template,
    remove_advised_selector,
)
from tilecast.jobs.keys import ADVISOR
from tilecast.jobs.quantities import count_requested_gpus, has_any_count
from tilecast.jobs.shapes import POD, RESOURCES, Shape, read_count_at, require_shape
from tilecast.nodes import gpu_resource

_STEP = ("template", "metadata", "labels", "trainer.kubeflow.org/trainjob-ancestor-step")
_JOBS: Shape = {"spec": {"replicatedJobs": [{"template": {"spec": {"template": {"spec": POD}}}}]}}
_SPEC: Shape = {
    "trainer": {"command": [str], "args": [str], "resourcesPerNode": RESOURCES},
    "podTemplateOverrides": [{"spec": POD}],
    "runtimePatches": [{"trainingRuntimeSpec": {"template": _JOBS}}],
}


class TrainJob(JobKind):
    """Support for a TrainJob: `numNodes` pods with a template of its training runtime. `spec.trainer` is immutable."""

    kind = "TrainJob"
    plural = "trainjobs"
    api_version = "trainer.kubeflow.org/v1alpha1"
    pod_label = "jobset.sigs.k8s.io/jobset-name"
    has_jobs = True
    pod_names = f"$name-($groups)-[0-9]+-[0-9]+-{RANDOM_PART}"
    runtimes = ("trainingruntimes", "clustertrainingruntimes")
    finished = ("Complete", "Failed")
    processes = ("spec", "trainer", "numProcPerNode")
    gpu_field = "spec.trainer.resourcesPerNode.limits, or to its runtime"
    tested = "Trainer 2.1 to 2.3"
    placed_by = "`spec.podTemplateOverrides`; from 2.2 on `spec.runtimePatches` under Tilecast's own manager"

    def pods(self, document: Document, runtime: Document | None) -> Iterator[Pods]:
        spec = document["spec"]
        require_shape(spec, _SPEC, ("spec",))
        trainer = spec.get("trainer") or {}
        base_spec = ((runtime or {}).get("spec")) or {}
        require_shape(base_spec, {"template": _JOBS}, ("runtime",))
        replicated = _find_trainer_job(base_spec)
        pod = value_at_path(replicated, ("template", "spec", "template", "spec")) or {}
        container: Document = next((item for item in pod.get("containers") or () if item.get("name") == "node"), {})
        resources = trainer.get("resourcesPerNode") or container.get("resources")
        usual = read_count_at({"runtime": base_spec}, ("runtime", "mlPolicy", "numNodes"))
        count = read_count_at(document, ("spec", "trainer", "numNodes"), usual)
        name = str(replicated.get("name", "node"))
        over = [item.get("spec") or {} for item in spec.get("podTemplateOverrides") or ()]
        over += [
            value_at_path(job, ("template", "spec", "template", "spec")) or {}
            for patch in spec.get("runtimePatches") or ()
            for job in value_at_path(patch, ("trainingRuntimeSpec", "template", "spec", "replicatedJobs")) or ()
            if job.get("name") == name
        ]
        base = read_pod_template(name, (), count, pod)
        own: dict[str, str] = {}
        tolerations = base.tolerations
        for item in over:
            own |= item.get("nodeSelector") or {}
            tolerations = tuple(item.get("tolerations") or tolerations)
        yield Pods(
            name=name,
            path=(),
            count=count,
            gpus=count_requested_gpus(resources),
            node_selector={**base.node_selector, **own},
            pinned=base.node_selector,
            affinity=base.affinity,
            tolerations=tolerations,
            priority_class=_find_priority_class(base_spec),
            scheduler=base.scheduler,
            claims=base.claims,
        )

    def is_active(self, status: Document) -> bool:
        return has_any_count(status.get("jobsStatus") or (), "active", "ready", "succeeded", "failed")

    def list_resize_changes(self, document: Document, pods: int) -> list[FieldChange]:
        return [FieldChange(("spec", "trainer", "numNodes"), pods)]

    def find_training_runtime(self, document: Document) -> tuple[str, str] | None:
        kind, name = (value_at_path(document, ("spec", "runtimeRef", key)) for key in ("kind", "name"))
        return str(kind or "ClusterTrainingRuntime"), str(name or "")

    def list_placement_changes(
        self, document: Document, job: Job, placement: Placement, *, has_runtime_patches: bool
    ) -> list[FieldChange]:
        """Return the change that adds node selector and tolerations to `runtimePatches` or `podTemplateOverrides`."""
        pods = job.pods[0]
        chosen: dict[str, Any] = {"nodeSelector": merge_node_selector(pods, placement.node_selector)}
        if (tolerations := add_tolerations(pods, placement.tolerations)) != list(pods.tolerations):
            chosen["tolerations"] = tolerations
        if chosen == {"nodeSelector": dict(pods.node_selector)}:
            return []
        spec = document["spec"]
        if has_runtime_patches and "podTemplateOverrides" not in spec:
            pod = {"spec": {"template": {"spec": chosen}}}
            jobs = {"spec": {"replicatedJobs": [{"name": pods.name, "template": pod}]}}
            entry: dict[str, Any] = {"manager": ADVISOR, "trainingRuntimeSpec": {"template": jobs}}
            others = [item for item in spec.get("runtimePatches") or () if item.get("manager") != ADVISOR]
            return [FieldChange(("spec", "runtimePatches"), [*others, entry])]
        override = {"targetJobs": [{"name": pods.name}], "spec": chosen}
        return [FieldChange(("spec", "podTemplateOverrides"), [*(spec.get("podTemplateOverrides") or ()), override])]

    def remove_placement(self, document: Document, job: Job) -> list[FieldChange]:
        """Return the changes that remove advised node labels from the runtime patch or override that advice wrote."""
        pods = remove_advised_selector(job).pods[0]
        if pods == job.pods[0]:
            return []
        paths = _find_choices(document, pods.name)
        return [FieldChange((*path, "nodeSelector"), dict(pods.node_selector)) for path in paths]

    def list_gpu_changes(self, document: Document, job: Job, gpus: int) -> list[FieldChange]:
        path: Path = ("spec", "trainer", "resourcesPerNode")
        given = value_at_path(document, path) or {}
        parts = [part for part in ("requests", "limits") if given.get(part)] or ["limits"]
        resources = {**given, **{part: {**(given.get(part) or {}), gpu_resource(): gpus} for part in parts}}
        return [FieldChange(path, resources)]

    def containers(self, document: Document, job: Job) -> dict[Path, Document]:
        return {("spec", "trainer"): document["spec"].get("trainer") or {}}

    def find_main_address(self, document: Document, job: Job) -> str:
        return "$PET_MASTER_ADDR"  # torchrun's own variable, which Kubeflow Trainer sets


def _find_choices(document: Document, name: str) -> list[Path]:
    """Return the paths of those pod specs in a TrainJob's patches and overrides whose node selectors advice wrote."""
    spec = document["spec"]
    below: Path = ("trainingRuntimeSpec", "template", "spec", "replicatedJobs")
    paths: list[Path] = [
        ("spec", "runtimePatches", index, *below, number, "template", "spec", "template", "spec")
        for index, patch in enumerate(spec.get("runtimePatches") or ())
        for number, _ in enumerate((value_at_path(patch, below) or ()) if patch.get("manager") == ADVISOR else ())
    ]
    overrides = spec.get("podTemplateOverrides") or ()
    if overrides and overrides[-1].get("targetJobs") == [{"name": name}]:
        paths.append(("spec", "podTemplateOverrides", len(overrides) - 1, "spec"))
    return [path for path in paths if value_at_path(document, (*path, "nodeSelector")) is not None]


def _find_trainer_job(runtime_spec: Document) -> Document:
    """Return the replicated job of a runtime that trains: the one labelled `trainer`, or else the one named `node`.

    If there is neither, return an empty mapping.
    """
    jobs = value_at_path(runtime_spec, ("template", "spec", "replicatedJobs")) or ()
    for item in (*(item for item in jobs if value_at_path(item, _STEP) == "trainer"), *jobs):
        job: Document = item
        if value_at_path(item, _STEP) == "trainer" or item.get("name") == "node":
            return job
    return {}


def _find_priority_class(runtime_spec: Document) -> str:
    """Return the first priority class that a replicated job of a runtime names, or "" if none names one."""
    for item in value_at_path(runtime_spec, ("template", "spec", "replicatedJobs")) or ():
        if name := value_at_path(item, ("template", "spec", "template", "spec", "priorityClassName")):
            return str(name)
    return ""


KIND = TrainJob()

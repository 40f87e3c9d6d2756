"""The jobs that people already have, read for what decides an advice, and the fields that an advice changes in them.

One entry of `JOB_KINDS` per kind says where its pods, their number and its suspension are written. Everything is pure
on dictionaries; field names are those of Kubernetes 1.36, JobSet v1alpha2, Kubeflow Trainer v1alpha1 (2.1 to 2.3) and
the training operator's v1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilecast.api.base import GROUP, check, shown
from tilecast.api.fields import Document, FieldChange, Path, value_at
from tilecast.api.training_job import MODES, TARGETS, Mode, TrainingJobSpec
from tilecast.nodes import choice_labels, gpu_resource
from tilecast.spec import SpecError

ENABLED = f"{GROUP}/enabled"
"""Label of a job or a namespace that asks for advice."""
MODEL = f"{GROUP}/model"
TRAINING = f"{GROUP}/training"
CONSTRAINTS = f"{GROUP}/constraints"
OBJECTIVE = f"{GROUP}/objective"
MODE = f"{GROUP}/mode"
IGNORE = f"{GROUP}/ignore"
APPLIED = f"{GROUP}/applied"
"""Annotation that says that mode Initial is over: "True" if the node choice was written, else "False"."""
ADVISOR = f"{GROUP}/advisor"
"""Our name in lists of gates and of managers."""
ADMISSION_GATES = "kueue.x-k8s.io/admission-gated-by"
QUEUE = "kueue.x-k8s.io/queue-name"

CONFIG_MAP = "configmap:"
"""`tilecast.dev/model: configmap:NAME/KEY` names a config.json or a graph in a ConfigMap."""


@dataclass(frozen=True, slots=True)
class Pods:
    """Equal pods of a job."""

    name: str
    """Of the replica type or replicated job; empty for a batch Job."""
    path: Path
    """Of their pod spec in the job; empty where it lies in another object (the runtime of a TrainJob)."""
    count: int
    gpus: int
    """Of each pod."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    pinned: Mapping[str, str] = field(default_factory=dict)
    """The part of the selector that the job cannot take back."""
    affinity: tuple[Mapping[str, Any], ...] = ()
    """Terms of the required node affinity, one of which must match; none is no requirement."""
    tolerations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """What matters of a job of any kind."""

    kind: JobKind
    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    pods: tuple[Pods, ...]
    is_suspended: bool
    has_started: bool
    """Whether it runs, ran, or may start at any moment."""
    is_finished: bool
    is_owned: bool
    """Whether a job of another kind made it."""
    is_resizable: bool
    """Whether the number of its pods may be changed while it is suspended."""
    is_countable: bool
    """Whether its manifest can have another number of pods."""

    @property
    def workers(self) -> tuple[Pods, ...]:
        """The pods that have GPUs."""
        return tuple(item for item in self.pods if item.gpus)

    @property
    def gpus(self) -> int:
        return sum(item.count * item.gpus for item in self.pods)

    @property
    def gpus_per_pod(self) -> int:
        """GPUs of the largest pod."""
        return max((item.gpus for item in self.pods), default=0)

    @property
    def queue(self) -> str:
        """Name of its LocalQueue; empty where Kueue does not manage it."""
        return self.labels.get(QUEUE, "")

    @property
    def gates(self) -> tuple[str, ...]:
        """Who must let it pass before Kueue admits it."""
        return tuple(filter(None, (name.strip() for name in self.annotations.get(ADMISSION_GATES, "").split(","))))

    @property
    def is_gated(self) -> bool:
        """Whether Kueue waits for us."""
        return ADVISOR in self.gates

    @property
    def is_held(self) -> bool:
        """Whether the job waits for us and nobody else can be meant: gated in our name, or suspended by its author in
        mode Initial, without Kueue and for the first time."""
        return self.is_gated or self.is_suspended_for_us

    @property
    def is_suspended_for_us(self) -> bool:
        """Whether its author suspended it in mode Initial, without Kueue, and it has never run or been let go."""
        by_mode = self.is_suspended and self.annotations.get(MODE) == "Initial" and not self.queue
        return by_mode and APPLIED not in self.annotations and not self.has_started

    def is_enabled(self, namespace_labels: Mapping[str, str]) -> bool:
        """Whether the job asks for advice by label; its own label wins over that of the namespace."""
        if self.annotations.get(IGNORE, "false").lower() == "true":
            return False
        return self.labels.get(ENABLED, namespace_labels.get(ENABLED, "")).lower() == "true"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a job shall run. None leaves a count as it is."""

    node_selector: Mapping[str, str]
    tolerations: tuple[Mapping[str, str], ...] = ()
    pods: int | None = None
    gpus_per_pod: int | None = None


@dataclass(frozen=True, slots=True)
class JobKind:
    """One kind of job: its API, and where it keeps what."""

    kind: str
    plural: str
    suspend: Path
    pods: Callable[[Document, Document | None], Iterator[Pods]]
    """The job and its runtime, if it has one, to its pods."""
    is_active: Callable[[Document], bool]
    """Whether the status tells of pods that run or ran."""
    finished: tuple[str, ...]
    """Conditions that end it."""
    resize: Callable[[Document, int], list[FieldChange]]
    """What makes a manifest have so many pods; nothing where that takes more than a number."""
    is_resizable: Callable[[Document], bool]
    """Whether the API lets the number of pods change after creation, while suspended."""

    @property
    def api_version(self) -> str:
        """Group and version, or the version alone in the core group."""
        return TARGETS[self.kind]

    @property
    def group(self) -> str:
        """API group; empty for the core."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """Version of the API."""
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str, name: str = "") -> str:
        """Path of a job in the API, or of all of a namespace."""
        return f"/apis/{self.api_version}/namespaces/{namespace}/{self.plural}" + (f"/{name}" if name else "")


def read(document: Document, runtime: Document | None = None) -> Job:
    """What a document of one of `JOB_KINDS` says.

    Args:
        document: the job.
        runtime: the TrainingRuntime or ClusterTrainingRuntime that a TrainJob names (`runtime_of`), if it is at hand.

    Raises:
        SpecError: the document is of another kind, or is not shaped like its kind.
    """
    kind = kind_of(document)
    try:
        return _read(kind, document, runtime)
    except (KeyError, TypeError, AttributeError, IndexError):
        remedy = f"write it as `kubectl explain {kind.plural}` says"
        raise SpecError("spec", f"is not that of a {kind.kind}", remedy) from None


def bare(document: Document) -> Job:
    """The same without what its spec says of pods.

    Raises:
        SpecError: the document is of another kind, or its metadata or status is not shaped like any.
    """
    kind = kind_of(document)
    try:
        return _about(kind, document, (), is_countable=False)
    except (TypeError, AttributeError):
        raise SpecError("metadata", "is not that of an object", "give the job as the API server has it") from None


def _read(kind: JobKind, document: Document, runtime: Document | None) -> Job:
    pods = tuple(kind.pods(document, runtime))
    is_countable = bool(kind.resize(document, sum(item.count for item in pods)))
    return _about(kind, document, pods, is_countable=is_countable)


def _about(kind: JobKind, document: Document, pods: tuple[Pods, ...], *, is_countable: bool) -> Job:
    metadata = _mapping(document, "metadata", "job")
    status = _mapping(document, "status", "job")
    done = {str(item.get("type")): item.get("status") for item in status.get("conditions") or ()}
    is_suspended = value_at(document, kind.suspend) is True
    owners = metadata.get("ownerReferences") or ()
    return Job(
        kind=kind,
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        labels={str(key): str(value) for key, value in _mapping(metadata, "labels", "metadata").items()},
        annotations={str(key): str(value) for key, value in _mapping(metadata, "annotations", "metadata").items()},
        pods=pods,
        is_suspended=is_suspended,
        has_started=not is_suspended or kind.is_active(status),
        is_finished=any(done.get(name) == "True" for name in kind.finished),
        is_owned=any(owner.get("controller") and owner.get("kind") in JOB_KINDS for owner in owners),
        is_resizable=is_countable and kind.is_resizable(document),
        is_countable=is_countable,
    )


def is_job(document: Document) -> bool:
    """Whether the document is of one of `JOB_KINDS`."""
    kind = JOB_KINDS.get(str(document.get("kind")))
    return kind is not None and document.get("apiVersion") == kind.api_version


def kind_of(document: Document) -> JobKind:
    """The entry of `JOB_KINDS` that a document belongs to.

    Raises:
        SpecError: there is none.
    """
    kind = JOB_KINDS.get(str(document.get("kind")))
    if kind is None:
        raise SpecError("kind", f"{shown(document.get('kind'))} is no job", f"use one of {', '.join(JOB_KINDS)}")
    if document.get("apiVersion") != kind.api_version:
        problem = f"{shown(document.get('apiVersion'))} is not {kind.api_version}"
        raise SpecError("apiVersion", problem, f"write apiVersion: {kind.api_version}")
    return kind


def runtime_of(document: Document) -> tuple[str, str] | None:
    """Kind and name of the runtime that a TrainJob names; None for other kinds."""
    if document.get("kind") != "TrainJob":
        return None
    found = (document.get("spec") or {}).get("runtimeRef") or {}
    return str(found.get("kind") or "ClusterTrainingRuntime"), str(found.get("name") or "")


def described(job: Job) -> dict[str, Any]:
    """What a job's annotations ask for, as the spec of a TrainingJob, unchecked.

    Raises:
        SpecError: an annotation is missing or cannot be read; the message names it.
    """
    marks = job.annotations
    name = marks.get(MODEL, "").strip()
    if not name:
        raise SpecError(MODEL, "is missing", f"annotate the job with a model, for instance {MODEL}: llama-2-7b")
    if TRAINING not in marks:
        remedy = f"annotate the job, for instance {TRAINING}: " + '{"sequenceLength": 4096, "globalBatchSize": 256}'
        raise SpecError(TRAINING, "is missing", remedy)
    found: dict[str, Any] = {"model": _model(name), "training": _json(marks, TRAINING)}
    if CONSTRAINTS in marks:
        found["constraints"] = _json(marks, CONSTRAINTS)
    if OBJECTIVE in marks:
        found["objective"] = marks[OBJECTIVE]
    return found


def advice_spec(job: Job) -> TrainingJobSpec:
    """The same, checked.

    Raises:
        SpecError: an annotation is missing or wrong; the message names it.
    """
    found = described(job)
    try:
        return check(TrainingJobSpec, found, "spec")
    except SpecError as error:
        raise in_annotations(error) from None


def in_annotations(error: SpecError) -> SpecError:
    """The same error with the annotation's name in place of the field of a TrainingJob."""
    for field_, mark in _FIELDS.items():
        if error.field == field_ or error.field.startswith(f"{field_}."):
            return SpecError(mark + error.field.removeprefix(field_), error.problem, error.remedy)
    return error


def in_words(text: str) -> str:
    """The message of an error about a TrainingJob, with the annotation's name in place of the field."""
    found = next((field_ for field_ in _FIELDS if text.startswith(field_)), None)
    return text if found is None else _FIELDS[found] + text.removeprefix(found)


_FIELDS = {
    "spec.model": MODEL,
    "spec.training": TRAINING,
    "spec.constraints": CONSTRAINTS,
    "spec.objective": OBJECTIVE,
}


def mode_of(job: Job) -> Mode:
    """The mode that a job's annotation asks for; Advise where there is none.

    Raises:
        SpecError: there is no such mode.
    """
    found = job.annotations.get(MODE, "Advise")
    for mode in MODES:
        if found == mode:
            return mode
    raise SpecError(MODE, f"{shown(found)} is no mode", f"use one of {', '.join(MODES)}")


def changes(document: Document, job: Job, placement: Placement, *, runtime_patches: bool = True) -> list[FieldChange]:
    """The fields that put a job where the placement says, each with its whole new value; only those that differ.

    Labels that choose nodes are replaced, every other label of a selector is kept; tolerations are added.

    Args:
        document: the job.
        job: what `read` made of it.
        placement: where it shall run.
        runtime_patches: whether the API of a TrainJob has `runtimePatches` (Trainer 2.2 and later) rather than
            `podTemplateOverrides`.
    """
    wanted = list[FieldChange]()
    if placement.pods is not None:
        wanted += job.kind.resize(document, placement.pods)
    if placement.gpus_per_pod is not None and placement.gpus_per_pod != job.gpus_per_pod:
        wanted += _gpus_per_pod(document, job, placement.gpus_per_pod)
    if job.kind.kind == "TrainJob":
        wanted += _train_job(document, job, placement, runtime_patches)
    else:
        for pods in job.workers:
            if (chosen := selector(pods, placement.node_selector)) != dict(pods.node_selector):
                wanted.append(FieldChange((*pods.path, "nodeSelector"), chosen))
            if (tolerations := tolerated(pods, placement.tolerations)) != list(pods.tolerations):
                wanted.append(FieldChange((*pods.path, "tolerations"), tolerations))
    return [change for change in wanted if value_at(document, change.path) != change.value]


def selector(pods: Pods, chosen: Mapping[str, str]) -> dict[str, str]:
    """The node selector of pods after a choice: what is not about the kind of node stays."""
    kept = {key: value for key, value in pods.node_selector.items() if not is_choice(key) or key in pods.pinned}
    return kept | dict(chosen)


def tolerated(pods: Pods, more: Sequence[Mapping[str, str]]) -> list[Mapping[str, Any]]:
    """The tolerations of pods with those that they lack."""
    return [*pods.tolerations, *(item for item in more if item not in pods.tolerations)]


def require_gpus(job: Job) -> None:
    """Nothing, for a job that asks for GPUs.

    Raises:
        SpecError: it asks for none.
    """
    if not job.gpus:
        remedy = f"add {gpu_resource()} to the limits of a container"
        if job.kind.kind == "TrainJob":
            remedy = f"add {gpu_resource()} to spec.trainer.resourcesPerNode.limits, or to its runtime"
        raise SpecError("spec", "the job asks for no GPU", remedy)


def is_choice(label: str) -> bool:
    """Whether a node label tells kinds of GPU nodes apart, so that an advice may replace what a job selects by it."""
    return label in choice_labels()


def _model(name: str) -> dict[str, Any]:
    if not name.startswith(CONFIG_MAP):
        return {"preset": name.rpartition("/")[2] if name.count("/") == 1 else name}
    config_map, _, key = name.removeprefix(CONFIG_MAP).partition("/")
    if not config_map or not key:
        raise SpecError(MODEL, f"{shown(name)} names no key", f"write {CONFIG_MAP}NAME/KEY")
    reference = {"configMapKeyRef": {"name": config_map, "key": key}}
    is_graph = key == "graph.json" or key.endswith(".onnx")
    return {"graphRef" if is_graph else "huggingFace": reference}


def _json(marks: Mapping[str, str], mark: str) -> dict[str, Any]:
    try:
        found = json.loads(marks[mark])
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SpecError(mark, f"{shown(marks[mark])} is no JSON mapping", 'write for instance {"globalBatchSize": 256}')
    return found


def _mapping(value: Document, key: str, where: str) -> Mapping[str, Any]:
    inner = value.get(key)
    if inner is None:
        return {}
    if not isinstance(inner, Mapping):
        raise SpecError(f"{where}: {key}", f"{shown(inner)} is not a mapping", "give the job as the API server has it")
    return inner


def _count(value: object, otherwise: int = 1) -> int:
    text = str(value).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else otherwise


def requested(resources: Document | None) -> int:
    """GPUs of a `resources` block; Kubernetes takes the limit for both."""
    found = resources or {}
    return max(_count((found.get(part) or {}).get(gpu_resource()), 0) for part in ("limits", "requests"))


def _template(name: str, path: Path, count: int, spec: Document) -> Pods:
    required = value_at(spec, ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")) or {}
    return Pods(
        name=name,
        path=path,
        count=count,
        gpus=sum(requested(item.get("resources")) for item in spec.get("containers") or ()),
        node_selector=dict(spec.get("nodeSelector") or {}),
        affinity=tuple(required.get("nodeSelectorTerms") or ()),
        tolerations=tuple(spec.get("tolerations") or ()),
    )


def _job_pods(document: Document, runtime: Document | None) -> Iterator[Pods]:
    spec = document["spec"]
    count = _count(spec.get("parallelism", 1))
    if spec.get("completions") is not None:
        count = min(count, _count(spec["completions"]))
    yield _template("", ("spec", "template", "spec"), count, spec["template"]["spec"])


def _job_resize(document: Document, pods: int) -> list[FieldChange]:
    """Of a Job whose pods all run at once."""
    spec = document["spec"]
    if spec.get("completions", 1) != spec.get("parallelism", 1):
        return []
    return [FieldChange(("spec", "parallelism"), pods), FieldChange(("spec", "completions"), pods)]


def _job_set_pods(document: Document, runtime: Document | None) -> Iterator[Pods]:
    for index, item in enumerate(document["spec"]["replicatedJobs"]):
        job = item["template"]["spec"]
        count = _count(item.get("replicas", 1)) * _count(job.get("parallelism", 1))
        path = ("spec", "replicatedJobs", index, "template", "spec", "template", "spec")
        yield _template(str(item["name"]), path, count, job["template"]["spec"])


def _job_set_resize(document: Document, pods: int) -> list[FieldChange]:
    """Of a JobSet with one group of GPU pods."""
    groups = [index for index, item in enumerate(_job_set_pods(document, None)) if item.gpus]
    if len(groups) != 1:
        return []
    path: Path = ("spec", "replicatedJobs", groups[0])
    below: Path = (*path, "template", "spec")
    if _count(value_at(document, (*below, "parallelism"))) == 1:
        return [FieldChange((*path, "replicas"), pods)]
    if _count(value_at(document, (*path, "replicas"))) > 1:
        return []
    more = (
        [FieldChange((*below, "completions"), pods)] if value_at(document, (*below, "completions")) is not None else []
    )
    return [FieldChange((*below, "parallelism"), pods), *more]


_ROLES = ("Master", "Worker")


def _pytorch_pods(document: Document, runtime: Document | None) -> Iterator[Pods]:
    replicas = document["spec"]["pytorchReplicaSpecs"]
    for role in (name for name in _ROLES if name in replicas):
        path = ("spec", "pytorchReplicaSpecs", role, "template", "spec")
        yield _template(role, path, _count(replicas[role].get("replicas", 1)), replicas[role]["template"]["spec"])


def _pytorch_resize(document: Document, pods: int) -> list[FieldChange]:
    replicas = document["spec"]["pytorchReplicaSpecs"]
    workers = pods - 1 if "Master" in replicas else pods
    if "Worker" not in replicas or workers < 1:
        return []
    return [FieldChange(("spec", "pytorchReplicaSpecs", "Worker", "replicas"), workers)]


def _train_job_pods(document: Document, runtime: Document | None) -> Iterator[Pods]:
    spec = document["spec"]
    trainer = spec.get("trainer") or {}
    beneath = ((runtime or {}).get("spec")) or {}
    template = _trainer_job(beneath)
    pod = value_at(template, ("template", "spec", "template", "spec")) or {}
    container: Document = next((item for item in pod.get("containers") or () if item.get("name") == "node"), {})
    resources = trainer.get("resourcesPerNode") or container.get("resources")
    count = trainer.get("numNodes") or value_at(beneath, ("mlPolicy", "numNodes")) or 1
    name = str(template.get("name", "node"))
    over = [_mapping(item, "spec", "podTemplateOverrides") for item in spec.get("podTemplateOverrides") or ()]
    over += [
        value_at(job, ("template", "spec", "template", "spec")) or {}
        for patch in spec.get("runtimePatches") or ()
        for job in value_at(patch, ("trainingRuntimeSpec", "template", "spec", "replicatedJobs")) or ()
        if job.get("name") == name
    ]
    base = _template(name, (), _count(count), pod)
    own: dict[str, str] = {}
    tolerations = base.tolerations
    for item in over:
        own |= item.get("nodeSelector") or {}
        tolerations = tuple(item.get("tolerations") or tolerations)
    yield Pods(
        name=name,
        path=(),
        count=_count(count),
        gpus=requested(resources),
        node_selector={**base.node_selector, **own},
        pinned=base.node_selector,
        affinity=base.affinity,
        tolerations=tolerations,
    )


def _trainer_job(runtime_spec: Document) -> Mapping[str, Any]:
    """The replicated job of a runtime that trains: labelled so, or called node."""
    jobs = value_at(runtime_spec, ("template", "spec", "replicatedJobs")) or ()
    step = ("template", "metadata", "labels", "trainer.kubeflow.org/trainjob-ancestor-step")
    for item in (*(item for item in jobs if value_at(item, step) == "trainer"), *jobs):
        found: Mapping[str, Any] = item
        if value_at(item, step) == "trainer" or item.get("name") == "node":
            return found
    return {}


def _train_job_resize(document: Document, pods: int) -> list[FieldChange]:
    return [FieldChange(("spec", "trainer", "numNodes"), pods)]


def _train_job(document: Document, job: Job, placement: Placement, runtime_patches: bool) -> list[FieldChange]:
    pods = job.pods[0]
    chosen: dict[str, Any] = {"nodeSelector": selector(pods, placement.node_selector)}
    if (tolerations := tolerated(pods, placement.tolerations)) != list(pods.tolerations):
        chosen["tolerations"] = tolerations
    if chosen == {"nodeSelector": dict(pods.node_selector)}:
        return []
    spec = document["spec"]
    if runtime_patches and "podTemplateOverrides" not in spec:
        pod = {"spec": {"template": {"spec": chosen}}}
        jobs = {"spec": {"replicatedJobs": [{"name": pods.name, "template": pod}]}}
        entry: dict[str, Any] = {"manager": ADVISOR, "trainingRuntimeSpec": {"template": jobs}}
        others = [item for item in spec.get("runtimePatches") or () if item.get("manager") != ADVISOR]
        return [FieldChange(("spec", "runtimePatches"), [*others, entry])]
    before = list(spec.get("podTemplateOverrides") or ())
    return [
        FieldChange(("spec", "podTemplateOverrides"), [*before, {"targetJobs": [{"name": pods.name}], "spec": chosen}])
    ]


def _gpus_per_pod(document: Document, job: Job, gpus: int) -> list[FieldChange]:
    """GPUs of every GPU pod, where they are written; of a manifest that is not created yet."""
    resource = gpu_resource()
    if job.kind.kind == "TrainJob":
        given = value_at(document, ("spec", "trainer", "resourcesPerNode")) or {"limits": {}}
        wanted = {part: {**(given[part] or {}), resource: gpus} for part in given}
        found = [FieldChange(("spec", "trainer", "resourcesPerNode"), wanted)]
        processes: Path = ("spec", "trainer", "numProcPerNode")
    else:
        found = [
            FieldChange((*pods.path, "containers", index, "resources", part, resource), _like(old, gpus))
            for pods in job.workers
            for index, item in enumerate(value_at(document, (*pods.path, "containers")))
            for part in ("requests", "limits")
            if _count(old := value_at(item, ("resources", part, resource)), 0)
        ]
        processes = ("spec", "nprocPerNode")
    given_processes = value_at(document, processes)
    if _count(given_processes, 0):
        found.append(FieldChange(processes, _like(given_processes, gpus)))
    return found


def _like(old: object, new: int) -> int | str:
    return str(new) if isinstance(old, str) else new


def _any(status: Document, lists: str, *counts: str) -> bool:
    return any(_count(item.get(name), 0) for item in status.get(lists) or () for name in counts)


JOB_KINDS: Mapping[str, JobKind] = {
    kind.kind: kind
    for kind in (
        JobKind(
            kind="TrainJob",
            plural="trainjobs",
            suspend=("spec", "suspend"),
            pods=_train_job_pods,
            is_active=lambda status: _any(status, "jobsStatus", "active", "ready", "succeeded", "failed"),
            finished=("Complete", "Failed"),
            resize=_train_job_resize,
            is_resizable=lambda document: False,  # spec.trainer is immutable
        ),
        JobKind(
            kind="PyTorchJob",
            plural="pytorchjobs",
            suspend=("spec", "runPolicy", "suspend"),
            pods=_pytorch_pods,
            is_active=lambda status: any(
                _count(item.get(name), 0)
                for item in (status.get("replicaStatuses") or {}).values()
                for name in ("active", "succeeded", "failed")
            ),
            finished=("Succeeded", "Failed"),
            resize=_pytorch_resize,
            is_resizable=lambda document: True,
        ),
        JobKind(
            kind="JobSet",
            plural="jobsets",
            suspend=("spec", "suspend"),
            pods=_job_set_pods,
            is_active=lambda status: _any(status, "replicatedJobsStatus", "active", "ready", "succeeded", "failed"),
            finished=("Completed", "Failed"),
            resize=_job_set_resize,
            is_resizable=lambda document: False,  # spec.replicatedJobs is immutable
        ),
        JobKind(
            kind="Job",
            plural="jobs",
            suspend=("spec", "suspend"),
            pods=_job_pods,
            # startTime is taken back when a Job that ran is suspended
            is_active=lambda status: any(status.get(name) for name in ("startTime", "active", "succeeded", "failed")),
            finished=("Complete", "Failed"),
            resize=_job_resize,
            # completions of other Jobs are immutable (KEP-3715, elastic Indexed Job)
            is_resizable=lambda document: document["spec"].get("completionMode") == "Indexed",
        ),
    )
}
"""Every kind of job that can be advised."""

"""The interface `JobKind` of a kind of job, and the dataclasses `Job` and `Pods` for a job that was read.

Field names are those of Kubernetes 1.36, JobSet v1alpha2, Kubeflow Trainer v1alpha1 (2.1 to 2.3) and the training
operator's v1. All functions are pure and work on dictionaries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from tilecast.api.fields import Document, FieldChange, Path, value_at_path
from tilecast.jobs import keys
from tilecast.jobs.device_requests import ClaimReference, DeviceRequest, read_references
from tilecast.jobs.quantities import count_or_default, count_requested_gpus, format_quantity_like
from tilecast.jobs.shapes import POD, require_shape
from tilecast.nodes import gpu_resource, node_kind_labels

RANDOM_PART = "[bcdfghjklmnpqrstvwxz2456789]{5}"
"""Pattern of the suffix that Kubernetes appends to a generated name. Its alphabet has no vowels and no 0, 1 or 3."""


@dataclass(frozen=True, slots=True)
class Pods:
    """A group of identical pods of a job, with those fields of their pod spec on which advice depends."""

    name: str
    """Name of the replica type or replicated job. Empty for a batch Job."""
    path: Path
    """Path of their pod spec in the job. Empty if it is in another object (the runtime of a TrainJob)."""
    count: int
    gpus: int
    """Number of GPUs per pod."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    pinned: Mapping[str, str] = field(default_factory=dict)
    """Part of the node selector that cannot be removed."""
    affinity: tuple[Mapping[str, Any], ...] = ()
    """Terms of the required node affinity, one of which must match. Empty if there is no requirement."""
    tolerations: tuple[Mapping[str, Any], ...] = ()
    priority_class: str = ""
    """Name of their PriorityClass. Empty for the cluster's default."""
    scheduler: str = ""
    """Name of the scheduler that they request. Empty for the cluster's default."""
    claims: tuple[ClaimReference, ...] = ()
    """Claims by which they request devices."""
    requests: tuple[tuple[DeviceRequest, ...], ...] = ()
    """GPU requests in these claims, each with its alternatives. `claims.resolve_claims` fills them in."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job of any kind, with the properties on which advice depends."""

    kind: JobKind
    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    pods: tuple[Pods, ...]
    is_suspended: bool
    has_started: bool
    """Whether it runs, has run, or may start at any moment."""
    is_finished: bool
    is_owned: bool
    """Whether a job of another kind controls it."""
    is_resizable: bool
    """Whether the number of its pods may change while it is suspended."""
    is_countable: bool
    """Whether changing numbers in its manifest is enough to give it another number of pods."""
    said: Mapping[str, Any] = field(default_factory=dict)
    """`model` and `training` as read from the job's command. Empty if they were not read."""
    why_unread: str = ""
    """Why neither could be read from the command. Empty if they were read, or if nobody tried."""
    created: str = ""
    """Time of its creation (RFC 3339). Empty if unknown."""
    pod_names: str = ""
    """Pattern of its pods' names, from `JobKind.find_pod_names`."""
    reading: str = ""
    """JSON of what was read from the command, for the annotation `READING`."""

    @property
    def workers(self) -> tuple[Pods, ...]:
        """The pods that have GPUs."""
        return tuple(item for item in self.pods if item.gpus)

    @property
    def gpus(self) -> int:
        return sum(item.count * item.gpus for item in self.pods)

    @property
    def gpus_per_pod(self) -> int:
        """Largest number of GPUs of any pod, or 0 without pods."""
        return max((item.gpus for item in self.pods), default=0)

    @property
    def has_claims(self) -> bool:
        """Whether any pod requests devices by a ResourceClaim."""
        return any(item.claims for item in self.pods)

    @property
    def other_scheduler(self) -> str:
        """Name of the scheduler if it is KAI or Volcano, otherwise an empty string."""
        named = (item.scheduler for item in self.pods if item.scheduler in keys.BATCH_SCHEDULERS)
        by_queue = (
            name for name, key in keys.BATCH_SCHEDULERS.items() if key in self.labels or key in self.annotations
        )
        return next(named, "") or next(by_queue, "")

    @property
    def workload_priority_class(self) -> str:
        """Name of the WorkloadPriorityClass in the job's label, or an empty string."""
        return self.labels.get(keys.PRIORITY_CLASS, "")

    @property
    def pod_priority_class(self) -> str:
        """Name of the first PriorityClass in the job's pod templates, or an empty string."""
        return next((item.priority_class for item in self.pods if item.priority_class), "")

    @property
    def queue(self) -> str:
        """Name of the LocalQueue that will admit the job. It is empty if Kueue does not manage the job."""
        return self.next_queue or self.current_queue

    @property
    def current_queue(self) -> str:
        """Name of the LocalQueue in the job's Kueue label, or an empty string."""
        return self.labels.get(keys.QUEUE, "")

    @property
    def next_queue(self) -> str:
        """Name of the LocalQueue to which Tilecast moves the job after advice, or an empty string."""
        return self.annotations.get(keys.NEXT_QUEUE, "").strip() if self.current_queue else ""

    @property
    def gates(self) -> tuple[str, ...]:
        """Names of the admission gates that keep Kueue from admitting the job."""
        names = (name.strip() for name in self.annotations.get(keys.ADMISSION_GATES, "").split(","))
        return tuple(filter(None, names))

    @property
    def is_gated(self) -> bool:
        """Whether the job has Tilecast's admission gate, so that Kueue does not admit it."""
        return keys.ADVISOR in self.gates

    @property
    def is_parked(self) -> bool:
        """Whether the job is suspended in a holding LocalQueue, until Tilecast moves it to another one."""
        return self.is_suspended and not self.has_started and self.next_queue not in ("", self.current_queue)

    @property
    def is_held(self) -> bool:
        """Whether the job waits for Tilecast: it has an admission gate, is in a holding LocalQueue, or is suspended."""
        return self.is_gated or self.is_parked or self.is_suspended_for_advice

    @property
    def is_suspended_for_advice(self) -> bool:
        """Whether the job is suspended outside Kueue and waits for advice in mode Initial.

        Such a job has never run, and no advice has been written into it.
        """
        by_mode = self.is_suspended and self.annotations.get(keys.MODE) == "Initial" and not self.queue
        return by_mode and keys.APPLIED not in self.annotations and not self.has_started

    def is_enabled(self, namespace_labels: Mapping[str, str]) -> bool:
        """Return whether the label that requests advice is set on the job or, without it, on the job's namespace.

        An annotation on the job can refuse advice.
        """
        if self.annotations.get(keys.IGNORE, "false").lower() == "true":
            return False
        return self.labels.get(keys.ENABLED, namespace_labels.get(keys.ENABLED, "")).lower() == "true"


@dataclass(frozen=True, slots=True)
class Placement:
    """Node selector, tolerations, pod count and GPUs per pod to write into a job. A number that is None stays."""

    node_selector: Mapping[str, str]
    tolerations: tuple[Mapping[str, str], ...] = ()
    pods: int | None = None
    gpus_per_pod: int | None = None


class JobKind(ABC):
    """Interface of one kind of job, such as PyTorchJob: its API, and how its fields are read and changed.

    `tools/job_kinds.py` generates parts of the API, the chart and the documentation from the subclasses. The methods
    that are not abstract are for kinds whose jobs contain their pod templates.
    """

    kind: ClassVar[str]
    plural: ClassVar[str]
    api_version: ClassVar[str]
    """Group and version."""
    runtimes: ClassVar[tuple[str, ...]] = ()
    """Plurals of the kinds in the same group whose objects hold pod templates of a job (`find_training_runtime`)."""
    finished: ClassVar[tuple[str, ...]] = ()
    """Conditions that mean that the job has ended. A kind without status conditions overrides `is_finished`."""
    suspend: ClassVar[Path] = ("spec", "suspend")
    """Path of the field that keeps a job from starting as long as it is true."""
    waits_from_creation: ClassVar[bool] = True
    """Whether the chart's admission policy (`jobs.gate`) makes a job in mode Initial wait from its creation on."""
    processes: ClassVar[Path | None] = None
    """Path of the number of processes per pod. None if the kind has no such field."""
    pod_label: ClassVar[str] = ""
    """Label of each pod with the name of the job as its value. Empty if pods have no such label."""
    has_jobs: ClassVar[bool] = False
    """Whether batch Jobs control the pods. Their names consist of the job's name, a pod group's name and a number."""
    pod_names: ClassVar[str] = ""
    """Pattern of a job's pod names. `$name` stands for the job and `$groups` for the names of its pod groups.

    Empty if it is unknown, or if `find_pod_names` derives it from the job.
    """
    gpu_field: ClassVar[str] = "the limits of a container"
    """Text on the field in which the job's author requests GPUs."""
    tested: ClassVar[str] = ""
    """Text on the tested versions, for the documentation. Empty for a kind of Kubernetes itself."""
    placed_by: ClassVar[str] = "pod templates"
    """Text on the field to which advice writes a node choice, for the documentation."""
    resized_by: ClassVar[str] = "fixed"
    """Text on which number of pods may change after creation, for the documentation."""

    @property
    def group(self) -> str:
        """Group of the API, such as kubeflow.org."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """Version of the API, such as v1."""
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str, name: str = "") -> str:
        """Return the URL path of a job on the API server, or of all jobs in the namespace if no name is given."""
        return f"/apis/{self.api_version}/namespaces/{namespace}/{self.plural}" + (f"/{name}" if name else "")

    @abstractmethod
    def pods(self, document: Document, runtime: Document | None) -> Iterator[Pods]:
        """Yield one `Pods` for each pod template of a job.

        Args:
            document: the job's document.
            runtime: the object that `find_training_runtime` names; None if it is not available.
        """

    def find_pod_names(self, document: Document) -> str:
        """Return the pattern of a job's pod names, with the placeholders of `pod_names`."""
        return self.pod_names

    @abstractmethod
    def is_active(self, status: Document) -> bool:
        """Return whether a job's status shows that pods run or have run."""

    def is_finished(self, status: Document) -> bool:
        """Return whether a job's status has a condition that ends the job, such as Complete or Failed."""
        states = {str(item.get("type")): item.get("status") for item in status.get("conditions") or ()}
        return any(states.get(name) == "True" for name in self.finished)

    @abstractmethod
    def list_resize_changes(self, document: Document, pods: int) -> list[FieldChange]:
        """Return the changes that give a job `pods` pods, or [] if no change of numbers can do that."""

    def is_resizable(self, document: Document) -> bool:
        """Return whether the API allows the pod count of a suspended job to be changed after its creation."""
        return False

    def find_training_runtime(self, document: Document) -> tuple[str, str] | None:
        """Return (kind, name) of the object that contains the job's pod templates, or None if the job contains them."""
        return None

    def list_placement_changes(
        self, document: Document, job: Job, placement: Placement, *, has_runtime_patches: bool
    ) -> list[FieldChange]:
        """Return the changes that write a placement's node selector and tolerations into the pods with GPUs.

        Args:
            document: the job's document.
            job: the job that `read_job` returned for the document.
            placement: the placement to write. Its pod count and GPUs per pod are not used here.
            has_runtime_patches: whether the API of a TrainJob has `runtimePatches`. Other kinds ignore this argument.
        """
        changes = []
        for pods in job.workers:
            if (chosen := merge_node_selector(pods, placement.node_selector)) != dict(pods.node_selector):
                changes.append(FieldChange((*pods.path, "nodeSelector"), chosen))
            if (tolerations := add_tolerations(pods, placement.tolerations)) != list(pods.tolerations):
                changes.append(FieldChange((*pods.path, "tolerations"), tolerations))
        return changes

    def remove_placement(self, document: Document, job: Job) -> list[FieldChange]:
        """Return the changes that remove advised node labels from the selectors of GPU pods. Tolerations remain."""
        return [
            FieldChange((*pods.path, "nodeSelector"), dict(pods.node_selector))
            for pods, before in zip(remove_advised_selector(job).workers, job.workers, strict=True)
            if pods != before
        ]

    def list_gpu_changes(self, document: Document, job: Job, gpus: int) -> list[FieldChange]:
        """Return the changes that make every GPU container request `gpus` GPUs.

        The changes are only allowed in a manifest from which no job was created yet.
        """
        resource = gpu_resource()
        return [
            FieldChange((*pods.path, "containers", index, "resources", part, resource), format_quantity_like(old, gpus))
            for pods in job.workers
            for index, item in enumerate(value_at_path(document, (*pods.path, "containers")))
            for part in ("requests", "limits")
            if count_or_default(old := value_at_path(item, ("resources", part, resource)), 0)
        ]

    def containers(self, document: Document, job: Job) -> dict[Path, Document]:
        """Return the containers that request GPUs, by the path at which their `command` and `args` are set."""
        return {
            (*pods.path, "containers", index): container
            for pods in job.workers
            for index, container in enumerate(value_at_path(document, pods.path)["containers"])
            if count_requested_gpus(container.get("resources"))
        }

    def find_main_address(self, document: Document, job: Job) -> str:
        """Return a shell expression for the first pod's address, or "" if the kind sets MASTER_ADDR itself."""
        return ""


def merge_node_selector(pods: Pods, new_labels: Mapping[str, str]) -> dict[str, str]:
    """Return the pods' node selector with `new_labels` in place of its labels that describe kinds of GPU nodes.

    Other labels and pinned labels stay in the selector.
    """
    others = {
        key: value for key, value in pods.node_selector.items() if not is_node_kind_label(key) or key in pods.pinned
    }
    return others | dict(new_labels)


def list_labels_to_record(job: Job, new_labels: Mapping[str, str]) -> list[str]:
    """Return those keys of `new_labels`, sorted, that the annotation `CHOSEN_LABELS` must record.

    Without the annotation, nobody could tell later that advice, not the job's author, added these labels.
    """
    given = {key for pods in job.workers for key in pods.node_selector}
    return sorted(key for key in new_labels if key not in given and not is_node_kind_label(key))


def remove_advised_selector(job: Job) -> Job:
    """Return a job without the node selector labels that advice wrote."""
    ours = set(job.annotations.get(keys.CHOSEN_LABELS, "").split(","))

    def kept_selector(pods: Pods) -> Mapping[str, str]:
        kept = {
            key: value for key, value in pods.node_selector.items() if key not in ours and not is_node_kind_label(key)
        }
        return {**pods.pinned, **kept}

    changed = (replace(pods, node_selector=kept_selector(pods)) if pods.gpus else pods for pods in job.pods)
    return replace(job, pods=tuple(changed))


def add_tolerations(pods: Pods, tolerations: Sequence[Mapping[str, str]]) -> list[Mapping[str, Any]]:
    """Return the tolerations of pods, followed by those of `tolerations` that the pods lack."""
    return [*pods.tolerations, *(item for item in tolerations if item not in pods.tolerations)]


def make_name_pattern(name: str) -> str:
    """Return a regular expression that matches only the object name `name`, and that contains no backslash."""
    return name.replace(".", "[.]")


def is_node_kind_label(label: str) -> bool:
    """Return whether a node label describes a kind of GPU node, so that advice may replace it in a selector."""
    return label in node_kind_labels()


def read_pod_template(name: str, path: Path, count: int, spec: Document) -> Pods:
    """Return a group of `count` pods that all have the pod spec `spec`.

    Args:
        name: the name of the replica type or replicated job.
        path: the path of the pod spec in the job. Empty if another object contains the pod spec.
        count: the number of pods.
        spec: the pod spec.

    Raises:
        SpecError: a field of the pod spec has a wrong type.
    """
    require_shape(spec, POD, path or ("runtime",))
    required = value_at_path(spec, ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")) or {}
    return Pods(
        name=name,
        path=path,
        count=count,
        gpus=sum(count_requested_gpus(item.get("resources")) for item in spec.get("containers") or ()),
        node_selector=dict(spec.get("nodeSelector") or {}),
        affinity=tuple(required.get("nodeSelectorTerms") or ()),
        tolerations=tuple(spec.get("tolerations") or ()),
        priority_class=str(spec.get("priorityClassName") or ""),
        scheduler=str(spec.get("schedulerName") or ""),
        claims=read_references(spec),
    )

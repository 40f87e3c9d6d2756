"""Find the pod templates of a supported job, and what its controller sets for their processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tilecast.api.base import format_value
from tilecast.api.fields import Document, Path, as_mapping, list_mappings_in, value_at_path
from tilecast.jobs.quantities import count_requested_gpus
from tilecast.jobs.shapes import POD, require_shape
from tilecast.nodes.labels import read_label_table
from tilecast.nodes.quantities import parse_count
from tilecast.spec import SpecError

MAX_COUNT = 2**20
MAX_GROUPS = 64
"""Most pod groups of a job."""


@dataclass(frozen=True, slots=True)
class PodGroup:
    """A group of identical pods of a job."""

    name: str
    path: Path
    """Path of the pod spec, for messages. It begins with `runtime` if it is in the runtime of a TrainJob."""
    count: int
    spec: Document
    """The pod's spec."""

    @property
    def gpus(self) -> int:
        """Number of GPUs per pod."""
        return sum(
            count_requested_gpus(item.get("resources")) for item in list_mappings_in(self.spec.get("containers"))
        )


@dataclass(frozen=True, slots=True)
class JobPods:
    """The pods of a job, and what the job's controller sets for their processes."""

    groups: tuple[PodGroup, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the controller sets in every pod with GPUs."""
    has_ranks: bool = False
    """Whether the controller sets RANK and WORLD_SIZE, so that plain Python processes find each other."""
    launcher: str = ""
    """Name of the pod group whose command starts the processes of all others, as in an MPIJob. Empty without one."""
    slots: int | None = None
    """Processes per pod if the launcher does not state their number."""
    entrypoint: str | None = None
    """Shell command that the job runs in a Ray cluster. None for other kinds."""
    model_uri: str = ""
    """Location from which an initializer loads the model into /workspace/model."""


def find_count(document: object, path: Path, default: int = 1) -> int:
    """Return the number at a path, or the default if there is none.

    Raises:
        SpecError: the value is not a number of pods.
    """
    value = value_at_path(document, path)
    if value is None:
        return default
    number = None if isinstance(value, bool) else parse_count(value)
    if number is None or number > MAX_COUNT:
        name = ".".join(map(str, path))
        raise SpecError(name, f"{format_value(value)} is no number of pods", f"write one up to {MAX_COUNT}")
    return number


def _read_pod_group(document: Document, name: str, path: Path, count: int) -> PodGroup:
    spec = value_at_path(document, path)
    require_shape(spec, POD, path)
    return PodGroup(name, path, count, as_mapping(spec))


def _read_replicas(document: Document, key: str) -> Iterator[PodGroup]:
    """Yield a pod group for each replica type of a training-operator job."""
    for role, item in as_mapping(value_at_path(document, ("spec", key))).items():
        path: Path = ("spec", key, str(role))
        if isinstance(item, Mapping):
            yield _read_pod_group(
                document, str(role), (*path, "template", "spec"), find_count(document, (*path, "replicas"))
            )


def _read_pytorch_job(document: Document, runtime: Document | None) -> JobPods:
    groups = tuple(_read_replicas(document, "pytorchReplicaSpecs"))
    count = sum(item.count for item in groups)
    stated = value_at_path(document, ("spec", "nprocPerNode"))
    elastic = value_at_path(document, ("spec", "elasticPolicy", "nProcPerNode"))
    # The API server writes the default "auto": a process for each GPU.
    processes = next((str(item) for item in (stated, elastic) if item is not None), "auto")
    variables = {"PET_NNODES": str(count), "PET_NPROC_PER_NODE": processes}
    has_master = any(item.name == "Master" for item in groups)
    if has_master:
        # A value such as "auto" counts as one process here (getNprocPerNodeInt of the training operator).
        variables["WORLD_SIZE"] = str(count * (parse_count(stated) or 1))
    return JobPods(groups, variables, has_master)


def _read_mpi_job(document: Document, runtime: Document | None) -> JobPods:
    groups = tuple(_read_replicas(document, "mpiReplicaSpecs"))
    has_workers = any(item.name == "Worker" for item in groups)
    if value_at_path(document, ("spec", "runLauncherAsWorker")) is not True and has_workers:
        groups = tuple(_remove_gpu_requests(item) if item.name == "Launcher" else item for item in groups)
    workers = next((item for item in groups if item.name == "Worker"), None)
    slots = find_count(document, ("spec", "slotsPerWorker"), 1)
    return JobPods(groups, launcher="Launcher" if workers else "", slots=slots)


def _remove_gpu_requests(group: PodGroup) -> PodGroup:
    """Return a pod group without GPU requests, for the launcher of an MPIJob, which runs no rank itself."""
    containers = [
        {key: value for key, value in item.items() if key != "resources"}
        for item in list_mappings_in(group.spec.get("containers"))
    ]
    return replace(group, spec={**group.spec, "containers": containers})


def _read_batch_job(document: Document, runtime: Document | None) -> JobPods:
    count = find_count(document, ("spec", "parallelism"))
    count = min(count, find_count(document, ("spec", "completions"), count))
    return JobPods((_read_pod_group(document, "", ("spec", "template", "spec"), count),))


def _read_job_set(document: Document, runtime: Document | None) -> JobPods:
    return JobPods(tuple(_read_replicated_jobs(document, ("spec", "replicatedJobs"))))


def _read_replicated_jobs(document: Document, path: Path) -> Iterator[PodGroup]:
    for index, item in enumerate(list_mappings_in(value_at_path(document, path))[:MAX_GROUPS]):
        below: Path = (*path, index, "template", "spec")
        count = find_count(document, (*path, index, "replicas")) * find_count(document, (*below, "parallelism"))
        yield _read_pod_group(document, str(item.get("name", "")), (*below, "template", "spec"), count)


_ANCESTOR = ("template", "metadata", "labels", "trainer.kubeflow.org/trainjob-ancestor-step")


def _read_train_job(document: Document, runtime: Document | None) -> JobPods:
    if runtime is None:
        kind, name = find_training_runtime(document) or ("ClusterTrainingRuntime", "")
        raise SpecError("spec.runtimeRef", f"{kind} {format_value(name)} was not given", "give it beside the job")
    wrapped = {"runtime": as_mapping(runtime.get("spec"))}
    path: Path = ("runtime", "template", "spec", "replicatedJobs")
    items = list_mappings_in(value_at_path(wrapped, path))
    steps = [value_at_path(item, _ANCESTOR) for item in items]
    place = steps.index("trainer") if "trainer" in steps else None
    if place is None:
        place = next((index for index, item in enumerate(items) if item.get("name") == "node"), None)
    if place is None:
        raise SpecError("spec.runtimeRef", "the runtime has no job that trains", "label one as trainer")
    policy = as_mapping(value_at_path(wrapped, ("runtime", "mlPolicy")))
    usual = find_count(wrapped, ("runtime", "mlPolicy", "numNodes"))
    count = find_count(document, ("spec", "trainer", "numNodes"), usual)
    name = str(items[place].get("name", "node"))
    group = _read_pod_group(wrapped, name, (*path, place, "template", "spec", "template", "spec"), count)
    group = _apply_trainer(document, group)
    uri = str(value_at_path(document, ("spec", "initializer", "model", "storageUri")) or "")
    own = value_at_path(document, ("spec", "trainer", "numProcPerNode"))
    mpi = as_mapping(policy.get("mpi"))
    if mpi:
        slots = parse_count(own if own is not None else mpi.get("numProcPerNode")) or 1
        return _read_mpi_runtime(document, wrapped, count, slots, uri, is_node=mpi.get("runLauncherAsNode") is True)
    if "torch" not in policy:
        return JobPods((group,), model_uri=uri)
    stated = own if own is not None else as_mapping(policy.get("torch")).get("numProcPerNode")
    variables = {"PET_NNODES": str(count), "PET_NPROC_PER_NODE": "auto" if stated is None else str(stated)}
    return JobPods((group,), variables, model_uri=uri)


def _read_mpi_runtime(
    document: Document, wrapped: Document, count: int, slots: int, model_uri: str, *, is_node: bool
) -> JobPods:
    """Return the pods of a TrainJob in which a launcher starts MPI ranks in the other pods.

    Args:
        document: the TrainJob.
        wrapped: the spec of its runtime under `runtime`.
        count: number of nodes.
        slots: ranks per node.
        model_uri: location of the model.
        is_node: whether the launcher's pod is one of the nodes.
    """
    path: Path = ("runtime", "template", "spec", "replicatedJobs")
    found = dict[str, PodGroup]()
    for index, item in enumerate(list_mappings_in(value_at_path(wrapped, path))):
        name = str(item.get("name"))
        if name in ("launcher", "node"):
            number = 1 if name == "launcher" else count - is_node
            found[name] = _read_pod_group(wrapped, name, (*path, index, "template", "spec", "template", "spec"), number)
    if len(found) < 2:
        raise SpecError("runtime.mlPolicy.mpi", "the runtime has no jobs named launcher and node", "annotate the job")
    launcher = _apply_trainer(document, found["launcher"], keeps_resources=not is_node)
    workers = _apply_trainer_resources(document, found["node"])
    return JobPods((launcher, workers), launcher="launcher", slots=slots, model_uri=model_uri)


_CONTAINER_FIELDS = ("command", "args", "image")


def _apply_trainer(document: Document, group: PodGroup, *, keeps_resources: bool = False) -> PodGroup:
    """Return the pod group with the settings of a TrainJob applied to its container `node`.

    The settings are `spec.trainer`, overrides and patches. With `keeps_resources`, the container's resources do not
    change.
    """
    trainer = as_mapping(value_at_path(document, ("spec", "trainer")))
    require_shape(trainer, {"command": [str], "args": [str]}, ("spec", "trainer"))
    pod = dict(group.spec)
    containers = [dict(item) for item in list_mappings_in(pod.get("containers"))]
    own = next((item for item in containers if item.get("name") == "node"), None)
    if own is None:
        if len(containers) != 1:
            raise SpecError("spec.runtimeRef", "the runtime has no container named node", "name one so")
        own = containers[0]
    own |= {key: trainer[key] for key in _CONTAINER_FIELDS if trainer.get(key)}
    own["env"] = [*list_mappings_in(own.get("env")), *list_mappings_in(trainer.get("env"))]
    if not keeps_resources and trainer.get("resourcesPerNode"):
        own["resources"] = trainer["resourcesPerNode"]
    for override in _list_overrides(document, group.name):
        pod["volumes"] = [*list_mappings_in(pod.get("volumes")), *list_mappings_in(override.get("volumes"))]
        for item in list_mappings_in(override.get("containers")):
            target = next((one for one in containers if one.get("name") == item.get("name")), None)
            if target is not None:
                for key in ("env", "volumeMounts"):
                    target[key] = [*list_mappings_in(target.get(key)), *list_mappings_in(item.get(key))]
    return replace(group, spec={**pod, "containers": containers})


def _apply_trainer_resources(document: Document, group: PodGroup) -> PodGroup:
    """Return the pod group with the resources of `spec.trainer.resourcesPerNode` in the container `node`."""
    resources = value_at_path(document, ("spec", "trainer", "resourcesPerNode"))
    containers = [
        {**item, "resources": resources} if resources and item.get("name") == "node" else item
        for item in list_mappings_in(group.spec.get("containers"))
    ]
    return replace(group, spec={**group.spec, "containers": containers})


def _list_overrides(document: Document, name: str) -> Iterator[Document]:
    spec = as_mapping(document.get("spec"))
    for item in list_mappings_in(spec.get("podTemplateOverrides")):
        if any(one.get("name") == name for one in list_mappings_in(item.get("targetJobs"))):
            yield as_mapping(item.get("spec"))
    below: Path = ("trainingRuntimeSpec", "template", "spec", "replicatedJobs")
    for patch in list_mappings_in(spec.get("runtimePatches")):
        for job in list_mappings_in(value_at_path(patch, below)):
            if job.get("name") == name:
                yield as_mapping(value_at_path(job, ("template", "spec", "template", "spec")))


def _read_volcano_job(document: Document, runtime: Document | None) -> JobPods:
    groups = list[PodGroup]()
    for index, item in enumerate(list_mappings_in(value_at_path(document, ("spec", "tasks")))[:MAX_GROUPS]):
        path: Path = ("spec", "tasks", index)
        name = str(item.get("name") or f"default{index}")
        groups.append(
            _read_pod_group(document, name, (*path, "template", "spec"), find_count(document, (*path, "replicas")))
        )
    plugins = as_mapping(value_at_path(document, ("spec", "plugins")))
    workers = [item for item in groups if item.gpus]
    # An MPI launcher asks for no GPU, and the workers wait for it.
    others = [item for item in groups if not item.gpus]
    if workers and len(others) == 1 and others[0].count == 1 and ("mpi" in plugins or "ssh" in plugins):
        return JobPods(tuple(groups), launcher=others[0].name, slots=None)
    count = sum(item.count for item in groups)
    if "pytorch" in plugins:
        return JobPods(tuple(groups), {"WORLD_SIZE": str(count)}, has_ranks=True)
    return JobPods(tuple(groups))


def _read_ray_job(document: Document, runtime: Document | None) -> JobPods:
    if value_at_path(document, ("spec", "clusterSelector")):
        raise SpecError("spec.clusterSelector", "the job runs in a cluster of another manifest", "annotate the job")
    groups = tuple(_read_ray_groups(document, ("spec", "rayClusterSpec")))
    entrypoint = value_at_path(document, ("spec", "entrypoint"))
    variables = _read_runtime_environment(document)
    return JobPods(groups, variables, entrypoint=entrypoint if isinstance(entrypoint, str) else "")


def _read_ray_cluster(document: Document, runtime: Document | None) -> JobPods:
    remedy = "give the RayJob, or annotate the cluster with a model and its training"
    raise SpecError("spec", "a RayCluster does not say what it trains: jobs are submitted to it later", remedy)


def _read_ray_groups(document: Document, path: Path) -> Iterator[PodGroup]:
    yield _read_pod_group(document, "head", (*path, "headGroupSpec", "template", "spec"), 1)
    for index, item in enumerate(list_mappings_in(value_at_path(document, (*path, "workerGroupSpecs")))[:MAX_GROUPS]):
        below: Path = (*path, "workerGroupSpecs", index)
        hosts = find_count(document, (*below, "numOfHosts"))
        count = find_count(document, (*below, "replicas"), find_count(document, (*below, "minReplicas"), 0)) * hosts
        yield _read_pod_group(document, str(item.get("groupName", index)), (*below, "template", "spec"), count)


def _read_runtime_environment(document: Document) -> dict[str, str]:
    """Return the environment variables in `spec.runtimeEnvYAML`.

    Raises:
        SpecError: the text is not a YAML mapping.
    """
    text = value_at_path(document, ("spec", "runtimeEnvYAML"))
    if not isinstance(text, str) or not text.strip():
        return {}
    from tilecast.api import documents

    items = documents.load_documents(text, "spec.runtimeEnvYAML", 2**16)
    values = as_mapping(items[0].get("env_vars")) if items else {}
    return {str(key): str(value) for key, value in values.items()}


@dataclass(frozen=True, slots=True)
class _ReadableKind:
    """A kind of job: its API group, the function that finds its pods, and whether advice can place it."""

    group: str
    read: Callable[[Document, Document | None], JobPods]


KINDS: Mapping[str, _ReadableKind] = {
    "TrainJob": _ReadableKind("trainer.kubeflow.org", _read_train_job),
    "PyTorchJob": _ReadableKind("kubeflow.org", _read_pytorch_job),
    "MPIJob": _ReadableKind("kubeflow.org", _read_mpi_job),
    "JobSet": _ReadableKind("jobset.x-k8s.io", _read_job_set),
    "RayJob": _ReadableKind("ray.io", _read_ray_job),
    "RayCluster": _ReadableKind("ray.io", _read_ray_cluster),
    "Job": _ReadableKind("batch", _read_batch_job),
}
"""Kinds of jobs that can be read, by name. Volcano also has a kind named Job (`_find_kind`)."""
_VOLCANO = _ReadableKind("batch.volcano.sh", _read_volcano_job)


def _find_kind(document: Document) -> _ReadableKind | None:
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    kind = KINDS.get(str(document.get("kind")))
    if document.get("kind") == "Job" and group == _VOLCANO.group:
        return _VOLCANO
    return kind if kind is not None and kind.group == group else None


def is_readable_job(document: Document) -> bool:
    """Return whether a document is a job of a kind whose pods can be read."""
    return _find_kind(document) is not None


def is_owned(document: Document) -> bool:
    """Return whether another job created this job. Then that other job is read instead."""
    owners = list_mappings_in(value_at_path(document, ("metadata", "ownerReferences")))
    return any(item.get("controller") is True and item.get("kind") in KINDS for item in owners)


_ENDED = ("Complete", "Completed", "Succeeded", "Failed", "Terminated", "Aborted", "STOPPED", "SUCCEEDED", "FAILED")


def is_finished(document: Document) -> bool:
    """Return whether a job's status says that it has ended."""
    status = as_mapping(document.get("status"))
    conditions = list_mappings_in(status.get("conditions"))
    phase = as_mapping(status.get("state")).get("phase") if isinstance(status.get("state"), Mapping) else None
    ended = any(item.get("type") in _ENDED and item.get("status") == "True" for item in conditions)
    return ended or phase in _ENDED or status.get("jobStatus") in _ENDED


def may_request_gpus(document: Document, runtime: Document | None) -> bool:
    """Return whether a pod of a job requests a GPU, or may do so because the pods cannot be read.

    MIG slices, shared GPUs and devices of ResourceClaims count too.

    Args:
        document: the job's manifest.
        runtime: the runtime of a TrainJob, or None.
    """
    try:
        if document.get("kind") == "RayCluster":
            groups = tuple(_read_ray_groups(document, ("spec",)))
        else:
            groups = find_pods(document, runtime).groups
    except SpecError:
        return True
    return any(item.count and (item.gpus or _requests_other_devices(item)) for item in groups)


def _requests_other_devices(group: PodGroup) -> bool:
    """Return whether a container requests MIG slices, shared GPUs, or devices of a ResourceClaim."""
    table = read_label_table()
    shared = table.gpu_resource + table.shared_resource_suffix
    for container in list_mappings_in(group.spec.get("containers")):
        resources = as_mapping(container.get("resources"))
        if list_mappings_in(resources.get("claims")):
            return True
        for part in ("limits", "requests"):
            for name, amount in as_mapping(resources.get(part)).items():
                if (str(name).startswith(table.mig_resource_prefix) or name == shared) and parse_count(amount) != 0:
                    return True
    return False


def find_training_runtime(document: Document) -> tuple[str, str] | None:
    """Return (kind, name) of the runtime of a TrainJob. Return None for other kinds."""
    if document.get("kind") != "TrainJob" or not is_readable_job(document):
        return None
    kind, name = (value_at_path(document, ("spec", "runtimeRef", key)) for key in ("kind", "name"))
    return str(kind or "ClusterTrainingRuntime"), str(name or "")


def find_pods(document: Document, runtime: Document | None) -> JobPods:
    """Return the pods of a job.

    Args:
        document: the job's manifest.
        runtime: the TrainingRuntime or ClusterTrainingRuntime of a TrainJob, or None.

    Raises:
        SpecError: the kind is not read, or the pods cannot be found.
    """
    kind = _find_kind(document)
    if kind is None:
        problem = f"{format_value(document.get('kind'))} is no job that is read"
        raise SpecError("kind", problem, f"use one of {', '.join(KINDS)} or Volcano's Job")
    return kind.read(document, runtime)

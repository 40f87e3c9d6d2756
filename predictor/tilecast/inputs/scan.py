"""Read the GPU jobs of a cluster, or of manifests in folders and files, with the objects that the jobs refer to."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilecast import manifests
from tilecast.api import documents
from tilecast.api.documents import Document
from tilecast.api.fields import value_at_path
from tilecast.inputs.pools import run_kubectl
from tilecast.inputs.reading import InputWarning, get_metadata_name, read_text
from tilecast.spec import SpecError

_ENDINGS = (".yaml", ".yml", ".json")
MAX_FILES = 20_000
_CLUSTER_KINDS = (
    "trainjobs.trainer.kubeflow.org", "trainingruntimes.trainer.kubeflow.org",
    "clustertrainingruntimes.trainer.kubeflow.org", "pytorchjobs.kubeflow.org", "mpijobs.kubeflow.org",
    "jobsets.jobset.x-k8s.io", "rayjobs.ray.io", "rayclusters.ray.io", "jobs.batch.volcano.sh", "jobs.batch",
)  # fmt: skip
"""Resources that `--context` reads, by their kubectl names."""
_REMEDY = "check the context and its rights, or name files of manifests"


@dataclass(frozen=True, slots=True)
class ScannedJob:
    """An unfinished GPU job, with the runtime and the ConfigMaps that it refers to."""

    namespace: str
    name: str
    document: Document
    objects: tuple[Document, ...]

    @property
    def items(self) -> list[Document]:
        """The job and the objects that it refers to."""
        return [self.document, *self.objects]


@dataclass(frozen=True, slots=True)
class FoundJobs:
    """The GPU jobs that were found, and the files below folders that could not be read."""

    jobs: list[ScannedJob]
    unread_files: tuple[str, ...] = ()


def read_scanned_jobs(names: Sequence[str], context: str | None) -> FoundJobs:
    """Return the GPU jobs of files and folders, or of a cluster if `names` is empty.

    Args:
        names: files, folders, or "-" for standard input.
        context: kubectl context, or None.

    Raises:
        SpecError: there is nothing to read, or it cannot be read.
    """
    if not names and context is None:
        raise SpecError("FILE", "is missing", "name files or folders of manifests, or give --context NAME")
    found, unread = _read_files(names) if names else (_read_cluster(context), ())
    if not any(map(manifests.is_readable_job, found)):
        where = ", ".join(names)[:80] if names else f"context {context}"
        raise SpecError(where, "holds no job", "give manifests of jobs")
    return FoundJobs(select_jobs(found), unread)


def select_jobs(found: Sequence[Document]) -> list[ScannedJob]:
    """Return the unfinished GPU jobs among objects, without those that another job created."""
    runtimes = {_get_object_key(item): item for item in found if str(item.get("kind")).endswith("TrainingRuntime")}
    config_maps = {_get_object_key(item): item for item in found if item.get("kind") == "ConfigMap"}
    jobs = list[ScannedJob]()
    for item in found:
        if not manifests.is_readable_job(item) or manifests.is_owned(item) or manifests.is_finished(item):
            continue
        namespace = _get_namespace(item)
        runtime = _find_runtime(item, namespace, runtimes)
        if not manifests.may_request_gpus(item, runtime):
            continue
        names = manifests.list_config_maps(item, runtime)
        beside = [config_maps[key] for name in sorted(names) if (key := ("ConfigMap", namespace, name)) in config_maps]
        objects = (*([runtime] if runtime else []), *beside)
        jobs.append(ScannedJob(namespace, get_metadata_name(item) or "unnamed", item, objects))
    return jobs


def _get_object_key(document: Document) -> tuple[str, str, str]:
    kind = str(document.get("kind"))
    return kind, "" if kind.startswith("Cluster") else _get_namespace(document), get_metadata_name(document)


def _get_namespace(document: Document) -> str:
    return str(value_at_path(document, ("metadata", "namespace")) or "")


def _find_runtime(
    document: Document, namespace: str, runtimes: Mapping[tuple[str, str, str], Document]
) -> Document | None:
    named = manifests.find_training_runtime(document)
    if named is None:
        return None
    kind, name = named
    return runtimes.get((kind, "" if kind.startswith("Cluster") else namespace, name))


def _read_files(names: Sequence[str]) -> tuple[list[Document], tuple[str, ...]]:
    """Return the objects of files and of all files below folders, and the skipped files below folders.

    A file is skipped as a whole if any document in it cannot be read.
    """
    found = list[Document]()
    left_out = list[SpecError]()
    unread = list[str]()
    for name in names:
        if name == "-" or not Path(name).is_dir():
            found += documents.load_documents(read_text(name), name)
            continue
        files = sorted(item for item in Path(name).rglob("*") if item.suffix in _ENDINGS and item.is_file())
        if len(files) > MAX_FILES:
            raise SpecError(name, f"holds more than {MAX_FILES:,} files", "name the folders of jobs")
        for file in files:
            try:
                found += documents.load_documents(read_text(str(file)), str(file))
            except SpecError as error:
                left_out.append(error)
                unread.append(str(file))
    if left_out:
        more = f" (and {len(unread) - 1} more, the next {unread[1]})" if unread[1:] else ""
        text = f"left out {left_out[0].field}, which {left_out[0].problem}{more}"
        warnings.warn(text, InputWarning, stacklevel=2)
    return found, tuple(unread)


def _read_cluster(context: str | None) -> list[Document]:
    """Return the jobs of all namespaces, their runtimes, and the ConfigMaps that they refer to, with kubectl."""
    served = set(run_kubectl(context, "api-resources", "--verbs=list", "-o", "name", remedy=_REMEDY).split())
    # Kubernetes' own group has no suffix in some versions of kubectl.
    kinds = [kind for kind in _CLUSTER_KINDS if kind in served]
    text = run_kubectl(context, "get", ",".join(kinds), "-A", "-o", "json", remedy=_REMEDY)
    found = documents.load_documents(text, f"context {context}")
    wanted = dict[str, set[str]]()
    for job in select_jobs(found):
        runtime = next((item for item in job.objects if "TrainingRuntime" in str(item.get("kind"))), None)
        wanted.setdefault(job.namespace, set()).update(manifests.list_config_maps(job.document, runtime))
    for namespace, names in wanted.items():
        if not names:
            continue
        arguments = ("get", "configmaps", "-n", namespace, "--ignore-not-found", "-o", "json", *sorted(names))
        try:
            text = run_kubectl(context, *arguments, remedy=_REMEDY)
        except SpecError as error:
            problem = f"ConfigMaps of namespace {namespace} are not read: {error.problem}"
            warnings.warn(problem, InputWarning, stacklevel=2)
            continue
        found += documents.load_documents(text, f"context {context}") if text.strip() else []
    return found

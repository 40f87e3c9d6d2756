"""Read the job and the plan from a manifest's pods, with the place and the confidence of the reading."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tilecast import readers
from tilecast.api import documents
from tilecast.api.fields import Document, as_mapping, list_mappings_in
from tilecast.jobs.quantities import count_requested_gpus
from tilecast.jobs.shapes import format_path
from tilecast.manifests.containers import (
    Container,
    ContainerFiles,
    find_line,
    find_script_line,
    list_names,
    read_container,
)
from tilecast.manifests.pods import JobPods, PodGroup, find_pods
from tilecast.manifests.processes import Processes, count_processes
from tilecast.readers import LaunchReading
from tilecast.spec import SpecError
from tilecast.zoo import huggingface

Confidence = Literal["high", "medium"]
MODEL_FOLDER = "/workspace/model"
"""Folder into which an initializer of Kubeflow Trainer loads the model."""
_HUB = "hf://"
_HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_MOST_OPTIONS = 20


@dataclass(frozen=True, slots=True)
class JobReading:
    """The job and the plan read from the pods of a manifest."""

    kind: str
    name: str
    launch: LaunchReading
    """Launch read from the command. Its GPUs are those of all pods."""
    pods: int
    gpus_per_pod: int
    where: str
    """Path of the command in the manifest."""
    files: tuple[str, ...] = ()
    """ConfigMaps and keys that were read."""
    assumed: tuple[str, ...] = ()
    """Sentences on the assumptions that were made."""

    @property
    def gpus(self) -> int:
        return self.pods * self.gpus_per_pod

    @property
    def confidence(self) -> Confidence:
        """Confidence in what was read: medium if anything was assumed or ignored, otherwise high."""
        launch = self.launch
        return "medium" if self.assumed or launch.unpriced or launch.unknown or launch.notes else "high"

    @property
    def model(self) -> dict[str, Any] | None:
        """`spec.model`. None if `launch.model_name` is only a name on the Hugging Face Hub, or is missing."""
        return None if self.launch.model is None else dict(self.launch.model)

    @property
    def training(self) -> dict[str, Any]:
        """`spec.training` as stated by the launch."""
        said = dict(self.launch.training)
        return {**said, "framework": said.get("framework", self.launch.framework)}

    def list_origins(self, training: Mapping[str, Any]) -> dict[str, str]:
        """Return the option and place of each field of `spec.training` that the command states, by the field's path.

        Args:
            training: the fields of the job. A field whose value differs from that in the command is left out.
        """
        said = self.training
        origins = {
            key: self.launch.origins.get(f"training.{key}", key) for key in said if training.get(key) == said[key]
        }
        return {f"spec.training.{key}": f"{self.where}: {option}" for key, option in origins.items()}

    def summary(self) -> tuple[str, ...]:
        """Return sentences that say what was read and where, how reliable that is, and what was ignored."""
        first, *others = self.launch.summary()
        place = f"{first[:-1]}, from {self.where} of {self.kind} {self.name} ({self.confidence} confidence)."
        sources = (f"Read too: {'; '.join(self.files)}.",) if self.files else ()
        return (place, *sources, *self.assumed, *others)

    def document(self) -> dict[str, Any]:
        """Return what was read as a mapping, to write into an annotation or as JSON."""
        launch = self.launch
        found = {
            "launcher": launch.title,
            "model": launch.model_name or as_mapping(launch.model).get("preset") or "dimensions of the command",
            "gpus": self.gpus,
            "pods": self.pods,
            "plan": launch.plan_text(),
            "confidence": self.confidence,
            "from": [self.where, *self.files],
            "assumed": list(self.assumed),
            "ignored": [*launch.unpriced, *launch.unknown][:_MOST_OPTIONS],
        }
        return {key: value for key, value in found.items() if value not in ("", [])}

    def format_annotation(self, limit: int = 1024) -> str:
        """Return the document as JSON of at most `limit` characters. Long lists are cut."""
        found = self.document()
        text = json.dumps(found, separators=(",", ":"))
        for key in ("ignored", "assumed", "from"):
            if len(text) <= limit:
                break
            found[key] = [f"{len(found.get(key, ()))} in all"]
            text = json.dumps(found, separators=(",", ":"))
        return text[:limit]


def list_config_maps(document: Document, runtime: Document | None = None) -> set[str]:
    """Return the names of the ConfigMaps that the pods of a launch may read, or an empty set if the pods are not found.

    Args:
        document: the job's manifest.
        runtime: the runtime of a TrainJob, or None.
    """
    try:
        pods = find_pods(document, runtime)
    except SpecError:
        return set()
    return {name for item in _list_readable(pods) for name in list_names(item.spec)}


def _list_readable(pods: JobPods) -> list[PodGroup]:
    """Return the pod groups whose command may launch the job."""
    if pods.launcher:
        return [item for item in pods.groups if item.name == pods.launcher]
    if pods.entrypoint is not None:
        return [item for item in pods.groups if item.name == "head"]
    return [item for item in pods.groups if item.gpus and item.count]


def read_manifest(
    document: Document,
    runtime: Document | None = None,
    config_maps: Mapping[str, Document] | None = None,
    *,
    has_model: bool = False,
    lenient: bool = False,
) -> JobReading:
    """Return the training that the pods of a job describe.

    Args:
        document: the job's manifest, of a kind accepted by `is_readable_job`.
        runtime: the TrainingRuntime or ClusterTrainingRuntime of a TrainJob, or None.
        config_maps: ConfigMaps of the job's namespace by name. Only those that a pod names are read.
        has_model: whether the job's model is known from elsewhere, such as an annotation.
        lenient: whether to ignore options that change speed or memory but are not priced.

    Raises:
        SpecError: the manifest does not describe the job, describes it in an unsupported way, or contradicts itself.
            The error names the place and the reason.
    """
    pods, given = find_pods(document, runtime), config_maps or {}
    groups = _list_readable(pods)
    if not groups:
        raise SpecError("spec", "no pod asks for a GPU", "add nvidia.com/gpu to the limits of a container")
    found = [_read_group(document, pods, item, given, has_model, lenient) for item in groups]
    first = found[0]
    for other in found[1:]:
        if _list_launch_facts(other.launch) != _list_launch_facts(first.launch):
            problem = f"pods of {first.where} and {other.where} run different commands"
            raise SpecError("spec", problem, "annotate the job with its model and training")
    return first


def _list_launch_facts(launch: LaunchReading) -> tuple[object, ...]:
    return launch.framework, launch.training, launch.plan, launch.model, launch.model_name, launch.gpus


def _read_group(
    document: Document, pods: JobPods, group: PodGroup, config_maps: Mapping[str, Document], has_model: bool,
    lenient: bool,
) -> JobReading:  # fmt: skip
    index, content = _choose_container(pods, group)
    where = f"{format_path(group.path)}.containers[{index}]"
    if pods.launcher or pods.entrypoint is not None:
        given = {} if pods.entrypoint is None else pods.variables
    else:
        given = pods.variables
    container = read_container(group.spec, content, where, config_maps, given)
    if pods.entrypoint is not None:
        container.where = where = "spec.entrypoint"
        if not pods.entrypoint.strip():
            raise SpecError(where, "is missing", "write it, or annotate the job with its model and training")
        line, script = find_script_line(container, pods.entrypoint)
    else:
        line, script = find_line(container)
    counted = count_processes(line, script, pods, group, container.variables, where)
    line = replace(line, gpus=counted.gpus, gpus_per_node=counted.gpus_per_pod, nodes=counted.pods)
    launch = readers.read_line(line, where, ContainerFiles(container, script.files), counted.gpus, has_model)
    _check_gpus(launch, counted, where)
    launch = replace(launch, gpus=counted.gpus, gpus_per_node=counted.gpus_per_pod)
    if not lenient:
        readers.require_priced(launch, where)
    launch, assumed = _find_model(launch, container, pods)
    if launch.model is None and not launch.model_name and not has_model:
        raise SpecError(where, "says no model", "annotate the job with tilecast.dev/model")
    metadata = as_mapping(document.get("metadata"))
    sources = tuple(dict.fromkeys(container.sources[path] for path in container.read if path in container.sources))
    return JobReading(
        str(document.get("kind")),
        str(metadata.get("name") or metadata.get("generateName") or "unnamed"),
        launch,
        counted.pods,
        counted.gpus_per_pod,
        where,
        sources,
        (*counted.assumed, *assumed),
    )


def _choose_container(pods: JobPods, group: PodGroup) -> tuple[int, Document]:
    """Return the container that launches the job, and its index in the pod.

    Raises:
        SpecError: several containers may launch it.
    """
    containers = list_mappings_in(group.spec.get("containers"))
    asking = [index for index, item in enumerate(containers) if count_requested_gpus(item.get("resources"))]
    if (pods.launcher or pods.entrypoint is not None) and not asking:
        asking = list(range(len(containers)))[:1]
    if len(asking) != 1:
        problem = f"{len(asking)} containers ask for GPUs"
        raise SpecError(format_path(group.path), problem, "annotate the job with its model and training")
    return asking[0], containers[asking[0]]


def _check_gpus(launch: LaunchReading, counted: Processes, where: str) -> None:
    """Raise SpecError if a configuration states another number of GPUs than the pods have.

    Raises:
        SpecError: the two numbers differ.
    """
    if launch.gpus is not None and launch.gpus != counted.gpus:
        problem = f"its configuration is for {launch.gpus} GPUs, and the pods ask for {counted.gpus}"
        raise SpecError(where, problem, "make them equal")


def _find_model(launch: LaunchReading, container: Container, pods: JobPods) -> tuple[LaunchReading, tuple[str, ...]]:
    """Return the launch with its model from ConfigMaps, an initializer or the presets, and the assumptions made.

    Raises:
        SpecError: the model is a path that none of them knows.
    """
    name = launch.model_name
    if launch.model is not None or not name:
        return launch, ()
    text = container.find_text(name if name.endswith(".json") else f"{name.rstrip('/')}/config.json")
    if text is not None:
        items = documents.load_documents(text, name, 2**20)
        if len(items) != 1 or not huggingface.is_config(items[0]):
            raise SpecError(name, "describes no model", "give a config.json of Transformers")
        return replace(launch, model={"huggingFace": {"config": huggingface.remove_label_tables(items[0])}}), ()
    assumed = list[str]()
    if name.rstrip("/").startswith(MODEL_FOLDER) and pods.model_uri.startswith(_HUB):
        name = pods.model_uri.removeprefix(_HUB).strip("/")
        assumed.append(f"{launch.model_name} is {name}, which the initializer loads.")
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    known = readers.find_preset_in_name(name)
    if known is None and is_path:
        problem = f"names the model by the path {name[:80]!r}, which is not in the manifest"
        raise SpecError(container.where, problem, "annotate the job with tilecast.dev/model")
    if known is None:
        if not _HUB_NAME.fullmatch(name):
            raise SpecError(container.where, f"names a model {name[:60]!r} that is not known", "annotate the job")
        return replace(launch, model_name=name), tuple(assumed)
    if is_path:
        assumed.append(f"{name} is {known}, as its name says.")
    return replace(launch, model={"preset": known}, model_name=name), tuple(assumed)

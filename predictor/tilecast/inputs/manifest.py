"""Read a manifest of a Kubernetes job (such as a PyTorchJob), and print it with the advised fields changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilecast import jobs, manifests
from tilecast.advice import Advice, Request
from tilecast.api import documents
from tilecast.api.edit import edit_yaml
from tilecast.api.fields import as_mapping
from tilecast.hardware import Pool
from tilecast.inputs import hub
from tilecast.inputs.reading import get_metadata_name
from tilecast.jobs import candidates, commands
from tilecast.manifests import JobReading
from tilecast.nodes import PublishedDevice
from tilecast.spec import SpecError


@dataclass(frozen=True, slots=True)
class ManifestJob:
    """A Kubernetes job that is not a TrainingJob, with the text of the manifest that contains it."""

    text: str
    index: int
    """Index of the job's document in the file."""
    document: documents.Document
    job: jobs.Job

    @classmethod
    def from_documents(cls, text: str, objects: Sequence[documents.Document]) -> ManifestJob | None:
        """Return the job of a manifest, given its text and its parsed objects. Return None if no object is a job.

        Raises:
            SpecError: the file has several jobs, or the job lacks fields that its kind requires.
        """
        places = [index for index, document in enumerate(objects) if jobs.is_job(document)]
        if not places:
            return None
        document = objects[places[0]]
        by_name = {(str(item.get("kind")), get_metadata_name(item)): item for item in objects}
        job = jobs.read_job(document, by_name.get(jobs.find_training_runtime(document) or ("", "")))
        return cls(text, places[0], document, jobs.resolve_claims(job, by_name))

    @property
    def program(self) -> tuple[str, ...]:
        """Path and arguments of the Python program that the job's command runs. Empty if it runs none."""
        return commands.find_program(self.document, self.job)

    def narrow_request(
        self,
        request: Request,
        pools: Sequence[Pool],
        labels: Iterable[Mapping[str, str]],
        devices: Mapping[str, Sequence[PublishedDevice]] | None,
    ) -> tuple[Request, candidates.JobCandidates]:
        """Return the request with the job's current pool and GPUs as baseline, and the pools that the job may use.

        Raises:
            SpecError: the job can run on none of the pools.
        """
        # The advice may change the number of pods, except in jobs where this takes more than changing a number.
        is_placed = not self.job.is_countable
        choice = candidates.find_candidates(self.job, pools, labels, None, devices, writes_advice=is_placed)
        return candidates.build_job_request(request, self.job, choice, writes_advice=is_placed), choice

    def edit_manifest(self, advice: Advice, choice: candidates.JobCandidates, command: str = "") -> str:
        """Return the manifest's text with the job's fields changed as advised. All other text is unchanged.

        YAML aliases are expanded first, so that changing an aliased value affects only one field. Without a
        recommendation in the advice, return the text unchanged.

        Args:
            advice: the advice for the job.
            choice: the pools that the job may use.
            command: bash script that replaces the command of every GPU pod. If empty, commands are unchanged.

        Raises:
            SpecError: the job has its own pod templates (not those of a runtime), and none of them requests a GPU.
        """
        if advice.best is None:
            return self.text
        if jobs.find_training_runtime(self.document) is None:
            jobs.require_gpus(self.job)
        put = candidates.find_placement_for_new_job(advice.best, self.job, choice)
        changes = jobs.compute_changes(self.document, self.job, put)
        changes += commands.replace_commands(self.document, self.job, command) if command else []
        return edit_yaml(documents.expand_aliases(self.text), changes, self.index)


def find_document(objects: Sequence[documents.Document]) -> documents.Document | None:
    """Return the only object that is a job of a supported kind. Return None if there is none.

    Raises:
        SpecError: there are several.
    """
    found = [document for document in objects if jobs.is_job(document) or manifests.is_readable_job(document)]
    if len(found) > 1:
        remedy = "give a file with one of them, or see all by `tilecast scan`"
        raise SpecError("kind", f"the file holds {len(found)} jobs", remedy)
    return found[0] if found else None


def read_annotations(document: documents.Document) -> dict[str, str]:
    """Return the annotations of an object."""
    metadata = as_mapping(document.get("metadata"))
    return {str(key): str(value) for key, value in as_mapping(metadata.get("annotations")).items()}


def read_described_spec(
    document: documents.Document,
    annotations: Mapping[str, str],
    objects: Mapping[tuple[str, str], documents.Document],
    *,
    lenient: bool = False,
) -> tuple[dict[str, Any], JobReading | None]:
    """Return the TrainingJob spec that a job of any kind describes, and the reading of its command.

    Annotations take precedence over the command. The second result is None if nothing could be read from the command.

    Args:
        document: the job.
        annotations: its annotations.
        objects: runtimes and ConfigMaps that it may refer to, by kind and name.
        lenient: whether to ignore options of the command that are not priced.

    Raises:
        SpecError: neither annotations nor the command describe the job.
    """
    has_model = bool(annotations.get(jobs.MODEL, "").strip())
    config_maps = {name: item for (kind, name), item in objects.items() if kind == "ConfigMap"}
    runtime = objects.get(manifests.find_training_runtime(document) or ("", ""))
    try:
        reading = manifests.read_manifest(document, runtime, config_maps, has_model=has_model, lenient=lenient)
        model = reading.model
        if model is None and not has_model:
            model = {"huggingFace": {"config": dict(hub.read_hub_config(reading.launch.model_name).config)}}
    except SpecError as error:
        # A job without a command tells what is missing, as it did before commands were read.
        return jobs.read_training_spec(annotations, None, f"{error.field}: {error.problem}"), None
    return jobs.read_training_spec(annotations, {"model": model, "training": reading.training}), reading

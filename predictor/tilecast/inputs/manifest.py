"""Files with a job of another kind: advised as they stand, and printed as they should be committed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilecast import jobs
from tilecast.advice import Advice, Request
from tilecast.api import documents
from tilecast.api.edit import edit_yaml
from tilecast.hardware import Pool
from tilecast.inputs.reading import metadata_name
from tilecast.jobs import candidates, commands
from tilecast.nodes import PublishedDevice
from tilecast.spec import SpecError


@dataclass(frozen=True, slots=True)
class ManifestJob:
    """Job of another kind in the text of a file."""

    text: str
    index: int
    """Index of the job's document in the file."""
    document: documents.Document
    job: jobs.Job

    @classmethod
    def from_documents(cls, text: str, objects: Sequence[documents.Document]) -> ManifestJob | None:
        """Return the only job of a file, or None if the file has none.

        Raises:
            SpecError: the file has several jobs, or the job does not have the shape of its kind.
        """
        places = [index for index, document in enumerate(objects) if jobs.is_job(document)]
        if not places:
            return None
        if len(places) > 1:
            raise SpecError("kind", f"the file holds {len(places)} jobs", "give a file with one of them")
        document = objects[places[0]]
        by_name = {(str(item.get("kind")), metadata_name(item)): item for item in objects}
        job = jobs.read_job(document, by_name.get(jobs.runtime_of(document) or ("", "")))
        return cls(text, places[0], document, jobs.resolve_claims(job, by_name))

    @property
    def program(self) -> tuple[str, ...]:
        """Python program in the job's own command, with its arguments; empty if the command names none."""
        return commands.find_program(self.document, self.job)

    def narrow_request(
        self,
        request: Request,
        pools: Sequence[Pool],
        labels: Iterable[Mapping[str, str]],
        devices: Mapping[str, Sequence[PublishedDevice]] | None,
    ) -> tuple[Request, candidates.JobCandidates]:
        """Return the request with the job's own GPUs as the baseline, and the pools that the job may use.

        Raises:
            SpecError: the job may use none of the pools that it allows.
        """
        # The advice may change the number of pods, except in jobs where this takes more than changing a number.
        is_placed = not self.job.is_countable
        choice = candidates.find_candidates(self.job, pools, labels, None, devices, is_placed=is_placed)
        return candidates.request_with_baseline(request, self.job, choice, is_placed=is_placed), choice

    def edited_manifest(self, advice: Advice, choice: candidates.JobCandidates, command: str = "") -> str:
        """Return the text of the file with the advised fields of the job changed and all other bytes kept.

        YAML aliases in the file are written out first, so that a change in one place does not affect another. Without a
        recommendation the file is returned unchanged.


        Args:
            advice: the advice for the job.
            choice: the pools that the job may use.
            command: bash script that every pod with GPUs shall run; empty keeps the job's own command.

        Raises:
            SpecError: no pod of the job requests a GPU, and the job has its pod templates itself, not in a runtime.
        """
        if advice.best is None:
            return self.text
        if jobs.runtime_of(self.document) is None:
            jobs.require_gpus(self.job)
        put = candidates.place_manifest(advice.best, self.job, choice)
        changes = jobs.compute_changes(self.document, self.job, put)
        changes += commands.replace_commands(self.document, self.job, command) if command else []
        return edit_yaml(documents.expand_aliases(self.text), changes, self.index)

"""Index of the TrainingJobs by their targets, jobs of other kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tilecast.api import training_job
from tilecast.api.fields import as_mapping
from tilecast.jobs import JOB_KINDS
from tilecast_operator.kube.cache import CachedObject
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.objects.tables import Cache
from tilecast_operator.objects.view import View


class JobRequest(NamedTuple):
    """A TrainingJob that targets a job of another kind."""

    created: str
    document: Document


class JobRequestIndex:
    """Index that finds the TrainingJobs of a target. Belongs to one event loop.

    Args:
        cache: Cache with the TrainingJobs.
        due: Function that is called with the key of each job to reconcile.
    """

    def __init__(self, cache: Cache, add_key: Callable[[Key], None]) -> None:
        self._due = add_key
        self._requests: dict[Key, dict[str, JobRequest]] = {}
        """TrainingJobs by their target, then by their own name."""
        self._targets: dict[Key, Key] = {}
        """Target by TrainingJob."""
        cache.training_jobs.add_listener(self._on_training_job_change)

    def __contains__(self, job: Key) -> bool:
        return job in self._requests

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._requests))

    def find_requester(self, job: Key) -> tuple[str, Document] | None:
        """Return the name and document of the oldest TrainingJob that targets a job, or None."""
        others = self._requests.get(job) or {}
        name = min(others, key=lambda name: (others[name].created, name), default=None)
        return None if name is None else (name, others[name].document)

    def notify_requesters(self, job: Key) -> None:
        """Reconcile the TrainingJobs that target a job, because the job has changed."""
        for name in self._requests.get(job, ()):
            self._due(Key(training_job.KIND, job.namespace, name))

    def _on_training_job_change(
        self, key: Key, before: CachedObject[View] | None, now: CachedObject[View] | None
    ) -> None:
        document: Mapping[str, Any] = {} if now is None else now.value.document
        target, known = read_target(key.namespace, document), self._targets.pop(key, None)
        if known is not None and known != target:
            self._withdraw_request(known, key.name)
        if target is None or now is None:
            return
        self._targets[key] = target
        others, request = self._requests.setdefault(target, {}), JobRequest(now.value.created, document)
        if others.get(key.name) != request:
            others[key.name] = request
            self._due(target)
            self.notify_requesters(target)

    def _withdraw_request(self, job: Key, name: str) -> None:
        """Remove a TrainingJob from the index, because it no longer targets a job."""
        others = self._requests.get(job, {})
        others.pop(name, None)
        if not others:
            self._requests.pop(job, None)
        self._due(job)
        self.notify_requesters(job)


def read_target(namespace: str, document: Document) -> Key | None:
    """Return the key of the job that a TrainingJob targets, or None if it has no target of a known kind."""
    reference = as_mapping(as_mapping(document.get("spec")).get("targetRef"))
    kind = reference.get("kind")
    return Key(kind, namespace, str(reference.get("name", ""))) if isinstance(kind, str) and kind in JOB_KINDS else None


def read_mode(document: Document) -> training_job.Mode:
    """Return the mode of a TrainingJob document, which may be invalid. For an unknown mode, return Advise."""
    # YAML reads a bare Off as false.
    value = as_mapping(document.get("spec")).get("mode")
    return next((mode for mode in training_job.MODES if mode == value), "Off" if value is False else "Advise")

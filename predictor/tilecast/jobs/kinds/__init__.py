"""Kinds of jobs that can get advice. Each module of this package defines one kind as `KIND`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules

from tilecast.api.base import format_value
from tilecast.api.fields import Document
from tilecast.jobs.interface import JobKind
from tilecast.spec import SpecError


def _import_kinds() -> Iterator[JobKind]:
    """Yield the `KIND` of every module of this package."""
    for module in iter_modules(__path__, f"{__name__}."):
        kind: JobKind = import_module(module.name).KIND
        yield kind


JOB_KINDS: Mapping[str, JobKind] = {
    kind.kind: kind for kind in sorted(_import_kinds(), key=lambda kind: (kind.group, kind.kind), reverse=True)
}
"""Kinds of jobs by name, in the order in which messages list them: by API group, with Kubernetes' own Job last."""


def is_job(document: Document) -> bool:
    """Return whether a document has a known kind of job and API version."""
    kind = JOB_KINDS.get(str(document.get("kind")))
    return kind is not None and document.get("apiVersion") == kind.api_version


def find_kind(document: Document) -> JobKind:
    """Return the `JobKind` for a document's kind and API version.

    Raises:
        SpecError: the kind or its API version is not known.
    """
    kind = JOB_KINDS.get(str(document.get("kind")))
    if kind is None:
        raise SpecError("kind", f"{format_value(document.get('kind'))} is no job", f"use one of {', '.join(JOB_KINDS)}")
    if document.get("apiVersion") != kind.api_version:
        problem = f"{format_value(document.get('apiVersion'))} is not {kind.api_version}"
        raise SpecError("apiVersion", problem, f"write apiVersion: {kind.api_version}")
    return kind


def find_training_runtime(document: Document) -> tuple[str, str] | None:
    """Return (kind, name) of the object that contains a job's pod templates, or None if the job contains them."""
    kind = JOB_KINDS.get(str(document.get("kind")))
    return None if kind is None else kind.find_training_runtime(document)

"""Kinds of jobs that can be advised: each module of this package defines one, and there is no other list of them."""

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
"""Kinds of jobs by name, in the order in which messages name them: by API group, Kubernetes' own Job last."""


def is_job(document: Document) -> bool:
    """Return whether a document is a job of one of `JOB_KINDS`."""
    kind = JOB_KINDS.get(str(document.get("kind")))
    return kind is not None and document.get("apiVersion") == kind.api_version


def find_kind(document: Document) -> JobKind:
    """Return the kind of job that a document belongs to.

    Raises:
        SpecError: there is no such kind.
    """
    kind = JOB_KINDS.get(str(document.get("kind")))
    if kind is None:
        raise SpecError("kind", f"{format_value(document.get('kind'))} is no job", f"use one of {', '.join(JOB_KINDS)}")
    if document.get("apiVersion") != kind.api_version:
        problem = f"{format_value(document.get('apiVersion'))} is not {kind.api_version}"
        raise SpecError("apiVersion", problem, f"write apiVersion: {kind.api_version}")
    return kind


def runtime_of(document: Document) -> tuple[str, str] | None:
    """Return kind and name of the object that holds the pod templates of a job; None if the job holds them."""
    kind = JOB_KINDS.get(str(document.get("kind")))
    return None if kind is None else kind.runtime_of(document)

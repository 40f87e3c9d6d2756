"""Kinds of jobs that can be advised, loaded from the modules that the rows of `tilecast.api.job_kinds` name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from tilecast.api.base import shown
from tilecast.api.fields import Document
from tilecast.api.job_kinds import JOB_APIS
from tilecast.jobs.interface import JobKind
from tilecast.spec import SpecError

JOB_KINDS: Mapping[str, JobKind] = {kind: import_module(api.module).KIND for kind, api in JOB_APIS.items()}


def is_job(document: Document) -> bool:
    """Return whether a document is a job of one of `JOB_KINDS`."""
    kind = JOB_KINDS.get(str(document.get("kind")))
    return kind is not None and document.get("apiVersion") == kind.api_version


def kind_of(document: Document) -> JobKind:
    """Return the entry of `JOB_KINDS` that a document belongs to.

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
    """Return kind and name of the object that holds the pod templates of a job; None if the job holds them."""
    kind = JOB_KINDS.get(str(document.get("kind")))
    return None if kind is None else kind.runtime_of(document)

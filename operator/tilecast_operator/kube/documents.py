"""Make the documents that are sent: applied parts of objects, Events, Leases and reviews."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tilecast_operator.kube.kinds import Document, Key

MAX_NOTE = 1024
MAX_INSTANCE = 128
"""Longest message, and longest name of a writer, that the API server accepts in an Event."""


@dataclass(frozen=True, slots=True)
class EventContent:
    """Type, reason and message of an Event."""

    type: Literal["Normal", "Warning"]
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class WriterIdentity:
    """Names that identify the operator in its writes."""

    component: str
    """Name of the operator in Events."""
    instance: str
    """Name of this replica in Events."""
    annotations: tuple[str, ...]
    """Every annotation that the operator writes. One that it no longer applies can so be removed."""
    variable_text: re.Pattern[str] = re.compile(r"(?!)")
    """Pattern of the parts of a note's text that may change while the state of the object stays the same."""

    def get_constant_content(self, note: EventContent) -> tuple[str, str, str]:
        """Return type, reason and constant text of a note, which change only when the object's state changes."""
        return note.type, note.reason, self.variable_text.sub("", note.text)


def make_event_document(
    note: EventContent, author: WriterIdentity, about: Key, api_version: str, uid: str, now: str, occasion: str = ""
) -> Document:
    """Return the Event object for a note.

    Its name has a digest of the constant text and of the occasion, so that the API server refuses a second Event about
    the same state. An Event about an object without a namespace is in `default`, like those of the kubelet.
    """
    _, reason, state = author.get_constant_content(note)
    parts = (uid, reason, state[:MAX_NOTE], *((occasion,) if occasion else ()))
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    involved = {"apiVersion": api_version, "kind": about.kind, "name": about.name, "uid": uid}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{about.name[:200].rstrip('-.')}.{digest}",
            "namespace": about.namespace or "default",
        },
        "involvedObject": involved | ({"namespace": about.namespace} if about.namespace else {}),
        "type": note.type,
        "reason": note.reason,
        "message": note.text[:MAX_NOTE],
        "source": {"component": author.component},
        "reportingComponent": author.component,
        "reportingInstance": author.instance[:MAX_INSTANCE],
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def make_apply_document(
    key: Key,
    api_version: str,
    *,
    uid: str | None = None,
    resource_version: str | None = None,
    annotations: Mapping[str, str] | None = None,
    status: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the document of a server-side apply.

    Args:
        key: key of the object.
        api_version: group and version of its kind.
        uid: UID that the object must have, or None for any.
        resource_version: resource version that the object must have, or None for any.
        annotations: annotations to apply, or None.
        status: status to apply, or None.
    """
    metadata = {
        "name": key.name,
        "namespace": key.namespace or None,
        "uid": uid,
        "resourceVersion": resource_version,
        "annotations": None if annotations is None else dict(annotations),
    }
    document = {"apiVersion": api_version, "kind": key.kind, "metadata": _drop_none(metadata)}
    return document if status is None else {**document, "status": dict(status)}


def make_annotations_patch(applied: Document, operator_keys: Iterable[str]) -> dict[str, Any]:
    """Return the merge patch that changes annotations exactly like a server-side apply of `applied`.

    Args:
        applied: the document.
        operator_keys: keys of all annotations that the operator writes. Those absent from `applied` are removed.
    """
    metadata = applied["metadata"]
    annotations = dict.fromkeys(operator_keys) | dict(metadata.get("annotations") or {})
    return {"metadata": {**metadata, "annotations": annotations}}


def make_status_patch(applied: Document) -> list[dict[str, Any]]:
    """Return the JSON patch that changes the status exactly like a server-side apply of `applied`."""
    metadata = applied["metadata"]
    seen = [
        {"op": "add", "path": f"/metadata/{key}", "value": metadata[key]}
        for key in ("uid", "resourceVersion")
        if key in metadata
    ]
    return [*seen, {"op": "add", "path": "/status", "value": applied["status"]}]


def make_delete_options(uid: str, resource_version: str) -> dict[str, Any]:
    """Return DeleteOptions that allow the deletion only at this UID and resource version."""
    preconditions = {"uid": uid, "resourceVersion": resource_version}
    return {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}


def make_token_review(token: str, audience: str) -> dict[str, Any]:
    """Return the TokenReview that checks a token for an audience."""
    spec = {"token": token, "audiences": [audience]}
    return {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}


@dataclass(frozen=True, slots=True)
class LeaseSpec:
    """Spec of a Lease: holder, duration and times."""

    holder: str = ""
    duration_s: int = 1
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0

    @classmethod
    def from_object(cls, body: Document) -> LeaseSpec:
        """Read the spec of a Lease object."""
        spec = body.get("spec") or {}
        return cls(
            holder=str(spec.get("holderIdentity") or ""),
            duration_s=int(spec.get("leaseDurationSeconds") or 1),
            acquired=str(spec.get("acquireTime") or ""),
            renewed=str(spec.get("renewTime") or ""),
            transitions=int(spec.get("leaseTransitions") or 0),
        )

    def document(self) -> dict[str, Any]:
        """Return the spec as JSON of the API."""
        return {
            "holderIdentity": self.holder,
            "leaseDurationSeconds": self.duration_s,
            "acquireTime": self.acquired,
            "renewTime": self.renewed,
            "leaseTransitions": self.transitions,
        }


def make_lease_document(
    namespace: str, name: str, spec: LeaseSpec, annotations: Mapping[str, str], resource_version: str | None
) -> dict[str, Any]:
    """Return the document of a Lease. With a resource version, the document replaces the Lease of that version."""
    metadata = {
        "name": name,
        "namespace": namespace,
        "resourceVersion": resource_version,
        "annotations": dict(annotations),
    }
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": _drop_none(metadata),
        "spec": spec.document(),
    }


def _drop_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields whose value is not None."""
    return {name: value for name, value in fields.items() if value is not None}

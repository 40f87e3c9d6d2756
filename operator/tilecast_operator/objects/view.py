"""Views of objects: the parts of each object that the cache keeps."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilecast.api import gpu_pool, pool_learning
from tilecast.api.base import API_VERSION
from tilecast.api.fields import as_mapping, list_mappings_in, value_at_path
from tilecast.jobs import WEIGHT
from tilecast_operator.kube.kinds import Document
from tilecast_operator.objects.documents import ADVICE_KEYS, FIELD_MANAGER, INPUT_KEYS

MAX_INPUT = 64
"""Longest annotation with a time or a number that is read. An annotation may have 256 KiB."""
MAX_NAMED = 320
"""Longest annotation with a namespace's name or a job's UID that is read."""


@dataclass(frozen=True, slots=True)
class View:
    """Compressed copy of a TrainingJob, GPUPool or QueueAdvice, with the parts that the operator reads."""

    generation: int
    created: str
    packed_document: bytes
    """The `document` as compressed JSON: apiVersion, kind, name, spec, and discovery's record in a GPUPool."""
    inputs: tuple[tuple[str, str], ...]
    """Annotations that users write for Tilecast."""
    annotations_digest: bytes
    """Digest of the annotations that Tilecast writes."""
    digest: bytes
    """Digest of the status without times."""
    packed_status: bytes

    @classmethod
    def from_object(cls, body: Document) -> View:
        """Return the view of an object as the API server sent it."""
        metadata, status = body["metadata"], _make_plain(body.get("status") or {})
        annotations = metadata.get("annotations") or {}
        return cls(
            generation=int(metadata.get("generation", 0)),
            created=str(metadata.get("creationTimestamp", "")),
            packed_document=zlib.compress(encode_canonical(_extract_document(body)), 1),
            inputs=tuple(sorted((key, str(annotations[key])[:MAX_INPUT]) for key in INPUT_KEYS if key in annotations)),
            annotations_digest=annotations_digest(select_operator_annotations(annotations)),
            digest=_digest_plain_status(status),
            packed_status=zlib.compress(_dump_json(status), 1),
        )

    @property
    def document(self) -> dict[str, Any]:
        """The parsed fields of the object that its advice depends on."""
        document: dict[str, Any] = json.loads(zlib.decompress(self.packed_document))
        return document

    @property
    def status_json(self) -> bytes:
        """The status of the object as JSON."""
        return zlib.decompress(self.packed_status)

    @property
    def status(self) -> dict[str, Any]:
        """The status of the object."""
        status: dict[str, Any] = json.loads(self.status_json)
        return status

    def has_equal_inputs(self, other: View) -> bool:
        """Return whether two views have equal `document` fields and equal annotations of users."""
        return self.packed_document == other.packed_document and self.inputs == other.inputs

    def has_equal_document(self, body: Document) -> bool:
        """Return whether an object from the API server has the `document` fields of this view."""
        return encode_canonical(self.document) == encode_canonical(_extract_document(body))


@dataclass(frozen=True, slots=True)
class LearningView:
    """View of a PoolLearning."""

    packed_document: bytes
    digest: bytes
    """Digest of its spec."""
    forget: str | None
    """Text of the annotation that requests to forget runs."""

    @classmethod
    def from_object(cls, body: Document) -> LearningView:
        """Return the view of an object as the API server sent it."""
        annotations = as_mapping(body["metadata"].get("annotations"))
        text, forget = encode_canonical(as_mapping(body.get("spec"))), annotations.get(pool_learning.FORGET)
        packed = zlib.compress(text, 1)
        return cls(packed, hashlib.sha256(text).digest(), None if forget is None else str(forget)[:MAX_NAMED])

    @property
    def document(self) -> dict[str, Any]:
        """The parsed fields of the object that the operator reads."""
        return {"spec": json.loads(zlib.decompress(self.packed_document))}


def _extract_document(body: Document) -> dict[str, Any]:
    kind, metadata = str(body.get("kind", "")), body["metadata"]
    noted: dict[str, Any] = {"name": metadata["name"]}
    if kind == gpu_pool.KIND:
        for part, key in (("labels", gpu_pool.DISCOVERED), ("annotations", gpu_pool.DISCOVERY)):
            if key in (metadata.get(part) or {}):
                noted[part] = {key: metadata[part][key]}
    api_version = body.get("apiVersion", API_VERSION)
    return {"apiVersion": api_version, "kind": kind, "metadata": noted, "spec": body.get("spec")}


_METADATA = (
    "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "labels", "annotations",
    "ownerReferences",
)  # fmt: skip


FOREIGN = "foreignAnnotations"
"""Extra key of a job document, with the operator's annotations that somebody else wrote."""


def trim_job(body: Document) -> Document:
    """Return a job reduced to the parts that the operator reads. It is of any kind except TrainingJob."""
    metadata = {key: body["metadata"][key] for key in _METADATA if key in body["metadata"]}
    head = {key: body.get(key, "") for key in ("apiVersion", "kind")} | {"metadata": metadata}
    if foreign := _find_foreign_keys(body["metadata"]):
        head[FOREIGN] = foreign
    document: Document = json.loads(
        json.dumps({**head, "spec": body.get("spec") or {}, "status": body.get("status") or {}}, default=dict)
    )
    return document


def _find_foreign_keys(metadata: Document) -> list[str]:
    """Return the keys of the operator's annotations that another field manager owns or that are missing.

    The list is empty if the metadata has no `managedFields`.
    """
    annotations, managed = as_mapping(metadata.get("annotations")), list_mappings_in(metadata.get("managedFields"))
    ours = [item for item in managed if item.get("manager") == FIELD_MANAGER and item.get("operation") == "Apply"]
    managed_keys = {
        key for item in ours for key in as_mapping(value_at_path(item, ("fieldsV1", "f:metadata", "f:annotations")))
    }
    if not managed or not select_operator_annotations(annotations):
        return []
    return [key for key in ADVICE_KEYS if key not in annotations or f"f:{key}" not in managed_keys]


def trim_kueue_object(body: Document) -> Document:
    """Return a Kueue object reduced to the parts that the operator reads."""
    return {"spec": body.get("spec") or {}, "status": body.get("status") or {}}


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """Labels and weight of a Namespace."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    """The annotation with the namespace's weight, if there is one."""

    @classmethod
    def from_object(cls, body: Document) -> NamespaceView:
        """Return the view of a Namespace as the API server sent it."""
        labels, annotations = (as_mapping(body["metadata"].get(part)) for part in ("labels", "annotations"))
        weight = {WEIGHT: str(annotations[WEIGHT])[:MAX_INPUT]} if WEIGHT in annotations else {}
        return cls(dict(labels), weight)


def select_operator_annotations(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return only those annotations that the operator writes."""
    return {key: value for key, value in annotations.items() if key in ADVICE_KEYS}


def digest_status(status: Document) -> bytes:
    """Return a digest of a status without its writer and its transition times."""
    return _digest_plain_status(_make_plain(status))


def _digest_plain_status(status: Any) -> bytes:
    shown = status.get("conditions") or ()
    conditions = [{key: value for key, value in item.items() if key != "lastTransitionTime"} for item in shown]
    content = {key: value for key, value in status.items() if key != "writer"}
    return hashlib.sha256(_dump_json({**content, "conditions": conditions})).digest()


def annotations_digest(annotations: Mapping[str, str]) -> bytes:
    """Return a digest of those annotations that the operator writes."""
    return hashlib.sha256(encode_canonical(dict(annotations))).digest()


def encode_canonical(value: object) -> bytes:
    """Return a value as canonical JSON, with sorted keys and whole numbers without a fraction."""
    return _dump_json(_make_plain(value))


def _dump_json(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), default=str).encode()


def _make_plain(value: object) -> Any:
    # Most values are text, and an object has hundreds: they cost no call.
    if isinstance(value, Mapping):
        return {str(key): item if type(item) in _LEAVES else _make_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [item if type(item) in _LEAVES else _make_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


_LEAVES = frozenset((str, int, bool, type(None)))

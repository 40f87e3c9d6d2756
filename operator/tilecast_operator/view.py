"""What is kept of a watched object: enough to know what it should say and whether it already does.

There may be ten thousand of them, so that text is kept compressed and what can be compared by digest is.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from tilecast.api import gpu_pool as gpupool
from tilecast.api import training_job as trainingjob
from tilecast.api.base import API_VERSION, GROUP, VERSION
from tilecast_operator.report import annotations as marks

Document: TypeAlias = Mapping[str, Any]

MAX_INPUT = 64
"""A time or a number is no longer; an annotation may be of 256 KiB."""

PLURALS = {trainingjob.KIND: "trainingjobs", gpupool.KIND: "gpupools"}


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What a worker works on: one object, or all nodes at once."""

    kind: str
    namespace: str = ""
    name: str = ""

    @classmethod
    def of(cls, body: Document) -> Key:
        """The key of an object."""
        metadata = body["metadata"]
        return cls(str(body["kind"]), str(metadata.get("namespace", "")), str(metadata["name"]))

    @property
    def path(self) -> str:
        """Path of the object in the API."""
        scope = f"/namespaces/{self.namespace}" if self.namespace else ""
        return f"/apis/{GROUP}/{VERSION}{scope}/{PLURALS[self.kind]}/{self.name}"


@dataclass(frozen=True, slots=True)
class View:
    """One object."""

    uid: str
    generation: int
    resource_version: str
    packed_document: bytes
    """What it asks: apiVersion, kind, name and spec; of a GPUPool also what discovery noted in its metadata."""
    inputs: tuple[tuple[str, str], ...]
    """Annotations that users write for us."""
    marks: bytes
    """Digest of the annotations that we write."""
    digest: bytes
    """Of the status without its times."""
    packed_status: bytes

    @classmethod
    def of(cls, body: Document) -> View:
        """The view of an object as the API server sent it."""
        metadata, status = body["metadata"], dict(body.get("status") or {})
        annotations = metadata.get("annotations") or {}
        return cls(
            uid=metadata.get("uid", ""),
            generation=int(metadata.get("generation", 0)),
            resource_version=str(metadata.get("resourceVersion", "")),
            packed_document=zlib.compress(canonical(_asked(body)), 1),
            inputs=tuple(
                sorted((key, str(annotations[key])[:MAX_INPUT]) for key in marks.INPUTS if key in annotations)
            ),
            marks=marks_digest({key: value for key, value in annotations.items() if key in marks.KEYS}),
            digest=status_digest(status),
            packed_status=zlib.compress(canonical(status), 1),
        )

    @property
    def document(self) -> dict[str, Any]:
        """What the object asks."""
        found: dict[str, Any] = json.loads(zlib.decompress(self.packed_document))
        return found

    @property
    def status(self) -> dict[str, Any]:
        """What the object says."""
        found: dict[str, Any] = json.loads(zlib.decompress(self.packed_status))
        return found

    def is_newer_than(self, other: View) -> bool:
        """Whether this is a later state, be it of another object of the name; where that cannot be told, yes."""
        ours, theirs = self.resource_version, other.resource_version
        is_ordered = ours.isdigit() and theirs.isdigit()
        return not is_ordered or int(ours) > int(theirs)

    def asks_as(self, other: View) -> bool:
        """Whether both ask the same."""
        return self.packed_document == other.packed_document and self.inputs == other.inputs

    def asks(self, body: Document) -> bool:
        """Whether the object asks what this document does."""
        return canonical(self.document) == canonical(_asked(body))


def _asked(body: Document) -> dict[str, Any]:
    kind, metadata = str(body.get("kind", "")), body["metadata"]
    noted: dict[str, Any] = {"name": metadata["name"]}
    if kind == gpupool.KIND:
        for part, key in (("labels", gpupool.DISCOVERED), ("annotations", gpupool.DISCOVERY)):
            if key in (metadata.get(part) or {}):
                noted[part] = {key: metadata[part][key]}
    return {
        "apiVersion": body.get("apiVersion", API_VERSION),
        "kind": kind,
        "metadata": noted,
        "spec": body.get("spec"),
    }


def status_digest(found: Document) -> bytes:
    """A digest of a status that ignores when its conditions last changed and how numbers are spelt."""
    bare = dict(found)
    bare["conditions"] = [
        {key: value for key, value in item.items() if key != "lastTransitionTime"}
        for item in found.get("conditions") or ()
    ]
    return hashlib.sha256(canonical(bare)).digest()


def marks_digest(found: Mapping[str, str]) -> bytes:
    """A digest of our annotations."""
    return hashlib.sha256(canonical(dict(found))).digest()


def stamp(time_s: float) -> str:
    """Seconds since the epoch as Kubernetes writes times."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def canonical(value: object) -> bytes:
    """JSON with sorted keys, whole numbers spelt without a fraction."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), default=str).encode()


def _plain(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

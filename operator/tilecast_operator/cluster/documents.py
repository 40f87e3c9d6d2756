"""Documents that the operator sends: the parts of objects that it applies, Events, Leases and reviews."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from tilecast.api import training_job
from tilecast.api.base import API_VERSION, GROUP, StatusModel
from tilecast.jobs import WEIGHT
from tilecast_operator.cluster.kinds import KINDS, Key

COMPONENT = f"{GROUP}/advisor"
FIELD_MANAGER = "tilecast-advisor"
MAX_NOTE = 1024

STARTED = f"{GROUP}/started"
OBSERVED = f"{GROUP}/observed-step-seconds"
INPUT_KEYS = (STARTED, OBSERVED, WEIGHT)
"""Annotations that the operator reads; users, and the programs that start their jobs, write them."""


class AdviceAnnotations(StatusModel):
    """The annotations of an advised job: what a script or a person needs."""

    node_type: str = Field(alias="tilecast.dev/recommended-node-type")
    pool: str = Field(alias="tilecast.dev/recommended-pool")
    node_selector: str = Field(alias="tilecast.dev/recommended-node-selector")
    gpus: str = Field(alias="tilecast.dev/recommended-gpus")
    parallelism: str = Field(alias="tilecast.dev/recommended-parallelism")
    step_seconds: str = Field(alias="tilecast.dev/predicted-step-seconds")
    confidence: str = Field(alias="tilecast.dev/prediction-confidence")
    advice_hash: str = Field(alias="tilecast.dev/advice-hash", max_length=63)


ADVICE_KEYS = tuple(str(field.alias) for field in AdviceAnnotations.model_fields.values())
"""Every annotation that the operator writes as advice."""
NODE_TYPE, POOL, NODE_SELECTOR, GPUS, PARALLELISM, STEP_SECONDS, CONFIDENCE, HASH = ADVICE_KEYS


class Identity(StatusModel):
    """Metadata of an object that is meant as it was seen."""

    name: str
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    annotations: dict[str, str] | None = None


class Preconditions(StatusModel):
    """The state of an object that a deletion is meant for."""

    uid: str
    resource_version: str


class Fields(StatusModel):
    """An object, or the part of it that is sent."""

    api_version: str
    kind: str
    metadata: Identity | None = None
    spec: dict[str, Any] | None = None
    status: dict[str, Any] | None = None
    preconditions: Preconditions | None = None


class ObjectReference(StatusModel):
    """The object that an Event is about."""

    api_version: str
    kind: str
    namespace: str | None = None
    name: str
    uid: str


class Event(StatusModel):
    """An Event of the core group."""

    api_version: Literal["v1"]
    kind: Literal["Event"]
    metadata: Identity
    involved_object: ObjectReference
    type: str
    reason: str
    message: str = Field(max_length=MAX_NOTE)
    source: dict[str, str]
    reporting_component: str
    reporting_instance: str = Field(max_length=128)
    first_timestamp: str
    last_timestamp: str
    count: int


LEASE_ADDRESS = f"{GROUP}/address"
"""Annotation of our Lease: the URL at which its holder takes reports."""


class LeaseSpec(StatusModel):
    """Who leads, since when and for how long, as a Lease says it."""

    holder_identity: str = ""
    lease_duration_seconds: int = 1
    acquire_time: str = ""
    renew_time: str = ""
    lease_transitions: int = 0

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> LeaseSpec:
        """Read the spec of a Lease; fields that are not ours are dropped."""
        names = {field.alias or name for name, field in cls.model_fields.items()}
        return cls.model_validate({key: value for key, value in spec.items() if key in names and value is not None})


def lease(namespace: str, name: str, spec: LeaseSpec, address: str, resource_version: str | None) -> dict[str, Any]:
    """Return a Lease: a new one, or one that replaces the given resource version."""
    annotations = {LEASE_ADDRESS: address}
    identity = Identity.within(
        name=name, namespace=namespace, resource_version=resource_version, annotations=annotations
    )
    return Fields(
        api_version="coordination.k8s.io/v1", kind="Lease", metadata=identity, spec=spec.document()
    ).document()


@dataclass(frozen=True, slots=True)
class Note:
    """The content of an Event."""

    type: Literal["Normal", "Warning"]
    reason: str
    text: str

    @property
    def state(self) -> tuple[str, str, str]:
        """Content without the names of what there is instead: these change while the state stays the same."""
        return self.type, self.reason, _INSTEAD.sub("", self.text)


_INSTEAD = re.compile(r"(; known: |, or use one of ).*", re.DOTALL)


def event(note: Note, about: Key, uid: str, now: str, instance: str, occasion: str = "") -> Event:
    """Return the Event of a note.

    Its name is a digest of the state and the occasion, so that saying it twice creates it once. An Event about
    an object without a namespace is in `default`, as those of the kubelet are.
    """
    _, reason, state = note.state
    parts = (uid, reason, state[:MAX_NOTE], *((occasion,) if occasion else ()))
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return Event.within(
        api_version="v1",
        kind="Event",
        metadata=Identity(name=f"{about.name[:200].rstrip('-.')}.{digest}", namespace=about.namespace or "default"),
        involved_object=ObjectReference.within(
            api_version=KINDS[about.kind].api_version,
            kind=about.kind,
            namespace=about.namespace or None,
            name=about.name,
            uid=uid,
        ),
        type=note.type,
        reason=note.reason,
        message=note.text[:MAX_NOTE],
        source={"component": COMPONENT},
        reporting_component=COMPONENT,
        reporting_instance=instance,
        first_timestamp=now,
        last_timestamp=now,
        count=1,
    )


def applied_fields(key: Key, identity: Mapping[str, Any], status: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the document of a server-side apply.

    Args:
        key: key of the object.
        identity: the rest of its metadata, by the names of `Identity`.
        status: its status, if that is what is applied.
    """
    metadata = Identity.within(name=key.name, namespace=key.namespace or None, **identity)
    api_version = KINDS[key.kind].api_version
    return Fields.within(api_version=api_version, kind=key.kind, metadata=metadata, status=status).document()


def merged_annotations(applied: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that changes our annotations as this server-side apply document does."""
    metadata = applied["metadata"]
    annotations = dict.fromkeys(ADVICE_KEYS) | dict(metadata.get("annotations") or {})
    return {"metadata": {**metadata, "annotations": annotations}}


def replaced_status(applied: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON patch that changes a status as this server-side apply document does."""
    metadata = applied["metadata"]
    seen = [
        {"op": "add", "path": f"/metadata/{key}", "value": metadata[key]}
        for key in ("uid", "resourceVersion")
        if key in metadata
    ]
    return [*seen, {"op": "add", "path": "/status", "value": applied["status"]}]


def delete_options(uid: str, resource_version: str) -> dict[str, Any]:
    """Return the options to delete an object only if it is still as it was seen."""
    seen = Preconditions(uid=uid, resource_version=resource_version)
    return Fields(api_version="v1", kind="DeleteOptions", preconditions=seen).document()


def token_review(token: str, audience: str) -> dict[str, Any]:
    """Return the TokenReview of a token for an audience."""
    spec = {"token": token, "audiences": [audience]}
    return Fields(api_version="authentication.k8s.io/v1", kind="TokenReview", spec=spec).document()


def asking(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a TrainingJob of this name and spec, which asks for advice."""
    kind, metadata = training_job.KIND, Identity(name=name)
    return Fields(api_version=API_VERSION, kind=kind, metadata=metadata, spec=dict(spec)).document()

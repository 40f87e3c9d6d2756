"""Find the parts of quarantined objects that the operator can read safely."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tilecast.api import training_job
from tilecast.api.fields import as_mapping
from tilecast.jobs import APPLIED, JOB_KINDS
from tilecast_operator.kube.kinds import Document, Key
from tilecast_operator.kube.quarantine import Quarantine
from tilecast_operator.objects.documents import ADVICE_KEYS
from tilecast_operator.objects.kinds import KUEUE

MAX_TEXT = 256
"""Longest annotation or label that is read of a quarantined object."""
MAX_STATUS_DEPTH, MAX_STATUS_PARTS = 16, 20_000
"""Largest depth and size of a status that is read of a quarantined object. The operator's own are within them."""
_OF_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp")


def open_quarantine(folder: str, suspects: Iterable[Key], clock: Callable[[], float]) -> Quarantine:
    """Return the store of the operator's quarantined objects. `Quarantine` describes the arguments."""
    return Quarantine(folder, suspects, clock, harmless_part, digest_user_content)


def harmless_part(body: Document) -> Document | None:
    """Return a minimal job for a quarantined job. For other kinds, return None."""
    return make_minimal_job(body) if body["kind"] in (training_job.KIND, *JOB_KINDS) else None


def make_minimal_job(body: Document) -> dict[str, Any]:
    """Return a copy of a quarantined job with its suspend fields, mode, target, and short labels and annotations.

    Its status is kept only if it is small.
    """
    metadata = as_mapping(body.get("metadata"))
    spec = as_mapping(body.get("spec"))
    plain: dict[str, Any] = {name: metadata[name] for name in _OF_METADATA if name in metadata}
    for part in ("labels", "annotations"):
        texts = as_mapping(metadata.get(part)).items()
        plain[part] = {name: text for name, text in texts if isinstance(text, str) and len(text) <= MAX_TEXT}
    head = {name: body[name] for name in ("apiVersion", "kind") if name in body}
    status = as_mapping(body.get("status"))
    return {
        **head,
        "metadata": plain,
        "spec": _make_minimal_spec(spec),
        "status": dict(status) if _is_small_status(status) else {},
    }


def _make_minimal_spec(spec: Document) -> dict[str, Any]:
    """Return suspension, mode and target of a job's spec."""
    plain = {name: spec[name] for name in ("suspend", "mode") if isinstance(spec.get(name), bool | str)}
    policy = {name: as_mapping(spec.get(name)).get("suspend") for name in ("runPolicy",)}
    target = {
        name: text
        for name, text in as_mapping(spec.get("targetRef")).items()
        if name in ("apiVersion", "kind", "name") and isinstance(text, str)
    }
    suspended = {name: {"suspend": value} for name, value in policy.items() if isinstance(value, bool)}
    return {**plain, **suspended, **({"targetRef": target} if target else {})}


def digest_user_content(body: Document) -> str:
    """Return a digest of what users wrote in an object, without fields that releasing the job changes."""
    # No recursion: the object may be nested as deep as the API server allows.
    metadata, spec = as_mapping(body.get("metadata")), dict(as_mapping(body.get("spec")))
    spec.pop("suspend", None)
    spec["runPolicy"] = {name: value for name, value in as_mapping(spec.get("runPolicy")).items() if name != "suspend"}
    others = {name: value for name, value in body.items() if name not in ("metadata", "spec", "status")}
    noted = [_drop_own_keys(metadata.get(part)) for part in ("labels", "annotations")]
    state, left = hashlib.sha256(), [metadata.get("uid"), *noted, spec, others]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            state.update(b"{%d" % len(value))
            for name in sorted(value, key=str):
                left += (value[name], str(name))
        elif isinstance(value, list | tuple):
            state.update(b"[%d" % len(value))
            left.extend(value)
        else:
            state.update(f"{type(value).__name__}:{value}\n".encode(errors="replace"))
    return state.hexdigest()


def _drop_own_keys(part: object) -> dict[str, Any]:
    """Return labels or annotations without the keys of Tilecast and Kueue."""
    ours = (*ADVICE_KEYS, APPLIED)
    return {name: text for name, text in as_mapping(part).items() if name not in ours and not name.startswith(KUEUE)}


def _is_small_status(status: Document) -> bool:
    level: list[Any] = [status]
    parts = 0
    for _ in range(MAX_STATUS_DEPTH):
        parts += len(level)
        if not level or parts > MAX_STATUS_PARTS:
            break
        below: list[Any] = []
        for value in level:
            below.extend(value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ())
        level = below
    return not level and parts <= MAX_STATUS_PARTS

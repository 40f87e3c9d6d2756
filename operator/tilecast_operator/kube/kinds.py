"""Kinds of objects, their paths in the API, and the keys of objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Document: TypeAlias = Mapping[str, Any]
"""An object of the API, or a part of one, as parsed JSON."""


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """API group, version and plural name under which the API server serves a kind of objects."""

    group: str
    """API group. Empty for the core group."""
    version: str
    plural: str
    is_any_version: bool = False
    """Whether it is watched in the version that the cluster prefers."""

    @property
    def api_version(self) -> str:
        """API group and version, as in the `apiVersion` of an object."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "") -> str:
        """Return the URL path of the object `name`, or of the list of objects if `name` is empty."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name else "")


Kinds: TypeAlias = Mapping[str, ResourceKind]
"""The kinds that an operator reads or writes, by name."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Key in the work queue: kind, namespace and name of an object.

    A kind alone means all objects of that kind.
    """

    kind: str
    namespace: str = ""
    name: str = ""

    @classmethod
    def from_object(cls, body: Document) -> Key:
        """Return the key of an object."""
        metadata = body["metadata"]
        return cls(str(body["kind"]), str(metadata.get("namespace", "")), str(metadata["name"]))

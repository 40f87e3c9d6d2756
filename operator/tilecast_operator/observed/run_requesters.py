"""Index of jobs, by the workloads and job names whose runs they requested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from tilecast_operator.kube.controller_state import ControllerState, StateTable
from tilecast_operator.kube.kinds import Key

_Name: TypeAlias = tuple[str, str, str]
"""Namespace, workload, and template of a job's name. One of the last two is empty."""


class RunRequesters:
    """Index of jobs by the workloads and name templates whose runs they requested. Belongs to one event loop."""

    def __init__(self, records: ControllerState) -> None:
        self._names: StateTable[frozenset[_Name]] = records.add_table(on_drop=self._remove_from_index)
        self._keys: dict[_Name, set[Key]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def set_requests(self, key: Key, namespace: str, workloads: Iterable[str], templates: Iterable[str]) -> None:
        """Record the workloads and name templates whose runs a job requests."""
        names = frozenset(
            (*((namespace, one, "") for one in workloads), *((namespace, "", one) for one in templates)),
        )
        if self._names.get(key) != names:
            self._remove_from_index(key, self._names.pop(key, frozenset()))
            self._names[key] = names
            for name in self._names.get(key, ()):  # none if the job is gone
                self._keys.setdefault(name, set()).add(key)

    def _remove_from_index(self, key: Key, names: frozenset[_Name]) -> None:
        """Remove a job from the index."""
        for name in names:
            self._keys[name].discard(key)
            if not self._keys[name]:
                del self._keys[name]

    def find_requesters(self, namespace: str, workload: str, template: str) -> set[Key]:
        """Return the jobs that requested runs of a workload or runs of a name template."""
        return self._keys.get((namespace, workload, ""), set()) | self._keys.get((namespace, "", template), set())

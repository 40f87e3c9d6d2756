"""Priority of a job as Kueue determines it, from the objects of both kinds of priority classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilecast.api.fields import Document


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """A WorkloadPriorityClass of Kueue or a PriorityClass of pods."""

    value: int
    is_default: bool = False
    """Whether pods that name no class have this one."""

    @classmethod
    def from_object(cls, body: Document) -> PriorityClass:
        """Return the priority class that an object defines; its value is 0 if the object has none."""
        value = body.get("value")
        return cls(value if isinstance(value, int) else 0, body.get("globalDefault") is True)


@dataclass(frozen=True, slots=True)
class Priorities:
    """Known priority classes of Kueue's Workloads and of pods, by name."""

    of_workloads: Mapping[str, PriorityClass] = field(default_factory=dict)
    of_pods: Mapping[str, PriorityClass] = field(default_factory=dict)

    def find_priority(self, workload_class: str, pod_class: str) -> int:
        """Return the priority of a job (Kueue, `ExtractPriority` of pkg/controller/jobframework).

        It comes from the WorkloadPriorityClass, else from the pods' PriorityClass, else from the cluster's default
        class (the lowest of several), else it is 0.

        Args:
            workload_class: the name on the job's label; empty if it has none.
            pod_class: the name in the pods; empty if they have none.
        """
        if workload_class or pod_class:
            classes, name = (self.of_workloads, workload_class) if workload_class else (self.of_pods, pod_class)
            return classes[name].value if name in classes else 0
        return min((item.value for item in self.of_pods.values() if item.is_default), default=0)

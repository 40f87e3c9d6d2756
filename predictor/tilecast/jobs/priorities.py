"""Find a job's priority by Kueue's rules, from WorkloadPriorityClasses and PriorityClasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilecast.api.fields import Document


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """Value of a Kueue WorkloadPriorityClass or of a Kubernetes PriorityClass."""

    value: int
    is_default: bool = False
    """Whether it applies to pods that name no class."""

    @classmethod
    def from_object(cls, body: Document) -> PriorityClass:
        """Return the priority class that a Kubernetes object defines. A missing value counts as 0."""
        value = body.get("value")
        return cls(value if isinstance(value, int) else 0, body.get("globalDefault") is True)


@dataclass(frozen=True, slots=True)
class Priorities:
    """WorkloadPriorityClasses and PriorityClasses of a cluster, by name."""

    of_workloads: Mapping[str, PriorityClass] = field(default_factory=dict)
    of_pods: Mapping[str, PriorityClass] = field(default_factory=dict)

    def find_priority(self, workload_class: str, pod_class: str) -> int:
        """Return the priority of a job by Kueue's rules (`ExtractPriority` of pkg/controller/jobframework).

        If the job names a WorkloadPriorityClass, that class is used, or else the PriorityClass of its pods. An unknown
        class has priority 0. If the job names no class, the priority is that of the lowest default PriorityClass of the
        cluster, or 0 without one.

        Args:
            workload_class: name of the WorkloadPriorityClass in the job's label. Empty without the label.
            pod_class: name of the PriorityClass in the pod templates. Empty if they name none.
        """
        if workload_class or pod_class:
            classes, name = (self.of_workloads, workload_class) if workload_class else (self.of_pods, pod_class)
            return classes[name].value if name in classes else 0
        return min((item.value for item in self.of_pods.values() if item.is_default), default=0)

"""Series with labels whose values users choose. They are limited in number, dropped when unused, and zero at first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client import Counter
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

Group: TypeAlias = tuple[str, ...]
Series: TypeAlias = Mapping[MetricWrapperBase, tuple[Group, ...]]
"""Metrics, each with the further labels that it has for every group."""

OTHER = "other"
"""Value of every label for groups beyond the limit."""
DAY_S = 86_400.0
SCRAPES = 2
"""Number of scrapes that must find a new series at zero before its counts are added.

`increase` misses the first value of a series that begins at one. Prometheus often runs twice.
"""


@dataclass(eq=False)
class BoundedGroups(Collector):
    """Limited set of label combinations, called groups, with the metric series of every group.

    Args:
        registry: registry of the series.
        max_groups: most groups with their own series. Further groups are counted as `OTHER`.
        series: the series of every group.
        clock: monotonic time, in seconds.
    """

    registry: CollectorRegistry
    max_groups: int
    series: Series
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._used: dict[Group, float] = {}
        """Time at which each group was last used."""
        self._scrapes: dict[Group, int] = {}
        """Number of scrapes that found each new group's series at zero."""
        self._counts: dict[Group, list[tuple[Counter, Group]]] = {}
        """Counts of new groups that are not added yet."""
        self.registry.register(self)

    def use_labels(self, group: Group) -> Group:
        """Create the series of a group if needed. Return the labels under which the group is shown."""
        shown = group if group in self._used or len(self._used) < self.max_groups else (OTHER,) * len(group)
        if shown not in self._used:
            self._scrapes[shown] = 0
            for metric, further in self.series.items():
                for labels in further:
                    metric.labels(*shown, *labels)
        self._used[shown] = self.clock()
        return shown

    def increment_counter(self, counter: Counter, group: Group, *labels: str) -> None:
        """Add one to a group's counter. For a new group, wait until Prometheus has scraped the counter at zero."""
        shown = self.use_labels(group)
        if shown in self._scrapes:
            self._counts.setdefault(shown, []).append((counter, labels))
        else:
            counter.labels(*shown, *labels).inc()

    def map_groups_to_labels(self, group_sizes: Mapping[Group, int]) -> Mapping[Group, Group]:
        """Return the labels under which each group of `group_sizes` is shown, by group.

        If there are too many groups, those in use take precedence, then the largest by `group_sizes`.
        """
        order = sorted(group_sizes, key=lambda group: (group not in self._used, -group_sizes[group], group))
        return {group: group if place < self.max_groups else (OTHER,) * len(group) for place, group in enumerate(order)}

    def collect(self) -> Iterator[Metric]:
        """Add pending counts and remove groups unused for a day. Yield no metric. Called at each scrape."""
        for group, scrapes in list(self._scrapes.items()):
            self._scrapes[group] = scrapes + 1  # the registry calls this collector after the metrics
            if scrapes + 1 >= SCRAPES:
                del self._scrapes[group]
                for counter, labels in self._counts.pop(group, []):
                    counter.labels(*group, *labels).inc()
        oldest = self.clock() - DAY_S
        for group in [group for group, used in self._used.items() if used < oldest]:
            self._forget_group(group)
        yield from ()

    def _forget_group(self, group: Group) -> None:
        del self._used[group]
        self._scrapes.pop(group, None)
        self._counts.pop(group, None)
        for metric, further in self.series.items():
            for labels in further:
                metric.remove(*group, *labels)

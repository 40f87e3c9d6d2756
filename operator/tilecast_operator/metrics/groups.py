"""Series by labels whose values users make: bounded in number, forgotten when nobody uses them, and zero at first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from prometheus_client import Counter
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

Group: TypeAlias = tuple[str, ...]
Series: TypeAlias = Mapping[MetricWrapperBase, tuple[Group, ...]]
"""Metrics, with the further labels that each has for every group."""

OTHER = "other"
"""The value of every label of what there is no room for."""
DAY_S = 86_400.0
SCRAPES = 2
"""Scrapes that find a new series at zero before what was counted comes into it: `increase` sees nothing of a series
that begins at one, and Prometheus often runs twice."""


class BoundedGroups(Collector):
    """The values of some labels that have series.

    Args:
        registry: where the series are.
        most: groups with series of their own; what more there are is `OTHER`.
        series: those of every group.
        clock: seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        most: int,
        series: Series,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._series = series
        self._clock = clock
        self._used: dict[Group, float] = {}
        """When each was used last."""
        self._scrapes: dict[Group, int] = {}
        """Scrapes that have found those at zero that are new."""
        self._counts: dict[Group, list[tuple[Counter, Group]]] = {}
        """What was counted of them meanwhile."""
        registry.register(self)

    def use(self, group: Group) -> Group:
        """The labels of a group now, whose series exist from here on."""
        shown = group if group in self._used or len(self._used) < self._most else (OTHER,) * len(group)
        if shown not in self._used:
            self._scrapes[shown] = 0
            for metric, further in self._series.items():
                for labels in further:
                    metric.labels(*shown, *labels)
        self._used[shown] = self._clock()
        return shown

    def count(self, counter: Counter, group: Group, *labels: str) -> None:
        """Count one of a group, once its series were seen at zero."""
        shown = self.use(group)
        if shown in self._scrapes:
            self._counts.setdefault(shown, []).append((counter, labels))
        else:
            counter.labels(*shown, *labels).inc()

    def chosen(self, sizes: Mapping[Group, int]) -> Mapping[Group, Group]:
        """The labels of groups of some sizes that are all shown at once: those in use first, and then the largest."""
        order = sorted(sizes, key=lambda group: (group not in self._used, -sizes[group], group))
        return {group: group if place < self._most else (OTHER,) * len(group) for place, group in enumerate(order)}

    def collect(self) -> Iterator[Metric]:
        """Be scraped: nothing of its own, but the series change here alone."""
        for group, scrapes in list(self._scrapes.items()):
            self._scrapes[group] = scrapes + 1  # the registry asks this collector after the metrics
            if scrapes + 1 >= SCRAPES:
                del self._scrapes[group]
                for counter, labels in self._counts.pop(group, []):
                    counter.labels(*group, *labels).inc()
        oldest = self._clock() - DAY_S
        for group in [group for group, used in self._used.items() if used < oldest]:
            self._forget(group)
        yield from ()

    def _forget(self, group: Group) -> None:
        del self._used[group]
        self._scrapes.pop(group, None)
        self._counts.pop(group, None)
        for metric, further in self._series.items():
            for labels in further:
                metric.remove(*group, *labels)

"""Metric families as attributes of a class, one declaration each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Generic, TypeVar, cast, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.metrics import MetricWrapperBase

MetricT = TypeVar("MetricT", bound=MetricWrapperBase)


@dataclass(frozen=True)
class Declared(Generic[MetricT]):
    """A metric family; every instance of the class that declares it has a metric of its own."""

    kind: type[MetricT]
    name: str
    text: str
    labels: tuple[str, ...] = ()
    zero: Sequence[Sequence[str]] = ()
    """Known values of each label, one sequence a label. Their combinations exist from the start, because a counter that
    begins at one shows no increase."""
    of_the_cluster: bool = False
    """Whether every replica would show the same value. Then only the leader shows it, so that sums over replicas are
    right."""
    buckets: tuple[float, ...] | None = None

    @overload
    def __get__(self, instance: None, owner: type) -> Declared[MetricT]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> MetricT: ...
    def __get__(self, instance: object | None, owner: type) -> Declared[MetricT] | MetricT:
        # An instance that was built has the metric in its own dictionary; then this is not called.
        if instance is None:
            return self
        raise AttributeError(self.name)

    def build(self, registry: CollectorRegistry) -> MetricT:
        """Build the metric in a registry."""
        options: dict[str, Any] = {} if self.buckets is None else {"buckets": self.buckets}
        metric = self.kind(self.name, self.text, self.labels, registry=registry, **options)
        for values in product(*self.zero) if self.zero else ():
            metric.labels(*values)
        return metric


def counter(name: str, text: str, *labels: str, zero: Sequence[Sequence[str]] = ()) -> Declared[Counter]:
    """Declare a counter; `zero` has the known values of each label."""
    return Declared(Counter, name, text, labels, zero)


def gauge(name: str, text: str, *labels: str, of_the_cluster: bool = False) -> Declared[Gauge]:
    """Declare a gauge; with `of_the_cluster` only the leader shows it."""
    return Declared(Gauge, name, text, labels, of_the_cluster=of_the_cluster)


def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> Declared[Histogram]:
    """Declare a histogram by the upper bounds of its buckets."""
    return Declared(Histogram, name, text, labels, buckets=buckets)


def info(name: str, text: str) -> Declared[Info]:
    """Declare an info metric: facts in labels."""
    return Declared(Info, name, text)


def build_all(owner: object, registry: CollectorRegistry) -> list[MetricWrapperBase]:
    """Give an object every metric that its class declares; return those of the cluster."""
    of_the_cluster = []
    for name, declared in _declared(type(owner)):
        metric = declared.build(registry)
        vars(owner)[name] = metric
        if declared.of_the_cluster:
            of_the_cluster.append(metric)
    return of_the_cluster


def _declared(owner: type) -> Iterator[tuple[str, Declared[MetricWrapperBase]]]:
    for one in owner.__mro__:
        for name, value in vars(one).items():
            if isinstance(value, Declared):
                yield name, cast("Declared[MetricWrapperBase]", value)

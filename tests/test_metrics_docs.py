"""docs/metrics.md lists every metric of the registry, with its type and labels, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram, Info
from prometheus_client.metrics import MetricWrapperBase

from tilecast_operator.metrics import Metrics

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "metrics.md").read_text()
KINDS = {Counter: ("counter", "_total"), Gauge: ("gauge", ""), Histogram: ("histogram", ""), Info: ("gauge", "_info")}


def test_the_page_is_the_registry() -> None:
    metrics = Metrics()
    metrics.model.info({"version": "", "sha256": ""})
    served = {}
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            kind, suffix = KINDS[type(metric)]
            (family,) = metric.collect()
            labels = set(metric._labelnames) | (set(family.samples[0].labels) if isinstance(metric, Info) else set())
            served[family.name + suffix] = (kind, labels)
    rows = re.findall(r"^\| `(tilecast_\w+)` \| (\w+) \|([^|]*)\|", PAGE, re.MULTILINE)
    assert {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == served

"""The dashboards match their generator and Grafana's schema; every alert has a runbook; queries use exported metrics.

test_alerts.py shows that the alerts fire.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from prometheus_client import Counter, Histogram, Info
from prometheus_client.metrics import MetricWrapperBase

from tilecast_operator.metrics import Metrics

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import binaries  # noqa: E402
import dashboards  # noqa: E402

RULES = ROOT / "charts" / "tilecast" / "rules" / "tilecast.yaml"
TARGET_LABELS = {"cluster", "namespace", "job", "pod", "le", "quantile"}
"""Labels that Prometheus or a histogram adds."""


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("name", list(dashboards.BOARDS))
def test_dashboards_are_those_of_their_generator(name: str) -> None:
    text = (dashboards.FOLDER / f"{name}.json").read_text()
    assert text == dashboards.text(dashboards.BOARDS[name]), "run `make dashboards`"
    assert {path.stem for path in dashboards.FOLDER.iterdir()} == set(dashboards.BOARDS)


def test_panels_are_distinct_explained_and_fill_the_grid() -> None:
    for board in dashboards.BOARDS.values():
        titles = [panel.title for panel in board.panels]
        assert len(set(titles)) == len(titles)
        assert all(panel.text.endswith(".") and panel.queries for panel in board.panels)
        assert all(sum(panel.width for panel in row) == 24 for row in board.rows.values())


def test_panels_say_when_it_is_bad_and_outlive_a_restart() -> None:
    for board in dashboards.BOARDS.values():
        for panel in board.panels:
            for query in panel.queries.values():
                bare = re.sub(r"(?:increase|rate)\([^()]*\)", "", query)
                assert not re.search(r"tilecast_\w+_(?:total|count|sum|bucket)\b", bare), (
                    "a restart would begin at zero"
                )
                assert "avg" not in query, "errors of both signs cancel out"
                scopes = re.findall(r"tilecast\w+\{[^}]*\}", dashboards.scoped(query))
                assert scopes and all('cluster=~"$cluster", namespace=~"$namespace"' in scope for scope in scopes)
    linked = {panel.runbook for board in dashboards.BOARDS.values() for panel in board.panels} - {""}
    assert linked <= {rule["alert"] for rule in rules() if "alert" in rule} and len(linked) > 8


@pytest.mark.parametrize("name", list(dashboards.BOARDS))
def test_dashboards_are_read_whole_by_grafanas_own_schema(name: str) -> None:
    """The published library has the schema of every Grafana release as classes, and drops what they do not know."""
    document = json.loads((dashboards.FOLDER / f"{name}.json").read_text())
    read = models.Dashboard.from_json(document)
    again = json.loads(JSONEncoder().encode(read))
    assert dashboards.stated(again) == document


def exported() -> dict[str, set[str]]:
    """Return the labels of every series that a registry exports, by name."""
    metrics = Metrics()
    served = {sample.name: set(sample.labels) for family in metrics.registry.collect() for sample in family.samples}
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.collect()
            suffixes = {Counter: ("_total",), Histogram: ("_bucket", "_count", "_sum"), Info: ("_info",)}
            for suffix in suffixes.get(type(metric), ("",)):
                served[family.name + suffix] = {*metric._labelnames, *(("version",) if type(metric) is Info else ())}
    return served


def asked() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each expression of the rules and dashboards."""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for board in dashboards.BOARDS.values():
        for panel in board.panels:
            for query in panel.queries.values():
                yield panel.title, query


def test_rules_and_panels_ask_for_what_the_operator_exports() -> None:
    served = exported()
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    for place, expression in asked():
        whole = expression
        for name, meaning in reversed(recorded.items()):
            whole = whole.replace(name, f"({meaning})")
        series = re.findall(r"\b(tilecast_\w+)(?:\{([^}]*)\})?", whole)
        assert (series or "kube_deployment" in whole) and "tilecast:" not in whole, place
        known = set(TARGET_LABELS)
        for name, matchers in series:
            assert name in served, f"{place}: {name} is not exported"
            labels = set(re.findall(r"(\w+)\s*(?:=|!)", matchers))
            assert labels <= served[name] | TARGET_LABELS, f"{place}: {name} has no {labels - served[name]}"
            known |= served[name]
        for group in re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", whole):
            assert set(filter(None, group.replace(" ", "").split(","))) <= known, f"{place}: {group}"


def test_a_dashboard_asks_its_own_data_source_only() -> None:
    for name in dashboards.BOARDS:
        document = json.loads((dashboards.FOLDER / f"{name}.json").read_text())
        sources = re.findall(r'"uid": "(\$[^"]*)"', json.dumps(document))
        assert set(sources) == {"${datasource}"}


def test_every_alert_has_a_runbook() -> None:
    pages = (ROOT / "docs" / "runbooks.md").read_text()
    sections = set(re.findall(r"^## (\w+)$", pages, re.MULTILINE))
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert sections == set(alerts)
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.cluster
def test_promtool_has_nothing_to_say_about_the_rules() -> None:
    promtool = binaries.ensure("prometheus") / "promtool"
    done = subprocess.run([promtool, "check", "rules", "--lint=all", str(RULES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

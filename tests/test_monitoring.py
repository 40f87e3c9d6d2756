"""The dashboards are those of their generator; every alert has a runbook and is shown to fire."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import binaries  # noqa: E402
import dashboards  # noqa: E402

RULES = ROOT / "charts" / "tilecast" / "rules" / "tilecast.yaml"
RULE_TESTS = ROOT / "tests" / "rules" / "tilecast.yaml"


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("name", list(dashboards.BOARDS))
def test_dashboards_are_those_of_their_generator(name: str) -> None:
    found = (dashboards.FOLDER / f"{name}.json").read_text()
    assert found == dashboards.text(dashboards.BOARDS[name]), "run `make dashboards`"
    assert {path.stem for path in dashboards.FOLDER.iterdir()} == set(dashboards.BOARDS)


def test_panels_are_distinct_explained_and_fill_the_grid() -> None:
    for board in dashboards.BOARDS.values():
        titles = [panel.title for panel in board.panels]
        assert len(set(titles)) == len(titles)
        assert all(panel.text.endswith(".") and panel.queries for panel in board.panels)
        assert all(sum(panel.width for panel in row) == 24 for row in board.rows.values())


def test_a_dashboard_asks_its_own_data_source_only() -> None:
    for name in dashboards.BOARDS:
        document = json.loads((dashboards.FOLDER / f"{name}.json").read_text())
        found = re.findall(r'"uid": "(\$[^"]*)"', json.dumps(document))
        assert set(found) == {"${datasource}"}


def test_every_alert_has_a_runbook_and_a_test() -> None:
    pages = (ROOT / "docs" / "runbooks.md").read_text()
    sections = set(re.findall(r"^## (\w+)$", pages, re.MULTILINE))
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert sections == set(alerts)
    fired = {
        check["alertname"]
        for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]
        for check in test.get("alert_rule_test", [])
        if check["exp_alerts"]
    }
    assert fired == set(alerts)
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("warning", "info")


@pytest.mark.cluster
def test_rules_do_what_their_tests_say() -> None:
    promtool = binaries.ensure("prometheus") / "promtool"
    for command in (["check", "rules", "--lint=all", str(RULES)], ["test", "rules", str(RULE_TESTS)]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

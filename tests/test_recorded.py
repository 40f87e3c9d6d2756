"""The alert rules over hours of a running operator: none fires in two healthy days, and each fault fires its own.

`bench/record_metrics.py` recorded the hours, and CONTRIBUTING.md says when to record them again.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

import recorded
from conftest import ROOT, ensure_or_fail
from recorded import KINDS, Change, Recording, added, both, everywhere, frozen, replaced, silent
from test_alerts import RULES, rules

HOURS, HEALTHY_HOURS = 48, 1
TARGET = {"cluster": "west", "namespace": "tilecast", "job": "tilecast", "pod": "tilecast-0"}
OTHERS = ('kube_deployment_spec_replicas{cluster="west",namespace="tilecast",deployment="tilecast"}',)
GROUP = 'family="decoder",gpu="h100-sxm",precision="bf16"'


FAULTY = {"tilecast_quarantined_objects", "tilecast_unknown_accelerator_nodes"}
"""Metrics without series as long as all is well."""


def gauge(series: str, value: float) -> Change:
    """Return a change that sets a gauge which shows a fault."""
    return replaced(series, lambda minute: value)


def growing(series: str) -> Change:
    """Return a change of a gauge that grows by 60 a minute: seconds of waiting, or a count that the fault brings."""
    return replaced(series, lambda minute: 60.0 * minute)


RUNS = gauge(f"tilecast_prediction_runs{{{GROUP}}}", 8.0)
UNANSWERED = growing('tilecast_oldest_unanswered_seconds{kind="TrainingJob"}')
GONE = silent(lambda minute: False)
FAULTS: Mapping[str, Change] = {
    "every pod is gone or ends at once, nobody waits for it": both(everywhere("tilecast_holds_jobs{}", 0.0), GONE),
    "the same with `jobs.place`, where jobs may wait for it": GONE,
    "a pod ends at each start and is scraped once in five times": both(
        replaced("tilecast_process_start_time_seconds{}", lambda minute: float(minute // 5)),
        silent(lambda minute: minute % 5 == 0),
    ),
    "a job is held for minutes": growing("tilecast_oldest_held_seconds{}"),
    "held jobs are let go too late for their advice": added(r'^tilecast_placements_total\{outcome="TooLate"', 2.0),
    "placed jobs find no quota": added(r"^tilecast_requeued_total\{", 0.2),
    "no replica gets the Lease": gauge("tilecast_leader{}", 0.0),
    "the API server answers no list and no watch": frozen(r"^tilecast_watch_last_event_timestamp_seconds\{"),
    "a permission to write Events is missing": growing('tilecast_writes_total{outcome="403",resource="events"}'),
    "a permission to write answers is missing": both(
        growing('tilecast_writes_total{outcome="403",resource="trainingjobs"}'), UNANSWERED
    ),
    "150 jobs are due and none is written": both(
        gauge('tilecast_queue_keys{kind="TrainingJob"}', 150.0),
        frozen(r'^tilecast_writes_total\{outcome="ok"'),
        UNANSWERED,
    ),
    "a job is never answered": UNANSWERED,
    "searches take longer than three seconds": added(
        r'^tilecast_advice_duration_seconds_(count\{|bucket\{le="(10.0|\+Inf)")', 3.0
    ),
    "answers take longer than ten seconds": added(
        r'^tilecast_answer_duration_seconds_(count\{kind="TrainingJob"|bucket\{kind="TrainingJob",le="(30.0|60.0|300.0|\+))',
        6.0,
    ),
    "searches are killed for their memory": added(r'^tilecast_search_process_restarts_total\{cause="memory"', 0.1),
    "an object at which the operator died is set aside": gauge('tilecast_quarantined_objects{kind="TrainingJob"}', 1.0),
    "a search ends in a defect": growing('tilecast_recommendations_total{result="InternalError"}'),
    "another release answers the same jobs": gauge("tilecast_contended_objects{}", 3.0),
    "nodes with GPUs that are not known": gauge('tilecast_unknown_accelerator_nodes{reason="UnknownAccelerator"}', 1.0),
    "most reports have a forged token": added(
        r'^tilecast_observations_total\{outcome="unauthenticated",source="put"', 5.0
    ),
    "forecasts of a group are 40 % off": both(
        RUNS, gauge(f'tilecast_prediction_run_absolute_relative_error_ratio{{{GROUP},stage="calibrated"}}', 0.4)
    ),
    "forecasts of a group stay 20 % to one side": both(
        RUNS, gauge(f'tilecast_prediction_bias_ratio{{{GROUP},stage="calibrated"}}', -0.2)
    ),
    "half of the jobs run outside their range": added(
        rf'^tilecast_prediction_interval_runs_total\{{covered="false",{GROUP}', 1.0
    ),
}
LASTS_HOURS = {"forecasts of a group stay 20 % to one side": 7}
"""Hours that pass before an alert, for faults that take more than three."""


def named_in_the_runbook() -> dict[str, set[tuple[str, str]]]:
    """Return the alerts with their severities that the runbook names for each fault."""
    rows = re.findall(r"^\| (.+) \| (Tilecast.+) \|$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    return {what: set(re.findall(r"(\w+) \((\w+)\)", alerts)) for what, alerts in rows}


@functools.cache
def recording(kind: str) -> Recording:
    """Return a recorded hour on promtool's clock."""
    return recorded.load(recorded.FOLDER / f"{kind}.json").on_promtools_clock()


def read_by_the_rules() -> set[str]:
    """Return the names of Tilecast's metrics that the rules read."""
    return {name for rule in rules() for name in re.findall(r"\btilecast_\w+", rule["expr"])}


def promtool(folder: Path, tests: Sequence[Mapping[str, object]]) -> None:
    """Run tests of the chart's rules."""
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": list(tests)}
    (folder / "tests.yaml").write_text(yaml.dump(document, Dumper=yaml.CSafeDumper))
    program = ensure_or_fail("prometheus") / "promtool"
    done = subprocess.run(
        [program, "test", "rules", folder / "tests.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def others(minutes: int) -> dict[str, str]:
    """Return the series of kube-state-metrics in a healthy cluster."""
    return dict.fromkeys(OTHERS, f"1x{minutes - 1}")


@pytest.mark.cluster
@pytest.mark.parametrize("kind", KINDS)
def test_no_alert_fires_in_two_healthy_days(kind: str, tmp_path: Path) -> None:
    days = recording(kind).only(read_by_the_rules()).repeated(HOURS)
    promtool(tmp_path, [recorded.promtool_test(kind, days, (), others(days.minutes), TARGET)])


@pytest.mark.cluster
def test_each_fault_raises_the_alerts_of_the_runbook_and_no_other(tmp_path: Path) -> None:
    busy, tests = recording("busy").only(read_by_the_rules()), []
    for what, alerts in named_in_the_runbook().items():
        hours = busy.repeated(HEALTHY_HOURS + LASTS_HOURS.get(what, 3))
        columns = {name: list(column) for name, column in hours.columns.items()}
        FAULTS[what](columns, HEALTHY_HOURS * busy.minutes)
        changed = Recording(hours.began_s, columns)
        tests.append(recorded.promtool_test(what, changed, alerts, others(hours.minutes), TARGET))
    promtool(tmp_path, tests)


def test_every_row_of_the_runbook_is_a_fault_and_every_alert_in_a_row() -> None:
    rows = named_in_the_runbook()
    assert rows.keys() == FAULTS.keys()
    rated = {(rule["alert"], rule["labels"]["severity"]) for rule in rules() if "alert" in rule}
    assert set().union(*rows.values()) == rated


@pytest.mark.parametrize("kind", KINDS)
def test_an_operator_exports_what_the_rules_read(kind: str) -> None:
    """Nothing is measured in an idle hour, so it has no metrics by group of runs."""
    missing = read_by_the_rules() - FAULTY - recorded.load(recorded.FOLDER / f"{kind}.json").names()
    assert not {name for name in missing if kind == "busy" or not name.startswith("tilecast_prediction_")}


def test_idle_watches_give_a_sign_of_life_in_time() -> None:
    """The alert waits for half an hour."""
    hour = recording("idle")
    watched = {name: column for name, column in hour.columns.items() if "tilecast_watch_last_event" in name}
    assert {recorded.labels(name)["resource"] for name in watched} >= {"nodes", "gpupools", "trainingjobs", "jobs"}
    for name, column in watched.items():
        silent_s = max(60.0 * minute - float(value) for minute, value in enumerate(column))
        assert silent_s < 1500.0, name


@pytest.mark.long
@pytest.mark.cluster
def test_an_operator_of_today_exports_what_was_recorded(tmp_path: Path) -> None:
    """Three live minutes have the same series, and move no counter that stood still in the recorded hour."""
    path = tmp_path / "idle.json"
    command = [sys.executable, str(ROOT / "bench" / "record_metrics.py"), "idle", str(path), "--minutes", "3"]
    subprocess.run(command, check=True)
    live, hour = recorded.load(path), recorded.load(recorded.FOLDER / "idle.json")
    again = "record the hours anew, see CONTRIBUTING.md"
    assert live.shapes() == hour.shapes(), again
    assert live.moving() <= hour.moving(), again

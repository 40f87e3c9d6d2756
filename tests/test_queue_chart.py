"""The chart's rights and settings for planning the whole queue."""

from __future__ import annotations

import re

import pytest

from conftest import Helm, HelmError
from test_chart import environment, of_kind, rendered
from tilecast_operator.settings import from_environment

pytestmark = pytest.mark.cluster


def rights(helm: Helm, *values: str) -> dict[str, list[str]]:
    """Return the verbs by resource."""
    (role,) = of_kind(rendered(helm, *(f"--set={value}" for value in values)), "ClusterRole")
    return {name: sorted(rule["verbs"]) for rule in role["rules"] for name in rule["resources"]}


def test_the_queue_is_planned_where_that_is_asked_for(helm: Helm) -> None:
    documents = rendered(helm, "--set=queue.enabled=true,queue.policy=fairness", "--set-json=queue.intervalSeconds=1.5")
    variables = environment(documents)
    assert variables["TILECAST_QUEUE"] == "true" and variables["TILECAST_QUEUE_NAME"] == "cluster"
    settings = from_environment({key: value for key, value in variables.items() if key.startswith("TILECAST_QUEUE")})
    assert (settings.queue, settings.queue_policy, settings.queue_interval_s) == (True, "fairness", 1.5)
    assert "TILECAST_QUEUE" not in environment(rendered(helm))
    with pytest.raises(HelmError, match=r"queue[./]policy"):
        rendered(helm, "--set=queue.policy=luck")


def test_estimates_come_with_their_rights_and_only_where_they_are_asked_for(helm: Helm) -> None:
    values = "queue.enabled=true", "jobs.enabled=true", "capacity.readKueue=true"
    assert "workloads" not in rights(helm, *values)
    assert rights(helm, *values, "queue.estimates=true")["workloads"] == ["list", "patch"]
    variables = environment(rendered(helm, *(f"--set={value}" for value in (*values, "queue.estimates=true"))))
    assert variables["TILECAST_QUEUE_ESTIMATES"] == "true"


@pytest.mark.parametrize("missing", ["queue.enabled", "jobs.enabled", "capacity.readKueue"])
def test_estimates_without_what_they_need_are_refused(helm: Helm, missing: str) -> None:
    values = [f"--set={name}=true" for name in ("queue.enabled", "jobs.enabled", "capacity.readKueue")]
    with pytest.raises(HelmError, match=rf"queue\.estimates: .*set .*{re.escape(missing)}.* to true"):
        rendered(helm, *values, "--set=queue.estimates=true", f"--set={missing}=false")
    if missing == "capacity.readKueue":
        with pytest.raises(HelmError, match="install Kueue first"):
            rendered(helm, *values, "--set=queue.estimates=true", "--set=capacity.readKueue=auto")


def test_its_rights_come_with_it(helm: Helm) -> None:
    granted = rights(helm, "queue.enabled=true")
    assert granted["queueadvices"] == ["create", "list", "patch", "watch"]
    assert granted["queueadvices/status"] == ["patch"]
    behind_kueue = rights(helm, "queue.enabled=true", "jobs.enabled=true", "capacity.readKueue=true")
    assert behind_kueue["workloadpriorityclasses"] == ["list", "watch"]
    assert behind_kueue["priorityclasses"] == ["list", "watch"]
    assert behind_kueue.keys() - rights(helm, "jobs.enabled=true", "capacity.readKueue=true").keys() == {
        "priorityclasses",
        "queueadvices",
        "queueadvices/status",
        "workloadpriorityclasses",
    }

"""The chart's CronJob that releases jobs while the operator is down, rendered by the real helm."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import Helm
from test_chart import before_uninstall, environment, of_kind, rendered

pytestmark = pytest.mark.cluster


def test_jobs_are_let_go_while_the_operator_is_down_with_no_right_more_than_that_needs(helm: Helm) -> None:
    assert not while_down(rendered(helm, "--set=jobs.enabled=true"))
    assert not while_down(rendered(helm, "--set=jobs.enabled=true,jobs.gate=true,jobs.releaseWhenDown.enabled=false"))
    for value in ("gate", "place"):
        assert while_down(rendered(helm, f"--set=jobs.enabled=true,jobs.{value}=true"))
    values = "--set=jobs.enabled=true,jobs.gate=true,shard.namespaceSelector.matchLabels.shard=a"
    shown = rendered(helm, values, "--set=jobs.releaseWhenDown.afterSeconds=45")
    down, hooks = while_down(shown), before_uninstall(shown)
    assert down["Role"]["rules"] == [
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": ["tilecast"], "verbs": ["get"]}
    ]
    assert down["ClusterRole"]["rules"] == hooks["ClusterRole"]["rules"][:-1], "all but the policy"
    (deployment,) = of_kind(shown, "Deployment")
    (account,) = {item["name"] for kind in ("RoleBinding", "ClusterRoleBinding") for item in down[kind]["subjects"]}
    assert account == down["ServiceAccount"]["metadata"]["name"] != "tilecast"
    spec = down["CronJob"]["spec"]
    pod = spec["jobTemplate"]["spec"]["template"]["spec"]
    assert (spec["schedule"], spec["concurrencyPolicy"], pod["serviceAccountName"]) == ("* * * * *", "Forbid", account)
    (container,) = pod["containers"]
    assert container["command"] == ["python3", "-m", "tilecast_operator.release"]
    assert container["args"] == [
        f"--if-stale={environment(shown)['TILECAST_LEASE']}",
        "--older-than=45",
        '--namespace-selector={"matchLabels":{"shard":"a"}}',
    ]
    (operator,) = deployment["spec"]["template"]["spec"]["containers"]
    for part, own in ((pod, deployment["spec"]["template"]["spec"]), (container, operator)):
        assert part["securityContext"] == own["securityContext"]
    name = while_down(rendered(helm, values, f"--set=fullnameOverride={'n' * 63}"))["CronJob"]["metadata"]["name"]
    assert len(name) <= 52, "a CronJob's Jobs have eleven characters more"


def while_down(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the objects that release jobs while the operator is down, by kind."""
    own = (item for item in documents if item["metadata"]["name"].endswith("-release-when-down"))
    return {item["kind"]: item for item in own}

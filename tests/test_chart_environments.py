"""The chart in clusters that are stricter, shared, or reached through a proxy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from cluster import Cluster, ClusterError, wait_for
from conftest import Helm, HelmError
from test_chart import CHART, ROOT, of_kind, rendered

pytestmark = pytest.mark.cluster

NUMBERED = ("runAsUser", "runAsGroup", "fsGroup")
OPENSHIFT = "--api-versions=security.openshift.io/v1"
JOBS = "--set=jobs.enabled=true,jobs.gate=true,web.enabled=true"


def pods(documents: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the spec of every pod that the chart makes."""
    for document in documents:
        spec = document.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if document["kind"] == "Pod" or "template" in spec:
            yield spec["template"]["spec"] if "template" in spec else spec


def test_helm_prints_the_log_of_its_test_and_nobody_is_told_to_ask_for_it(helm: Helm) -> None:
    (pod,) = of_kind(rendered(helm), "Pod")
    annotations = pod["metadata"]["annotations"]
    assert annotations["helm.sh/hook-output-log-policy"] == "hook-succeeded,hook-failed"
    # Helm deletes the pod before `--logs` reads it, and `--logs` names no container.
    pages = [ROOT / "README.md", CHART / "README.md", CHART / "templates" / "NOTES.txt", *(ROOT / "docs").glob("*.md")]
    assert not [page for page in pages if re.search("helm test .*--logs", page.read_text())]


def test_openshift_gives_every_pod_its_own_user(helm: Helm) -> None:
    (shown, there) = (list(pods(rendered(helm, JOBS, *more))) for more in ([], [OPENSHIFT]))
    assert len(shown) == len(there) >= 3
    for spec in shown:
        assert [spec["securityContext"][key] for key in NUMBERED] == [65532] * 3
    for spec in there:
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_users_and_groups_of_ones_own_are_taken_as_they_are(helm: Helm) -> None:
    chosen = "--set=podSecurityContext.runAsUser=1000660000,podSecurityContext.fsGroup=null"
    for more in ([], [OPENSHIFT]):
        for spec in pods(rendered(helm, JOBS, chosen, "--set=securityContext.privileged=false", *more)):
            assert spec["securityContext"]["runAsUser"] == 1000660000
            assert "fsGroup" not in spec["securityContext"]
            assert all(item["securityContext"]["privileged"] is False for item in spec["containers"])
            assert all(item["securityContext"]["readOnlyRootFilesystem"] for item in spec["containers"])


def test_a_proxy_and_an_authority_reach_the_operator(helm: Helm) -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    bundle = {"name": "authorities", "configMap": {"name": "ca-bundle"}}
    mount = {"name": "authorities", "mountPath": "/authorities", "readOnly": True}
    source = {"secretRef": {"name": "proxy"}}
    values = {"extraEnv": [proxy], "extraEnvFrom": [source], "extraVolumes": [bundle], "extraVolumeMounts": [mount]}
    chosen = (f"--set-json={key}={json.dumps(value)}" for key, value in values.items())
    (deployment,) = of_kind(rendered(helm, *chosen), "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["env"][-1] == proxy and container["envFrom"] == [source]
    assert container["volumeMounts"][-1] == mount and spec["volumes"][-1] == bundle


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ("jobs.enabled=true,jobs.gate=true,replicas=0", "replicas: 0 with jobs.gate: .*set replicas to 1 or more"),
        ("extraEnv[0].name=TILECAST_WRITERS", r"extraEnv\[0\].name: TILECAST_WRITERS is a setting .*under settings"),
        ("extraVolumes[0].emptyDir.medium=Memory", "extraVolumes.0.*name"),
    ],
)
def test_values_that_go_together_badly_are_refused_in_one_line(helm: Helm, values: str, line: str) -> None:
    with pytest.raises(HelmError, match=line):
        rendered(helm, f"--set={values}")
    rendered(helm, "--set=jobs.enabled=true,replicas=0")


TENANTS = ("rbac.authorization.k8s.io/aggregate-to-edit", "true")


def test_whoever_edits_a_namespace_writes_its_training_jobs(helm: Helm, cluster: Cluster) -> None:
    shown = rendered(helm, "--set=queue.enabled=true")
    roles = [item for item in shown if TENANTS in item["metadata"].get("labels", {}).items()]
    assert {item["kind"] for item in roles} == {"ClusterRole"} and len(roles) == 2
    assert not {TENANTS} & {
        label
        for item in rendered(helm, "--set=rbac.aggregate=false")
        for label in item["metadata"].get("labels", {}).items()
    }
    team = "aggregated"
    cluster.kubectl("create", "namespace", team)
    for who in ("view", "edit", "admin"):
        cluster.kubectl("create", "rolebinding", who, f"--clusterrole={who}", f"--user={who}", f"--namespace={team}")

    def may(who: str, verb: str, what: str, namespace: str = team, *more: str) -> bool:
        kind = f"{what}.tilecast.dev"
        try:
            cluster.kubectl("auth", "can-i", verb, kind, f"--as={who}", f"--namespace={namespace}", *more)
        except ClusterError:
            return False
        return True

    assert not may("edit", "create", "trainingjobs")
    cluster.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": roles}))
    wait_for(lambda: may("edit", "create", "trainingjobs"), "the roles to be aggregated", 60)
    wait_for(lambda: may("view", "list", "trainingjobs"), "the roles to be aggregated", 60)
    wait_for(lambda: may("admin", "deletecollection", "trainingjobs"), "the roles to be aggregated", 60)
    for who in ("view", "edit", "admin"):
        assert may(who, "watch", "trainingjobs") and may(who, "get", "trainingjobs", team, "--subresource=status")
        assert may(who, "patch", "trainingjobs") is (who != "view")
        assert not may(who, "patch", "trainingjobs", team, "--subresource=status")
        assert not may(who, "get", "trainingjobs", "default")
        assert not any(may(who, "get", kind) for kind in ("queueadvices", "poollearnings", "gpupools"))
    cluster.kubectl("delete", "clusterrole", *(item["metadata"]["name"] for item in roles))
    cluster.kubectl("delete", "namespace", team, "--wait=false")


def labels(**pairs: str) -> dict[str, Any]:
    return {"matchLabels": pairs}


def expression(operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": "shard", "operator": operator, **({"values": values} if values else {})}]}


PAIRS = (
    ({}, {}, False),
    (labels(shard="a"), {}, False),
    (labels(shard="a"), labels(shard="b"), True),
    (labels(shard="a"), labels(team="b"), False),
    (labels(shard="a", team="x"), labels(shard="b", team="x"), True),
    (labels(shard="a"), expression("NotIn", "a", "b"), True),
    (expression("In", "a", "c"), expression("NotIn", "a", "b"), False),
    (expression("In", "a", "b"), expression("In", "b", "c"), False),
    (expression("DoesNotExist"), expression("Exists"), True),
    (expression("DoesNotExist"), labels(shard="a"), True),
    (expression("NotIn", "a"), expression("DoesNotExist"), False),
)
"""Selectors of two releases, and whether no namespace fits both."""


def test_a_release_refuses_to_be_beside_another_over_the_same_namespaces(helm: Helm, bare_cluster: Cluster) -> None:
    def on(verb: str, name: str, *values: str) -> str:
        connection = [f"--kubeconfig={bare_cluster.kubeconfig}", f"--namespace={name}"]
        more = ["--create-namespace"] if verb == "install" else []
        return helm(verb, name, *([] if verb == "uninstall" else [str(CHART)]), *connection, *more, *values)

    def beside(other: str, selector: dict[str, Any], *values: str) -> None:
        chosen = f"--set-json=shard.namespaceSelector={json.dumps(selector)}"
        on("install", other, "--dry-run=server", chosen, *values)

    on("install", "first")
    try:
        on("upgrade", "first")
        with pytest.raises(
            HelmError, match="release first in namespace first may answer the same namespaces"
        ) as refused:
            on("install", "second")
        assert len(str(refused.value).strip().splitlines()) == 1
        assert "second" not in bare_cluster.kubectl("get", "clusterroles", "-o", "name")
        on("install", "second", "--dry-run=server", "--set=shard.refuseOthers=false")
        helm("template", "second", str(CHART))
        for first, second, are_apart in PAIRS:
            on(
                "upgrade",
                "first",
                f"--set-json=shard.namespaceSelector={json.dumps(first)}",
                "--set=queue.enabled=true",
            )
            if are_apart:
                beside("second", second, "--set=shard.ownsPools=false")
            else:
                with pytest.raises(HelmError, match="may answer the same namespaces"):
                    beside("second", second, "--set=shard.ownsPools=false")
        on("upgrade", "first", "--set=shard.namespaceSelector.matchLabels.shard=a,queue.enabled=true")
        with pytest.raises(
            HelmError, match="release first in namespace first writes the GPUPools already; set it to false"
        ):
            beside("second", labels(shard="b"))
        apart = "--set=shard.ownsPools=false,queue.enabled=true"
        with pytest.raises(HelmError, match=r"queue.name: .* writes the QueueAdvice cluster already"):
            beside("second", labels(shard="b"), apart)
        beside("second", labels(shard="b"), apart, "--set=queue.name=b")
    finally:
        on("uninstall", "first", "--no-hooks")
        bare_cluster.kubectl("delete", "namespace", "first", "--wait=false")

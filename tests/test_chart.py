"""The chart, rendered, installed, tested and removed by the real helm on a real control plane."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_switches import SWITCHES, pairwise
from cluster import Cluster, ClusterError, wait_for
from conftest import Helm, HelmError, ensure_or_fail
from operator_process import Operator
from test_releases import RELEASES, crds_of, crds_of_today
from tilecast import __version__
from tilecast.jobs import ADMISSION_GATES, HOLD_QUEUE, JOB_KINDS
from tilecast.objectives import OBJECTIVES
from tilecast_operator.settings import Settings, from_environment, name_variable

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "tilecast"
NAMESPACE = "tilecast-system"
SAME_VERSION = [chart for chart in RELEASES if chart.stem.startswith(f"tilecast-{__version__}-")]
"""Charts that landed under today's version: their CRDs are older and state the same version."""
EARLIER = [chart for chart in RELEASES if chart not in SAME_VERSION]
KUBE_SCORE_GRADE_OK = 10
MONITORING = [f"--set={name}.enabled=true" for name in ("serviceMonitor", "podMonitor", "prometheusRule")]
OPERATED = "--api-versions=monitoring.coreos.com/v1"
GATES = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"

Conform = Callable[[list[dict[str, Any]]], dict[str, Any]]


@pytest.fixture(scope="module")
def own_cluster(binaries: Path) -> Iterator[Cluster]:
    """Yield a cluster without CRDs, so that helm installs them."""
    with Cluster(nodes=ROOT / "examples" / "clusters" / "single-t4.yaml") as started:
        yield started


@pytest.fixture(scope="module")
def installer(helm: Helm, own_cluster: Cluster) -> Helm:
    def run(verb: str, *arguments: str) -> str:
        connection = [f"--kubeconfig={own_cluster.kubeconfig}", f"--namespace={NAMESPACE}"]
        return helm(verb, "tilecast", *arguments, *connection)

    return run


def rendered(helm: Helm, *arguments: str) -> list[dict[str, Any]]:
    output = helm("template", "tilecast", str(CHART), f"--namespace={NAMESPACE}", *arguments)
    return [document for document in yaml.safe_load_all(output) if document]


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the documents of a kind, except those of the release hooks, of the pages and the roles of tenants."""
    component = "app.kubernetes.io/component"
    others = {
        (component, "release"), (component, "web"), ("rbac.authorization.k8s.io/aggregate-to-edit", "true"),
    }  # fmt: skip
    return [
        document
        for document in documents
        if document["kind"] == kind and not others & document["metadata"].get("labels", {}).items()
    ]


def test_lint_finds_nothing(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("imge.tag=1", "imge"),
        ("image.tags=1", "tags"),
        ("crds.keep=maybe", "keep"),
        ("crds.kept=true", "kept"),
        ("service.port=0", "port"),
        ("settings.TILECAST_WRITER=2", "TILECAST_WRITER"),
        ("resources.limit.memory=1Gi", "limit"),
    ],
)
def test_a_mistyped_value_is_refused_by_name(helm: Helm, setting: str, named: str) -> None:
    with pytest.raises(HelmError, match=named):
        rendered(helm, "--set", setting)


def test_crds_are_no_part_of_the_release(helm: Helm) -> None:
    assert of_kind(rendered(helm), "CustomResourceDefinition") == []
    shown = [document for document in yaml.safe_load_all(helm("show", "crds", str(CHART))) if document]
    assert {crd["metadata"]["name"]: crd for crd in shown} == crds_of_today()
    assert crds_of_today().keys() >= {"trainingjobs.tilecast.dev", "gpupools.tilecast.dev"}


def test_the_role_grants_these_verbs_and_no_others(helm: Helm) -> None:
    (role,) = of_kind(rendered(helm), "ClusterRole")
    granted = {
        (group, resource): sorted(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert granted == {
        ("", "nodes"): ["list", "watch"],
        ("resource.k8s.io", "resourceslices"): ["list", "watch"],
        ("", "events"): ["create"],
        ("", "namespaces"): ["list", "watch"],
        ("authentication.k8s.io", "tokenreviews"): ["create"],
        ("", "configmaps"): ["get"],
        ("apiextensions.k8s.io", "customresourcedefinitions"): ["list", "watch"],
        ("tilecast.dev", "trainingjobs"): ["list", "patch", "watch"],
        ("tilecast.dev", "trainingjobs/status"): ["patch"],
        ("tilecast.dev", "gpupools"): ["create", "delete", "list", "patch", "watch"],
        ("tilecast.dev", "gpupools/status"): ["patch"],
        ("tilecast.dev", "poollearnings"): ["create", "list", "patch", "watch"],
    }


def test_namespaces_are_read_where_their_label_asks_for_advice_on_jobs(helm: Helm) -> None:
    (role,) = of_kind(rendered(helm, "--set=jobs.enabled=true"), "ClusterRole")
    (verbs,) = (rule["verbs"] for rule in role["rules"] if "namespaces" in rule["resources"])
    assert sorted(verbs) == ["list", "watch"]


def test_monitors_and_rules_appear_where_something_reads_them(helm: Helm) -> None:
    kinds = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert not kinds & {document["kind"] for document in rendered(helm, *MONITORING)}
    assert not kinds & {document["kind"] for document in rendered(helm, OPERATED)}
    shown = rendered(helm, *MONITORING, OPERATED, "--set=prometheusRule.runbooks=https://example.org/runbooks")
    assert kinds <= {document["kind"] for document in shown}
    (rules,) = of_kind(shown, "PrometheusRule")
    (file,) = (CHART / "rules").iterdir()
    expected = file.read_text().replace("docs/runbooks.md", "https://example.org/runbooks")
    assert rules["spec"] == yaml.safe_load(expected)
    (nowhere,) = of_kind(rendered(helm, *MONITORING, OPERATED), "PrometheusRule")
    assert "runbook" not in json.dumps(nowhere)
    (service,) = of_kind(shown, "Service")
    (monitor,) = of_kind(shown, "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {end["port"] for end in monitor["spec"]["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
    (deployment,) = of_kind(shown, "Deployment")
    (ports,) = (container["ports"] for container in deployment["spec"]["template"]["spec"]["containers"])
    (pods,) = of_kind(shown, "PodMonitor")
    assert {end["port"] for end in pods["spec"]["podMetricsEndpoints"]} == {port["name"] for port in ports}


def test_dashboards_come_as_they_are_under_the_label_of_grafanas_sidecar(helm: Helm) -> None:
    assert of_kind(rendered(helm), "ConfigMap") == []
    (document,) = of_kind(rendered(helm, "--set=dashboards.enabled=true"), "ConfigMap")
    assert document["metadata"]["labels"]["grafana_dashboard"] == "1"
    shown = {name: json.loads(text) for name, text in document["data"].items()}
    files = {f"tilecast-{path.name}": json.loads(path.read_text()) for path in (CHART / "dashboards").iterdir()}
    assert shown == {name: unlinked(board) for name, board in files.items()} and shown != files
    at = "--set=prometheusRule.runbooks=https://example.org/runbooks"
    (config_map,) = of_kind(rendered(helm, "--set=dashboards.enabled=true", at), "ConfigMap")
    linked = json.loads(json.dumps(files).replace("docs/runbooks.md", "https://example.org/runbooks"))
    assert {name: json.loads(text) for name, text in config_map["data"].items()} == linked


def test_a_certificate_is_mounted_and_asked_for(helm: Helm) -> None:
    shown = rendered(helm, OPERATED, *MONITORING, "--set=tls.secretName=certificate")
    (deployment,) = of_kind(shown, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    values = {item["name"]: item.get("value") for item in container["env"]}
    (mount,) = (item for item in container["volumeMounts"] if item["name"] == "tls")
    (volume,) = (item for item in deployment["spec"]["template"]["spec"]["volumes"] if item["name"] == "tls")
    assert volume["secret"]["secretName"] == "certificate"
    for name in ("TILECAST_TLS_CERTIFICATE", "TILECAST_TLS_KEY"):
        assert str(values[name]).startswith(mount["mountPath"] + "/tls.")
    assert {container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("liveness", "readiness")} == {"HTTPS"}
    (service,), (pods,) = of_kind(shown, "ServiceMonitor"), of_kind(shown, "PodMonitor")
    assert service["spec"]["endpoints"][0]["scheme"] == pods["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"
    plain = json.dumps(rendered(helm, OPERATED, *MONITORING))
    assert "TILECAST_TLS" not in plain and "HTTPS" not in plain


def web_objects(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the objects of the pages by kind, of which there is one each."""
    component = "app.kubernetes.io/component"
    found = [item for item in documents if item["metadata"].get("labels", {}).get(component) == "web"]
    assert len({item["kind"] for item in found}) == len(found)
    return {item["kind"]: item for item in found}


def test_the_pages_have_a_pod_and_an_account_of_their_own_that_only_reads(helm: Helm) -> None:
    assert not web_objects(rendered(helm))
    values = "web.enabled=true,web.hosts={tilecast.example.org},networkPolicy.enabled=true,queue.enabled=true"
    shown = rendered(helm, "--set", f"{values},jobs.enabled=true,model.configMap=ours,model.sha256={'ab' * 32}")
    objects = web_objects(shown)
    assert objects.keys() == {
        "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Deployment", "Service", "NetworkPolicy",
    }  # fmt: skip
    read = {"apiGroups": ["tilecast.dev"], "resources": ["gpupools", "trainingjobs", "queueadvices"]}
    assert objects["ClusterRole"]["rules"] == [{**read, "verbs": ["list", "watch"]}]
    account = objects["ServiceAccount"]["metadata"]["name"]
    assert [subject["name"] for subject in objects["ClusterRoleBinding"]["subjects"]] == [account]
    assert objects["ClusterRoleBinding"]["roleRef"]["name"] == objects["ClusterRole"]["metadata"]["name"]
    template = objects["Deployment"]["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    (operator,) = of_kind(shown, "Deployment")
    operators_pod = operator["spec"]["template"]
    assert pod["serviceAccountName"] == account != operators_pod["spec"]["serviceAccountName"]
    assert container["command"] == ["python3", "-m", "tilecast_operator.web"]
    names = ["tilecast-web", f"tilecast-web.{NAMESPACE}", f"tilecast-web.{NAMESPACE}.svc", "tilecast.example.org"]
    assert container["args"] == [f"--allow-host={name}" for name in names]
    assert container["securityContext"] == operators_pod["spec"]["containers"][0]["securityContext"]
    assert pod["securityContext"] == operators_pod["spec"]["securityContext"]
    assert {variable["name"]: variable["value"] for variable in container["env"]}.items() <= environment(shown).items()
    for kind in ("Service", "NetworkPolicy", "Deployment"):
        spec, theirs = objects[kind]["spec"], of_kind(shown, kind)[0]["spec"]
        own, other = (item.get("podSelector", item.get("selector", {})) for item in (spec, theirs))
        own, other = own.get("matchLabels", own), other.get("matchLabels", other)
        assert own.items() <= template["metadata"]["labels"].items()
        assert not own.items() <= operators_pod["metadata"]["labels"].items(), "the operator is no page"
        assert not other.items() <= template["metadata"]["labels"].items(), "a page is no operator"
    ports = {port["port"] for rule in objects["NetworkPolicy"]["spec"]["egress"] for port in rule["ports"]}
    assert ports == {53, 443, 6443, 9090}
    long = web_objects(rendered(helm, f"--set=web.enabled=true,rbac.create=false,fullnameOverride={'n' * 63}"))
    assert "ClusterRole" not in long and max(len(item["metadata"]["name"]) for item in long.values()) == 63
    with pytest.raises(HelmError, match="hosts"):
        rendered(helm, "--set=web.enabled=true,web.hosts={a/b}")


def unlinked(value: Any) -> Any:
    """Return a dashboard without its links to runbooks."""
    if isinstance(value, dict):
        return {
            key: unlinked(item) for key, item in value.items() if "runbooks" not in json.dumps(item) or key != "links"
        }
    return [unlinked(item) for item in value] if isinstance(value, list) else value


def test_the_network_policy_lets_in_what_it_must_and_names_the_pods(helm: Helm) -> None:
    assert of_kind(rendered(helm), "NetworkPolicy") == []
    shown = rendered(helm, "--set=networkPolicy.enabled=true", "--set=networkPolicy.egressPorts={8443}")
    (policy,), (deployment,) = of_kind(shown, "NetworkPolicy"), of_kind(shown, "Deployment")
    pod = deployment["spec"]["template"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    names = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == names
    assert {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]} == {53, 8443} | names


def test_tokens_can_be_kept_from_it(helm: Helm) -> None:
    (role,) = of_kind(rendered(helm, "--set", "observations.reviewTokens=false"), "ClusterRole")
    assert not any("tokenreviews" in rule["resources"] for rule in role["rules"])


def test_without_learning_it_sees_no_namespace_and_no_run(helm: Helm) -> None:
    documents = rendered(helm, "--set", "learning.enabled=false")
    (role,) = of_kind(documents, "ClusterRole")
    assert not any({"namespaces", "poollearnings"} & set(rule["resources"]) for rule in role["rules"])
    assert environment(documents)["TILECAST_LEARNING"] == "false"
    trusting = rendered(helm, "--set", "observations.trustedNamespaces={bench,ml-infra}")
    assert environment(trusting)["TILECAST_TRUSTED_NAMESPACES"] == "bench,ml-infra"


def environment(documents: Sequence[Any]) -> dict[str, str]:
    """Return the variables of the operator's container by name."""
    (deployment,) = of_kind(documents, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {item["name"]: item.get("value", "") for item in container["env"]}


def test_the_configuration_of_kube_state_metrics_is_there_when_asked_for(helm: Helm) -> None:
    assert of_kind(rendered(helm), "ConfigMap") == []
    (document,) = of_kind(rendered(helm, "--set", "kubeStateMetrics.configMap=true"), "ConfigMap")
    text = (CHART / "files" / "custom-resource-state.yaml").read_text()
    assert document["data"]["custom-resource-state.yaml"] == text


def test_replicas_share_a_lease_that_they_alone_may_take(helm: Helm) -> None:
    for count in (1, 2):
        documents = rendered(helm, f"--set=replicas={count}")
        (role,) = of_kind(documents, "Role")
        (deployment,) = of_kind(documents, "Deployment")
        assert deployment["spec"]["replicas"] == count and deployment["spec"]["strategy"]["type"] == "RollingUpdate"
        pod = deployment["spec"]["template"]
        environment = {item["name"]: item for item in pod["spec"]["containers"][0]["env"]}
        namespace, name = environment["TILECAST_LEASE"]["value"].split("/")
        assert environment["TILECAST_POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert role["metadata"]["namespace"] == namespace == NAMESPACE
        granted = [(rule["resources"], rule.get("resourceNames"), sorted(rule["verbs"])) for rule in role["rules"]]
        assert granted == [(["leases"], None, ["create"]), (["leases"], [name], ["get", "update"])]
        budgets = of_kind(documents, "PodDisruptionBudget")
        assert len(budgets) == count - 1
        for budget in budgets:
            assert budget["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        affinity = pod["spec"]["affinity"]
        assert "nodeAffinity" in affinity and ("podAntiAffinity" in affinity) == (count == 2)
    own = rendered(helm, "--set=replicas=2", "--set-json", 'affinity={"podAntiAffinity":{}}')
    assert of_kind(own, "Deployment")[0]["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"] == {}


def test_config_maps_can_be_kept_from_it(helm: Helm) -> None:
    (role,) = of_kind(rendered(helm, "--set", "rbac.readConfigMaps=false"), "ClusterRole")
    assert not any("configmaps" in rule["resources"] for rule in role["rules"])
    documents = rendered(helm, "--set", "rbac.configMapNamespaces={team-a,team-b}")
    assert not any("configmaps" in rule["resources"] for rule in of_kind(documents, "ClusterRole")[0]["rules"])
    for kind in ("Role", "RoleBinding"):
        of_models = [item for item in of_kind(documents, kind) if item["metadata"]["name"].endswith("-models")]
        assert [item["metadata"]["namespace"] for item in of_models] == ["team-a", "team-b"]
    (first, _) = (role for role in of_kind(documents, "Role") if role["metadata"]["name"].endswith("-models"))
    assert first["rules"] == [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]


@pytest.mark.parametrize(
    ("values", "resource", "verbs", "variable"),
    [
        (["shard.ownsPools=false"], ("tilecast.dev", "gpupools"), ["list", "watch"], "TILECAST_OWNS_POOLS=false"),
        (
            ["shard.namespaceSelector.matchLabels.shard=a"],
            ("", "namespaces"),
            ["list", "watch"],
            'TILECAST_NAMESPACE_SELECTOR={"matchLabels":{"shard":"a"}}',
        ),
        (["discovery.enabled=false"], ("tilecast.dev", "gpupools"), ["list", "watch"], "TILECAST_DISCOVERY=false"),
        (["capacity.readPods=true"], ("", "pods"), ["list", "watch"], "TILECAST_READ_PODS=true"),
        *(
            (["jobs.enabled=true"], (kind.group, kind.plural), ["get", "list", "watch", "patch"], "TILECAST_JOBS=true")
            for kind in JOB_KINDS.values()
        ),
        (
            ["jobs.enabled=true", "jobs.place=true", "capacity.readKueue=true"],
            ("kueue.x-k8s.io", "workloads"),
            ["list", "patch"],
            "TILECAST_PLACE=true",
        ),
        (
            ["jobs.enabled=true", "observations.logs.enabled=true"],
            ("", "pods/log"),
            ["get"],
            "TILECAST_READ_LOGS=true",
        ),
        (
            ["capacity.readKueue=true"],
            ("kueue.x-k8s.io", "clusterqueues"),
            ["list", "watch"],
            "TILECAST_READ_KUEUE=true",
        ),
        (
            ["discovery.readResourceSlices=true"],
            ("resource.k8s.io", "resourceslices"),
            ["list", "watch"],
            "TILECAST_READ_RESOURCE_SLICES=true",
        ),
    ],
)
def test_rights_and_settings_go_together(
    helm: Helm, values: list[str], resource: tuple[str, str], verbs: list[str], variable: str
) -> None:
    documents = rendered(helm, *(part for value in values for part in ("--set", value)))
    granted = {
        (group, name): rule["verbs"]
        for rule in of_kind(documents, "ClusterRole")[0]["rules"]
        for group in rule["apiGroups"]
        for name in rule["resources"]
    }
    assert granted[resource] == verbs
    (container,) = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]["containers"]
    assert variable in [f"{item['name']}={item.get('value')}" for item in container["env"]]


def test_jobs_are_placed_only_where_they_are_advised(helm: Helm) -> None:
    (role,) = of_kind(rendered(helm), "ClusterRole")
    assert not {"workloads", *(kind.plural for kind in JOB_KINDS.values())} & {
        name for rule in role["rules"] for name in rule["resources"]
    }
    for value in ("jobs.place=true", "jobs.gate=true"):
        with pytest.raises(HelmError, match="/jobs/enabled"):
            rendered(helm, "--set", value)


def test_logs_are_read_only_by_an_opt_in_of_their_own(helm: Helm) -> None:
    def pod_rights(*values: str) -> list[tuple[str, list[str]]]:
        (role,) = of_kind(rendered(helm, *values), "ClusterRole")
        found = [(name, rule["verbs"]) for rule in role["rules"] for name in rule["resources"]]
        return [(name, verbs) for name, verbs in found if name.startswith("pods")]

    most = "jobs.enabled=true,jobs.place=true,queue.enabled=true,discovery.readResourceSlices=true"
    assert not pod_rights() and not pod_rights("--set", most)
    assert pod_rights("--set", f"{most},observations.logs.enabled=true") == [("pods", ["list"]), ("pods/log", ["get"])]
    with pytest.raises(HelmError, match=r"observations\.logs\.enabled: [^\n]*set jobs.enabled to true"):
        rendered(helm, "--set", "observations.logs.enabled=true")


def test_jobs_are_let_go_before_an_uninstall_with_no_right_more_than_that_needs(helm: Helm) -> None:
    assert not before_uninstall(rendered(helm))
    assert not before_uninstall(rendered(helm, "--set=jobs.enabled=true,jobs.releaseOnUninstall=false"))
    shown = rendered(helm, "--set=jobs.enabled=true,jobs.gate=true")
    hooks = before_uninstall(shown)
    rules = hooks["ClusterRole"]["rules"]
    assert all(rule["verbs"] == ["get", "list", "patch"] for rule in rules[:-1])
    (role,) = of_kind(shown, "ClusterRole")
    operators = {(group, name) for rule in role["rules"] for group in rule["apiGroups"] for name in rule["resources"]}
    assert (
        {(rule["apiGroups"][0], rule["resources"][0]) for rule in rules[:-1]}
        == {(kind.group, kind.plural) for kind in JOB_KINDS.values()}
        <= operators
    )
    assert rules[-1]["resourceNames"] == ["tilecast-gate"] and rules[-1]["verbs"] == ["get", "delete"]
    shard = rendered(helm, "--set=jobs.enabled=true,jobs.gate=true,shard.namespaceSelector.matchLabels.shard=a")
    of_shard = before_uninstall(shard)
    more = [rule for rule in of_shard["ClusterRole"]["rules"] if rule not in rules]
    assert more == [{"apiGroups": [""], "resources": ["namespaces"], "verbs": ["list"]}]
    selector = '--namespace-selector={"matchLabels":{"shard":"a"}}'
    assert of_shard["Job"]["spec"]["template"]["spec"]["containers"][0]["args"] == ["--policy=tilecast-gate", selector]
    pod = hooks["Job"]["spec"]["template"]
    assert pod["spec"]["containers"][0]["command"] == ["python3", "-m", "tilecast_operator.release"]
    (service,) = of_kind(shown, "Service")
    assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def before_uninstall(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the hooks that run before an uninstall, by kind."""
    hooks = (item for item in documents if item["metadata"].get("annotations", {}).get("helm.sh/hook") == "pre-delete")
    return {item["kind"]: item for item in hooks}


def test_the_chart_has_no_symbolic_links() -> None:
    assert not [path for path in CHART.rglob("*") if path.is_symlink()]


@pytest.mark.parametrize("chosen", ["auto", "absent", "present"])
def test_the_gate_uses_kueues_own_only_where_that_is_said_to_be_on(helm: Helm, chosen: str) -> None:
    served = "--api-versions=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"
    values = f"--set=jobs.enabled=true,jobs.gate=true,jobs.kueue.admissionGate={chosen}"
    (policy,) = of_kind(rendered(helm, served, values), "MutatingAdmissionPolicy")
    expression = policy["spec"]["mutations"][0]["jsonPatch"]["expression"]
    assert (HOLD_QUEUE in expression) is (chosen != "present") is (ADMISSION_GATES not in expression)
    with pytest.raises(HelmError, match="admissionGate"):
        rendered(helm, "--set=jobs.kueue.admissionGate=perhaps")


@pytest.mark.parametrize("version", ["v1", "v1beta1", None])
def test_the_gate_is_put_on_only_where_the_api_server_can(helm: Helm, version: str | None) -> None:
    kind = "MutatingAdmissionPolicy"
    values = ["--set", "jobs.enabled=true,jobs.gate=true"]
    served = [f"--api-versions=admissionregistration.k8s.io/{version}/{kind}"] if version else []
    document = of_kind(rendered(helm, *values, *served), kind)
    assert [item["apiVersion"] for item in document] == ([f"admissionregistration.k8s.io/{version}"] if version else [])
    assert not of_kind(rendered(helm, *served), kind)
    for policy in document:
        gated = [
            (*rule["apiGroups"], *rule["resources"]) for rule in policy["spec"]["matchConstraints"]["resourceRules"]
        ]
        waiting = [(kind.group, kind.plural) for kind in JOB_KINDS.values() if kind.waits_from_creation]
        assert sorted(gated) == sorted(waiting)


@pytest.mark.parametrize(("api", "is_read"), [("kueue.x-k8s.io/v1beta1", True), ("kueue.x-k8s.io/v1", False)])
def test_kueue_is_read_where_the_cluster_serves_it(helm: Helm, api: str, is_read: bool) -> None:
    (role,) = of_kind(rendered(helm, f"--api-versions={api}"), "ClusterRole")
    assert any("clusterqueues" in rule["resources"] for rule in role["rules"]) == is_read


def test_a_model_of_ones_own_is_mounted_with_its_digest(helm: Helm) -> None:
    digest = "ab" * 32
    documents = rendered(helm, "--set", "model.configMap=ours", "--set", f"model.sha256={digest}")
    spec = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]
    environment = {item["name"]: item.get("value") for item in spec["containers"][0]["env"]}
    assert environment["TILECAST_UTILIZATION_MODEL"] == "/models/utilization.onnx"
    assert environment["TILECAST_UTILIZATION_MODEL_SHA256"] == digest
    assert {"name": "model", "configMap": {"name": "ours"}} in spec["volumes"]


BY_VALUES = (
    "TILECAST_LISTEN_", "TILECAST_DISCOVERY", "TILECAST_READ_", "TILECAST_UTILIZATION_MODEL", "TILECAST_JOBS",
    "TILECAST_PLACE", "TILECAST_KUEUE_ADMISSION_GATE", "TILECAST_TLS", "TILECAST_LEASE", "TILECAST_POD_IP",
    "TILECAST_OWNS_POOLS", "TILECAST_NAMESPACE_SELECTOR", "TILECAST_JOURNAL",
    "TILECAST_LEARNING", "TILECAST_TRUSTED_NAMESPACES", "TILECAST_QUEUE",
)  # fmt: skip
"""Prefixes of the settings with values of their own, which also grant the rights or the volume that they need."""


def test_the_values_offer_every_setting_of_the_operator_but_its_address() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]["properties"]
    kinds = {"int": "integer", "float": "number", "str": "string"}
    for name, choices in {name: entry.pop("enum", ()) for name, entry in schema.items()}.items():
        for choice in choices:
            assert from_environment({name: choice})
    assert schema == {
        name_variable(setting): {"type": kinds[str(setting.type)], "description": setting.metadata["text"]}
        for setting in fields(Settings)
        if not name_variable(setting).startswith(BY_VALUES)
    }


def test_the_service_is_not_taken_for_settings(helm: Helm) -> None:
    # A Service named tilecast sets TILECAST_PORT and similar variables in every pod of its namespace.
    (deployment,) = of_kind(rendered(helm), "Deployment")
    assert deployment["spec"]["template"]["spec"]["enableServiceLinks"] is False


@pytest.fixture(scope="module")
def conform(chart_tools: Path, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Conform:
    """Return a function that checks documents with kubeconform in strict mode.

    It uses the schemas that the API server publishes, including those of our CRDs and of the Prometheus Operator.
    """
    manifests = ensure_or_fail("prometheus-operator") / "manifests"
    for name in ("servicemonitors", "podmonitors", "prometheusrules"):
        cluster.apply(manifests / f"monitoring.coreos.com_{name}.yaml")
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
    folder = tmp_path_factory.mktemp("schemas")
    location = f"{folder}/{{{{ .Group }}}}_{{{{ .ResourceAPIVersion }}}}_{{{{ .ResourceKind }}}}.json"
    command = [
        str(chart_tools / "kubeconform"), "-strict", "-summary", "-output=json", f"-schema-location={location}",
    ]  # fmt: skip

    def verdict(documents: list[dict[str, Any]]) -> dict[str, Any]:
        for api_version, kind in {(document["apiVersion"], document["kind"]) for document in documents}:
            group, _, version = api_version.rpartition("/")
            path = folder / f"{group or version}_{version}_{kind.lower()}.json"
            if not path.exists():
                published = partial(schema_of, cluster, group, version, kind)
                path.write_text(json.dumps(wait_for(published, f"a schema of {kind}", 60)))
        text = yaml.safe_dump_all(documents)
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return verdict


def test_every_pair_of_switches_renders_what_the_api_servers_own_schemas_allow(
    helm: Helm, conform: Conform, cluster: Cluster
) -> None:
    gates = [f"--api-versions={GATES}"] if "mutatingadmissionpolicies" in cluster.kubectl("api-resources") else []
    for values in pairwise(SWITCHES):
        documents = rendered(
            helm, OPERATED, *gates, "--set=serviceAccount.name=own", *(f"--set={value}" for value in values)
        )
        problems = conform(documents)
        assert problems["summary"] == {"valid": len(documents), "invalid": 0, "errors": 0, "skipped": 0}, (
            values,
            problems,
        )

    (deployment,) = of_kind(documents, "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    assert "imagePullPolice" in json.dumps(conform([deployment]))


def test_two_switches_meet_in_all_four_ways() -> None:
    rows = [set(row) for row in pairwise(SWITCHES)]
    for one, other in combinations(SWITCHES, 2):
        assert all(any({a, b} <= row for row in rows) for a in one for b in other)


def test_the_examples_satisfy_the_schemas_of_our_own_kinds(conform: Conform) -> None:
    documents = [
        document
        for path in sorted((ROOT / "examples").rglob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
        if document and document.get("apiVersion", "").startswith("tilecast.dev/")
    ]
    problems = conform(documents)
    assert problems["summary"] == {"valid": len(documents), "invalid": 0, "errors": 0, "skipped": 0}, problems
    documents[0]["spec"]["modell"] = {}
    assert "modell" in json.dumps(conform(documents[:1]))


def test_kube_score_finds_what_is_documented_and_no_more(helm: Helm) -> None:
    program = ensure_or_fail("kube-score") / "kube-score"
    documents = rendered(
        helm, OPERATED, *MONITORING, "--set=networkPolicy.enabled=true,dashboards.enabled=true,web.enabled=true"
    )
    done = subprocess.run(
        [program, "score", "--output-format=json", "--kubernetes-version=v1.29", "-"],
        input=yaml.safe_dump_all(documents), capture_output=True, text=True, check=False,
    )  # fmt: skip
    remarks = {
        (scored["object_name"].rpartition("/")[2], check["check"]["id"])
        for scored in json.loads(done.stdout)
        for check in scored["checks"]
        if check["grade"] < KUBE_SCORE_GRADE_OK and not check["skipped"]
    }
    page = (ROOT / "docs" / "security.md").read_text()
    documented = re.findall(r"^\| `([\w, -]+)` \| `([a-z-]+)` \|", page, re.MULTILINE)
    assert remarks == {(name, check) for names, check in documented for name in names.split(", ")}


def schema_of(cluster: Cluster, group: str, version: str, kind: str) -> dict[str, Any] | None:
    """Return the JSON schema that the API server publishes for a kind, closed against unknown keys.

    Return None while it publishes none.
    """
    path = f"/openapi/v3/apis/{group}/{version}" if group else f"/openapi/v3/api/{version}"
    try:
        components: dict[str, Any] = json.loads(cluster.kubectl("get", "--raw", path))["components"]
    except ClusterError:
        return None
    identity = {"group": group, "version": version, "kind": kind}
    names = [
        name
        for name, schema in components["schemas"].items()
        if identity in schema.get("x-kubernetes-group-version-kind", [])
    ]
    for schema in components["schemas"].values():
        close(schema)
    return {"$ref": f"#/components/schemas/{names[0]}", "components": components} if names else None


def close(schema: dict[str, Any]) -> None:
    """Forbid unknown keys in a schema, except where the API server itself keeps them."""
    properties = schema.get("properties", {})
    if properties and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    for inner in (*properties.values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            close(inner)


def test_the_api_server_holds_every_pod_to_the_restricted_standard(helm: Helm, cluster: Cluster) -> None:
    namespace = f"{NAMESPACE}-restricted"
    cluster.kubectl("create", "namespace", namespace)
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")

    def create(spec: dict[str, Any]) -> str:
        # The service account and the priority class do not exist; neither matters to the standard.
        spec = {key: value for key, value in spec.items() if key not in ("serviceAccountName", "priorityClassName")}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        arguments = ["create", "--dry-run=server", f"--namespace={namespace}", "-f", "-"]
        return cluster.kubectl(*arguments, input=json.dumps(pod))

    wait_for(lambda: cluster.kubectl("get", "serviceaccount", "default", f"--namespace={namespace}"), "an account")
    for values in pairwise(SWITCHES)[:2]:
        shown = rendered(helm, "--set=serviceAccount.name=own", *(f"--set={value}" for value in values))
        (deployment,), (test,) = of_kind(shown, "Deployment"), of_kind(shown, "Pod")
        values = ["serviceAccount.name=own", *values, "web.enabled=true"]
        pages = web_objects(rendered(helm, *(f"--set={value}" for value in values)))["Deployment"]
        for spec in (deployment["spec"]["template"]["spec"], test["spec"], pages["spec"]["template"]["spec"]):
            assert "created" in create(spec)
            spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
            with pytest.raises(ClusterError, match='violates PodSecurity "restricted'):
                create(spec)
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


def test_install_upgrade_uninstall(installer: Helm, own_cluster: Cluster) -> None:
    own_cluster.kubectl("create", "namespace", NAMESPACE)
    # The API server's own admission judges the pod by the Restricted standard.
    own_cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")

    installer("install", str(CHART), "--wait", "--timeout=120s")
    pods = json.loads(own_cluster.kubectl("--namespace", NAMESPACE, "get", "pods", "-o", "json"))["items"]
    assert [pod["status"]["phase"] for pod in pods] == ["Running"]
    assert "gke-lab-system" in pods[0]["spec"]["nodeName"], "the operator must stay off the GPU node"

    chosen = "settings.TILECAST_ADVICE_CACHE=2000000,settings.TILECAST_NODE_SELECTOR=gpu"
    installer("upgrade", str(CHART), "--wait", "--timeout=120s", "--set", chosen)
    (container,) = json.loads(
        own_cluster.kubectl("--namespace", NAMESPACE, "get", "deployment", "tilecast", "-o", "json")
    )["spec"]["template"]["spec"]["containers"]
    assert container["env"][-3:-1] == [
        {"name": "TILECAST_ADVICE_CACHE", "value": "2000000"},
        {"name": "TILECAST_NODE_SELECTOR", "value": "gpu"},
    ]

    helm_test(installer, own_cluster)

    account = f"--as=system:serviceaccount:{NAMESPACE}:tilecast"
    for allowed in (
        "list nodes",
        "patch trainingjobs.tilecast.dev --subresource=status",
        "patch gpupools.tilecast.dev --subresource=status",
        "create gpupools.tilecast.dev",
    ):
        assert own_cluster.kubectl("auth", "can-i", *allowed.split(), account).strip() == "yes"
    for denied in (
        "patch nodes",
        "delete trainingjobs.tilecast.dev",
        "patch jobs.batch",
        "get secrets",
        "list pods",
    ):
        with pytest.raises(ClusterError, match="no"):
            own_cluster.kubectl("auth", "can-i", *denied.split(), account)

    own_cluster.apply(OBJECTS)
    installer("uninstall", "--wait", "--timeout=120s")
    assert left(own_cluster) == sorted([*CRD_NAMES, *OBJECT_NAMES])

    # The same release adopts them again. Values of releases that had CRDs as templates change nothing.
    installer("install", str(CHART), "--set=crds.keep=false", "--set=rbac.configMapNamespaces={default}")
    assert set(OBJECT_NAMES) <= set(left(own_cluster))
    installer("uninstall", "--wait", "--timeout=120s")
    assert left(own_cluster) == sorted([*CRD_NAMES, *OBJECT_NAMES])
    own_cluster.kubectl("delete", "crd", *crds_of_today())
    wait_for(lambda: left(own_cluster) == [] or None, "nothing to be left", 60)


def hooks_of(helm: Helm, cluster: Cluster) -> str:
    """Return the hooks that Helm runs before and after operations on the release."""
    return helm("get", "hooks", "tilecast", f"--kubeconfig={cluster.kubeconfig}", f"--namespace={NAMESPACE}")


def test_an_uninstall_that_cannot_let_jobs_go_deletes_nothing_and_can_be_forced(
    installer: Helm, helm: Helm, own_cluster: Cluster
) -> None:
    values = ("--set=jobs.enabled=true", "--set=jobs.gate=true")
    installer("install", str(CHART), "--create-namespace", *values)
    installer("uninstall", "--wait", "--timeout=120s")
    assert left(own_cluster) == sorted(CRD_NAMES), "the hook and its rights are gone as well"

    installer("install", str(CHART), *values)
    installer("upgrade", str(CHART), "--set=jobs.enabled=false", "--wait", "--timeout=120s")
    hooks = [item for item in yaml.safe_load_all(hooks_of(helm, own_cluster)) if item]
    at = {item["kind"]: item["metadata"]["annotations"]["helm.sh/hook"] for item in hooks}
    assert at.items() >= dict.fromkeys(("Job", "ClusterRole", "ServiceAccount"), "pre-upgrade,pre-delete").items()
    installer("upgrade", str(CHART), "--set=jobs.enabled=false")
    assert "pre-upgrade" not in hooks_of(helm, own_cluster), "nothing waits any more"
    installer("uninstall", "--wait", "--timeout=120s")

    installer("install", str(CHART), *values, "--set=nodeSelector.nowhere=here")
    with pytest.raises(HelmError, match=r"timed out|failed"):
        installer("upgrade", str(CHART), "--reuse-values", "--set=jobs.enabled=false,jobs.gate=false", "--timeout=5s")
    path = "jsonpath={.items[0].spec.template.spec.containers[0].env[?(@.name=='TILECAST_JOBS')].value}"
    assert own_cluster.kubectl("-n", NAMESPACE, "get", "deployments", "-o", path) == "true", "it answers jobs as before"
    with pytest.raises(HelmError, match=r"timed out|failed"):
        installer("uninstall", "--timeout=5s")
    assert "tilecast" in own_cluster.kubectl("-n", NAMESPACE, "get", "deployments", "-o", "name")
    roles = own_cluster.kubectl("get", "clusterroles", "-o", "name").split()
    assert not [name for name in roles if name.endswith("-release")], "rights go in any case"
    installer("uninstall", "--no-hooks", "--wait", "--timeout=120s")
    own_cluster.kubectl("-n", NAMESPACE, "delete", "job", "tilecast-release", "--ignore-not-found")
    own_cluster.kubectl("delete", "crd", *crds_of_today())


@pytest.mark.parametrize("earlier", EARLIER, ids=lambda chart: chart.stem)
def test_upgrade_from_every_release_and_back(installer: Helm, helm: Helm, own_cluster: Cluster, earlier: Path) -> None:
    """The CRDs come first, then the release. Stored objects survive the upgrade, the rollback and the uninstall."""
    installer("install", str(earlier), "--set=image.tag=theirs", "--create-namespace")
    with pytest.raises(HelmError, match=r"older than this chart's .* helm show crds"):
        installer("upgrade", str(CHART), "--reset-then-reuse-values")

    bring_crds(helm, own_cluster)
    own_cluster.kubectl("delete", "crd", "poollearnings.tilecast.dev")
    with pytest.raises(HelmError, match=r"poollearnings.tilecast.dev is not there.* helm show crds"):
        installer("upgrade", str(CHART), "--reset-then-reuse-values")
    bring_crds(helm, own_cluster)
    installer("upgrade", str(CHART), "--reset-then-reuse-values")
    image = "jsonpath={.spec.template.spec.containers[0].image}"
    assert own_cluster.kubectl("-n", NAMESPACE, "get", "deployment", "tilecast", "-o", image) == "tilecast:theirs"
    own_cluster.apply(json.dumps(JOB | {"spec": JOB["spec"] | NEWEST_FIELDS}))

    installer("upgrade", str(CHART), "--reset-then-reuse-values", "--set=jobs.enabled=true")
    installer("rollback", "2")
    assert stored_job(own_cluster)["spec"].items() >= NEWEST_FIELDS.items()
    # A release before 0.2.0 wrote the CRDs itself; Helm refuses to take them over instead of pruning fields.
    if "-0.1." in earlier.name:
        with pytest.raises(HelmError):
            installer("rollback", "1")
    else:
        installer("rollback", "1")
    assert stored_job(own_cluster)["spec"].items() >= NEWEST_FIELDS.items()

    installer("uninstall", "--wait", "--timeout=120s")
    assert stored_job(own_cluster)["spec"].items() >= NEWEST_FIELDS.items()
    own_cluster.kubectl("delete", "crd", *crds_of_today())


@pytest.mark.parametrize("older", SAME_VERSION, ids=lambda chart: chart.stem)
def test_older_crds_of_the_same_version_are_refused(
    installer: Helm, helm: Helm, own_cluster: Cluster, older: Path
) -> None:
    refusal = r"the CRD \w+\.tilecast\.dev lacks {}, which this chart needs\. Bring the CRDs first: helm show"
    installer("install", str(older), "--create-namespace")
    with pytest.raises(HelmError, match=refusal.format(r"the field (?:spec|status)\.\S+")):
        installer("upgrade", str(CHART), "--reset-then-reuse-values")
    installer("uninstall", "--wait", "--timeout=120s")
    with pytest.raises(HelmError, match=refusal.format(r"the field (?:spec|status)\.\S+")):
        installer("install", str(CHART))
    bring_crds(helm, own_cluster)
    path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/objective/enum"
    objectives = [name for name in OBJECTIVES if name != "cost"]
    patch = json.dumps([{"op": "replace", "path": path, "value": objectives}])
    own_cluster.kubectl("patch", "crd", "trainingjobs.tilecast.dev", "--type=json", "-p", patch)
    with pytest.raises(HelmError, match=refusal.format(r"the value cost of spec\.objective")):
        installer("install", str(CHART))
    bring_crds(helm, own_cluster)
    installer("install", str(CHART))
    installer("uninstall", "--wait", "--timeout=120s")
    own_cluster.kubectl("delete", "crd", *crds_of_today())


def test_an_upgrade_never_deletes_crds(installer: Helm, helm: Helm, own_cluster: Cluster) -> None:
    installer("install", str(RELEASES[0]), "--set=crds.keep=false", "--create-namespace")
    with pytest.raises(HelmError, match="kubectl annotate crd") as refused:
        installer("upgrade", str(CHART), "--reset-then-reuse-values")
    assert "would delete the CRD" in str(refused.value)
    own_cluster.kubectl("annotate", "crd", *crds_of(RELEASES[0]), "helm.sh/resource-policy=keep")
    bring_crds(helm, own_cluster)
    own_cluster.apply(json.dumps(JOB))
    installer("upgrade", str(CHART), "--reset-then-reuse-values")
    assert stored_job(own_cluster)["spec"]["model"] == JOB["spec"]["model"]
    installer("uninstall", "--wait", "--timeout=120s")
    own_cluster.kubectl("delete", "crd", *crds_of_today())


def bring_crds(helm: Helm, cluster: Cluster) -> None:
    crds = helm("show", "crds", str(CHART))
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=crds)


def stored_job(cluster: Cluster) -> dict[str, Any]:
    job: dict[str, Any] = json.loads(cluster.kubectl("get", "trainingjobs.tilecast.dev", "ours", "-o", "json"))
    return job


OBJECT_NAMES = ["gpupool.tilecast.dev/ours", "gpupool.tilecast.dev/t4", "trainingjob.tilecast.dev/ours"]
"""Objects that remain in the cluster; one of them is a pool discovered while `helm test` ran."""
CRD_NAMES = [f"customresourcedefinition.apiextensions.k8s.io/{name}" for name in crds_of_today()]
JOB = {
    "apiVersion": "tilecast.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "ours", "namespace": "default"},
    "spec": {
        "model": {"preset": "gpt2-xl"},
        "training": {"sequenceLength": 1024, "globalBatchSize": 64, "precision": "bf16"},
    },
}  # fmt: skip
NEWEST_FIELDS = {"targetRef": {"apiVersion": "batch/v1", "kind": "Job", "name": "ours"}}
"""Fields of a job's spec that the first releases lack."""
OBJECTS = f"""
apiVersion: tilecast.dev/v1alpha1
kind: GPUPool
metadata: {{name: ours}}
spec: {{nodeType: g4dn.12xlarge, maxNodes: 2}}
---
{json.dumps(JOB)}
"""


def left(cluster: Cluster) -> list[str]:
    """Return every object in the cluster whose name or kind is Tilecast's.

    The namespace, Events, and the APIServices that the API server makes of CRDs are left out.
    """
    kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    asked = ",".join(
        sorted(set(kinds) - {"apiservices.apiregistration.k8s.io", "events", "events.events.k8s.io", "namespaces"})
    )
    names = set(cluster.kubectl("get", asked, "--all-namespaces", "-o", "name").split())
    return sorted(name for name in names if "tilecast" in name)


def helm_test(installer: Helm, cluster: Cluster) -> None:
    """Run `helm test`, executing its pod's commands as the kubelet would, beside the operator of this checkout."""
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(installer, "test", "--timeout=120s")
        assert run_pod(cluster, "http://127.0.0.1:1") == "Failed"
        with pytest.raises(HelmError, match="tilecast-test"):
            refused.result()
        with Operator(cluster) as operator:
            passed = pool.submit(installer, "test", "--timeout=120s")
            assert run_pod(cluster, operator.url) == "Succeeded"
            assert "Succeeded" in passed.result()


def run_pod(cluster: Cluster, url: str) -> str:
    """Run the commands of the test's pod with the operator at `url`, and report their end to the API server."""

    def pod() -> dict[str, Any] | None:
        arguments = ["get", "pod", "tilecast-test", f"--namespace={NAMESPACE}", "--ignore-not-found", "-o", "json"]
        text = cluster.kubectl(*arguments)
        document: dict[str, Any] = json.loads(text) if text else {}
        return document if document.get("status", {}).get("phase") == "Running" else None

    service = f"http://tilecast.{NAMESPACE}.svc:8080"
    programs = {"python3": [sys.executable], "tilecast": [sys.executable, "-m", "tilecast"]}
    codes = []
    for container in wait_for(pod, "the test's pod", 120)["spec"]["containers"]:
        program, *arguments = (word.replace(service, url) for word in container["command"])
        done = subprocess.run([*programs[program], *arguments], capture_output=True, text=True, check=False)
        codes.append(done.returncode)
    phase = "Failed" if any(codes) else "Succeeded"
    patch = json.dumps({"status": {"phase": phase}})
    cluster.kubectl(
        "patch", "pod", "tilecast-test", f"--namespace={NAMESPACE}", "--subresource=status", "--type=merge", "-p", patch
    )
    return phase

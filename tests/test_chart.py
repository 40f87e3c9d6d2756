"""The chart, rendered and installed by the real helm into a real control plane."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster, ClusterError
from conftest import Helm, HelmError
from tilecast_operator.settings import Settings

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "tilecast"
NAMESPACE = "tilecast-system"


@pytest.fixture(scope="module")
def own_cluster(binaries: Path) -> Iterator[Cluster]:
    """Without CRDs: helm installs them here."""
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
    return [document for document in documents if document["kind"] == kind]


def crd_files() -> dict[str, dict[str, Any]]:
    documents = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
    return {document["metadata"]["name"]: document for document in documents}


def test_lint_finds_nothing(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("imge.tag=1", "imge"),
        ("image.tags=1", "tags"),
        ("crds.keep=maybe", "keep"),
        ("service.port=0", "port"),
        ("settings.TILECAST_WRITER=2", "TILECAST_WRITER"),
        ("resources.limit.memory=1Gi", "limit"),
    ],
)
def test_a_mistyped_value_is_refused_by_name(helm: Helm, setting: str, named: str) -> None:
    with pytest.raises(HelmError, match=named):
        rendered(helm, "--set", setting)


def test_crds_are_those_of_the_repository(helm: Helm) -> None:
    shown = {crd["metadata"]["name"]: crd for crd in of_kind(rendered(helm), "CustomResourceDefinition")}
    assert shown.keys() == crd_files().keys() >= {"trainingjobs.tilecast.dev", "gpupools.tilecast.dev"}
    for name, wanted in crd_files().items():
        assert shown[name]["spec"] == wanted["spec"]
        assert shown[name]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_crds_can_be_left_out_or_removed_with_the_release(helm: Helm) -> None:
    assert of_kind(rendered(helm, "--set", "crds.enabled=false"), "CustomResourceDefinition") == []
    for crd in of_kind(rendered(helm, "--set", "crds.keep=false"), "CustomResourceDefinition"):
        assert "annotations" not in crd["metadata"]


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
        ("authentication.k8s.io", "tokenreviews"): ["create"],
        ("", "configmaps"): ["get"],
        ("apiextensions.k8s.io", "customresourcedefinitions"): ["list", "watch"],
        ("tilecast.dev", "trainingjobs"): ["list", "patch", "watch"],
        ("tilecast.dev", "trainingjobs/status"): ["patch"],
        ("tilecast.dev", "gpupools"): ["create", "delete", "list", "patch", "watch"],
        ("tilecast.dev", "gpupools/status"): ["patch"],
    }


MONITORING = [f"--set={name}.enabled=true" for name in ("serviceMonitor", "podMonitor", "prometheusRule")]
OPERATED = "--api-versions=monitoring.coreos.com/v1"


def test_monitors_and_rules_appear_where_something_reads_them(helm: Helm) -> None:
    kinds = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert not kinds & {document["kind"] for document in rendered(helm, *MONITORING)}
    assert not kinds & {document["kind"] for document in rendered(helm, OPERATED)}
    shown = rendered(helm, *MONITORING, OPERATED, "--set=prometheusRule.runbooks=https://example.org/runbooks")
    assert kinds <= {document["kind"] for document in shown}
    (found,) = of_kind(shown, "PrometheusRule")
    (file,) = (CHART / "rules").iterdir()
    wanted = file.read_text().replace("docs/runbooks.md", "https://example.org/runbooks")
    assert found["spec"] == yaml.safe_load(wanted)
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
    (found,) = of_kind(rendered(helm, "--set=dashboards.enabled=true"), "ConfigMap")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    shown = {name: json.loads(text) for name, text in found["data"].items()}
    files = {f"tilecast-{path.name}": json.loads(path.read_text()) for path in (CHART / "dashboards").iterdir()}
    assert shown == files


def test_the_network_policy_lets_in_what_it_must_and_names_the_pods(helm: Helm) -> None:
    assert of_kind(rendered(helm), "NetworkPolicy") == []
    shown = rendered(helm, "--set=networkPolicy.enabled=true", "--set=networkPolicy.egressPorts={8443}")
    (policy,), (deployment,) = of_kind(shown, "NetworkPolicy"), of_kind(shown, "Deployment")
    pod = deployment["spec"]["template"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    names = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == names
    assert {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]} == {53, 8443}


def test_tokens_can_be_kept_from_it(helm: Helm) -> None:
    (role,) = of_kind(rendered(helm, "--set", "observations.reviewTokens=false"), "ClusterRole")
    assert not any("tokenreviews" in rule["resources"] for rule in role["rules"])


def test_the_configuration_of_kube_state_metrics_is_there_when_asked_for(helm: Helm) -> None:
    assert of_kind(rendered(helm), "ConfigMap") == []
    (found,) = of_kind(rendered(helm, "--set", "kubeStateMetrics.configMap=true"), "ConfigMap")
    text = (CHART / "files" / "custom-resource-state.yaml").read_text()
    assert found["data"]["custom-resource-state.yaml"] == text


def test_config_maps_can_be_kept_from_it(helm: Helm) -> None:
    (role,) = of_kind(rendered(helm, "--set", "rbac.readConfigMaps=false"), "ClusterRole")
    assert not any("configmaps" in rule["resources"] for rule in role["rules"])
    documents = rendered(helm, "--set", "rbac.configMapNamespaces={team-a,team-b}")
    assert not any("configmaps" in rule["resources"] for rule in of_kind(documents, "ClusterRole")[0]["rules"])
    for kind in ("Role", "RoleBinding"):
        assert [item["metadata"]["namespace"] for item in of_kind(documents, kind)] == ["team-a", "team-b"]
    assert of_kind(documents, "Role")[0]["rules"] == [
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}
    ]


@pytest.mark.parametrize(
    ("values", "resource", "verbs", "variable"),
    [
        (["discovery.enabled=false"], ("tilecast.dev", "gpupools"), ["list", "watch"], "TILECAST_DISCOVERY=false"),
        (["capacity.readPods=true"], ("", "pods"), ["list", "watch"], "TILECAST_READ_PODS=true"),
        (["jobs.enabled=true"], ("batch", "jobs"), ["get", "list", "watch", "patch"], "TILECAST_JOBS=true"),
        (
            ["jobs.enabled=true", "jobs.place=true", "capacity.readKueue=true"],
            ("kueue.x-k8s.io", "workloads"),
            ["list", "patch"],
            "TILECAST_PLACE=true",
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
    assert variable in [f"{item['name']}={item['value']}" for item in container["env"]]


def test_jobs_are_placed_only_where_they_are_advised(helm: Helm) -> None:
    (role,) = of_kind(rendered(helm), "ClusterRole")
    assert not {"jobs", "jobsets", "workloads"} & {name for rule in role["rules"] for name in rule["resources"]}
    for value in ("jobs.place=true", "jobs.gate=true"):
        with pytest.raises(HelmError, match="/jobs/enabled"):
            rendered(helm, "--set", value)


@pytest.mark.parametrize("version", ["v1", "v1beta1", None])
def test_the_gate_is_put_on_only_where_the_api_server_can(helm: Helm, version: str | None) -> None:
    kind = "MutatingAdmissionPolicy"
    values = ["--set", "jobs.enabled=true,jobs.gate=true"]
    served = [f"--api-versions=admissionregistration.k8s.io/{version}/{kind}"] if version else []
    found = of_kind(rendered(helm, *values, *served), kind)
    assert [item["apiVersion"] for item in found] == ([f"admissionregistration.k8s.io/{version}"] if version else [])
    assert not of_kind(rendered(helm, *served), kind)


@pytest.mark.parametrize(("api", "is_read"), [("kueue.x-k8s.io/v1beta1", True), ("kueue.x-k8s.io/v1", False)])
def test_kueue_is_read_where_the_cluster_serves_it(helm: Helm, api: str, is_read: bool) -> None:
    (role,) = of_kind(rendered(helm, f"--api-versions={api}"), "ClusterRole")
    assert any("clusterqueues" in rule["resources"] for rule in role["rules"]) == is_read


def test_a_model_of_ones_own_is_mounted_with_its_digest(helm: Helm) -> None:
    digest = "ab" * 32
    documents = rendered(helm, "--set", "model.configMap=ours", "--set", f"model.sha256={digest}")
    spec = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]
    environment = {item["name"]: item["value"] for item in spec["containers"][0]["env"]}
    assert environment["TILECAST_UTILIZATION_MODEL"] == "/models/utilization.onnx"
    assert environment["TILECAST_UTILIZATION_MODEL_SHA256"] == digest
    assert {"name": "model", "configMap": {"name": "ours"}} in spec["volumes"]


BY_VALUES = (
    "TILECAST_LISTEN_", "TILECAST_DISCOVERY", "TILECAST_READ_", "TILECAST_UTILIZATION_MODEL", "TILECAST_JOBS",
    "TILECAST_PLACE",
)  # fmt: skip
"""Settings that values of their own give, together with the rights or the volume they need."""


def test_the_values_offer_every_setting_of_the_operator_but_its_address() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]["properties"]
    kinds = {"int": "integer", "float": "number", "str": "string"}
    assert schema == {
        setting.metadata["name"]: {"type": kinds[str(setting.type)], "description": setting.metadata["text"]}
        for setting in fields(Settings)
        if not setting.metadata["name"].startswith(BY_VALUES)
    }


def test_the_service_is_not_taken_for_settings(helm: Helm) -> None:
    # A Service named tilecast gives every pod beside it TILECAST_PORT and its kin.
    (deployment,) = of_kind(rendered(helm), "Deployment")
    assert deployment["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_rendered_objects_satisfy_the_api_servers_own_schemas(
    helm: Helm, chart_tools: Path, own_cluster: Cluster, tmp_path: Path
) -> None:
    documents = rendered(helm)
    for api_version, kind in {(document["apiVersion"], document["kind"]) for document in documents}:
        group, _, version = api_version.rpartition("/")
        path = f"{tmp_path}/{group or version}_{version}_{kind.lower()}.json"
        Path(path).write_text(json.dumps(schema_of(own_cluster, group, version, kind)))
    command = [
        str(chart_tools / "kubeconform"),
        "-strict",
        "-summary",
        "-output=json",
        f"-schema-location={tmp_path}/{{{{ .Group }}}}_{{{{ .ResourceAPIVersion }}}}_{{{{ .ResourceKind }}}}.json",
    ]

    def verdict(objects: list[dict[str, Any]]) -> dict[str, Any]:
        text = yaml.safe_dump_all(objects)
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    good = verdict(documents)
    assert good["summary"] == {"valid": len(documents), "invalid": 0, "errors": 0, "skipped": 0}, good

    (deployment,) = of_kind(documents, "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    assert "imagePullPolice" in json.dumps(verdict([deployment]))


def schema_of(cluster: Cluster, group: str, version: str, kind: str) -> dict[str, Any]:
    """The JSON schema that the API server publishes for a kind, closed against unknown keys."""
    path = f"/openapi/v3/apis/{group}/{version}" if group else f"/openapi/v3/api/{version}"
    components: dict[str, Any] = json.loads(cluster.kubectl("get", "--raw", path))["components"]
    wanted = {"group": group, "version": version, "kind": kind}
    (name,) = (
        name
        for name, schema in components["schemas"].items()
        if wanted in schema.get("x-kubernetes-group-version-kind", [])
    )
    for schema in components["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return {"$ref": f"#/components/schemas/{name}", "components": components}


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
    assert container["env"][-2:] == [
        {"name": "TILECAST_ADVICE_CACHE", "value": "2000000"},
        {"name": "TILECAST_NODE_SELECTOR", "value": "gpu"},
    ]

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

    installer("uninstall", "--wait", "--timeout=120s")
    left = own_cluster.kubectl("get", "all,serviceaccounts,clusterroles,clusterrolebindings,crds", "-A", "-o", "name")
    ours = sorted(name for name in left.split() if "tilecast" in name)
    prefix = "customresourcedefinition.apiextensions.k8s.io/"
    assert ours == sorted(prefix + name for name in crd_files()), "uninstall must leave the CRDs and nothing else"

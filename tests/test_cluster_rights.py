"""The operator's rights: its requests to a real API server use exactly what the chart's role grants."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import witness
from bearer_tokens import token
from cluster import Cluster, wait_for
from conftest import Helm
from operator_process import Operator, is_answered
from test_chart import of_kind
from test_cluster_pools import kueue_crd
from tilecast_operator.objects.documents import ADVICE_KEYS

pytestmark = pytest.mark.cluster

ANSWER_S = 60
QUICK = dict.fromkeys((f"TILECAST_{name}SETTLE_SECONDS" for name in ("", "CAPACITY_", "CALIBRATE_")), "0.1")

MODES: Mapping[str, tuple[str, ...]] = {
    "as installed": (),
    "reading least": ("rbac.readConfigMaps=false", "discovery.enabled=false", "observations.reviewTokens=false"),
    "reading most": ("capacity.readPods=true", "capacity.readKueue=true", "discovery.readResourceSlices=true"),
}
"""Values of the chart that change the operator's rights."""


@pytest.fixture(scope="module")
def begin(bare_cluster: Cluster) -> int:
    """Return the position in the audit log before this file's tests; earlier tests may have logged injected faults."""
    return witness.mark(bare_cluster)


@pytest.fixture(scope="module")
def cluster(bare_cluster: Cluster, begin: int) -> Iterator[Cluster]:
    for kind in ("ClusterQueue", "ResourceFlavor"):
        bare_cluster.apply(json.dumps(kueue_crd(kind)))
    bare_cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
    yield bare_cluster
    bare_cluster.kubectl("delete", "crd", "clusterqueues.kueue.x-k8s.io", "resourceflavors.kueue.x-k8s.io")


def granted(documents: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Return group, resource and verb of every right in the rendered roles, except those of tenants."""
    return {
        (group, resource, verb)
        for kind in ("ClusterRole", "Role")
        for document in of_kind(documents, kind)
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def observed(cluster: Cluster, since: int) -> set[tuple[str, str, str]]:
    """Return group, resource and verb of every right that was used."""
    verbs = set()
    for entry in witness.of_the_operator(cluster, since):
        asked = (entry["objectRef"].get("apiGroup", ""), witness.resource(entry))
        verbs.add((*asked, entry["verb"]))
        # A server-side apply that creates the object needs the right to create it.
        if entry["verb"] == "patch" and entry["responseStatus"]["code"] == 201:
            verbs.add((*asked, "create"))
    return verbs


def refused(cluster: Cluster, since: int) -> list[str]:
    return [
        f"{entry['verb']} {witness.resource(entry)}"
        for entry in witness.of_the_operator(cluster, since)
        if entry["annotations"]["authorization.k8s.io/decision"] != "allow"
    ]


def job(name: str, model: Mapping[str, Any]) -> dict[str, Any]:
    training = {"sequenceLength": 1024, "globalBatchSize": 64, "precision": "fp16"}
    return {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": model, "training": training},
    }


def get(cluster: Cluster, kind: str, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        cluster.kubectl("get", kind, name, "-o", "json", "--ignore-not-found") or "{}"
    )
    return document


def answered(cluster: Cluster, name: str) -> bool:
    return is_answered(get(cluster, "tjob", name))


def pool_is_ready(cluster: Cluster, name: str) -> bool:
    document = get(cluster, "gpupool", name).get("status", {}).get("conditions", ())
    return any(item["type"] == "Ready" and item["status"] == "True" for item in document)


OWN_POOL = {
    "apiVersion": "tilecast.dev/v1alpha1",
    "kind": "GPUPool",
    "metadata": {"name": "own"},
    "spec": {"selector": {"node.kubernetes.io/instance-type": "p4de.24xlarge"}, "price": {"perGpuHour": 1.0}},
}


def report_a_step(operator: Operator) -> None:
    """Report a step as a training pod does, but with a forged token."""
    headers = {"Authorization": f"Bearer {token('default', exp=time.time() + 600)}", "Content-Type": "application/json"}
    body = json.dumps({"stepSeconds": 1.0, "samples": 10}).encode()
    asked = urllib.request.Request(f"{operator.url}/observations/default/a", body, headers, method="PUT")  # noqa: S310
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=30)


@pytest.mark.parametrize("mode", MODES)
def test_every_right_is_used_and_none_is_lacking(cluster: Cluster, helm: Helm, tmp_path: Path, mode: str) -> None:
    rendered = list(filter(None, yaml.safe_load_all(witness.rendered(helm, *MODES[mode]))))
    (deployment,) = (document for document in rendered if document["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    settings = {item["name"]: item.get("value", "127.0.0.1") for item in container["env"]} | QUICK
    cluster.kubectl("delete", "lease", "tilecast", f"--namespace={witness.NAMESPACE}", "--ignore-not-found")
    cluster.kubectl("delete", "trainingjobs,gpupools,poollearnings,events", "--all")
    account = witness.account_kubeconfig(cluster, helm, tmp_path / "kubeconfig.yaml", *MODES[mode])
    since = witness.mark(cluster)
    with Operator(cluster, account, settings) as operator:
        discovers = settings["TILECAST_DISCOVERY"] == "true"
        if discovers:
            wait_for(partial(pool_is_ready, cluster, "a100-80"), "a discovered pool", ANSWER_S)
        for document in (job("a", {"preset": "gpt2"}), job("b", {"huggingFace": {"configMapKeyRef": {"name": "m"}}})):
            cluster.apply(json.dumps(document))
        wait_for(partial(answered, cluster, "a"), "an answer", ANSWER_S)
        wait_for(partial(answered, cluster, "b"), "an answer", ANSWER_S)
        step_s = get(cluster, "tjob", "a")["status"]["recommendation"]["stepSeconds"]["target"]
        cluster.kubectl("annotate", "tjob", "a", f"tilecast.dev/observed-step-seconds={step_s}")
        wait_for(lambda: cluster.kubectl("get", "poollearnings", "-o", "name"), "a run to be kept", ANSWER_S)
        cluster.apply(json.dumps(OWN_POOL))
        wait_for(partial(pool_is_ready, cluster, "own"), "a word on the user's pool", ANSWER_S)
        if discovers:
            wait_for(lambda: not get(cluster, "gpupool", "a100-80"), "the discovered pool to go", ANSWER_S)
        cluster.kubectl("patch", "tjob", "a", "--type=merge", "-p", '{"spec":{"mode":"Off"}}')
        wait_for(partial(answered, cluster, "a"), "an answer", ANSWER_S)
        report_a_step(operator)
        # Secondary watches may start a little later.
        wait_for(lambda: granted(rendered) <= observed(cluster, since), "every right to be used", ANSWER_S)
        assert operator.get("/healthz") == "ok"
    denied = set(refused(cluster, since))
    # It learns that a request for one job or one report is forbidden by making it, and reports that there.
    least = {("", "configmaps", "get"), ("authentication.k8s.io", "tokenreviews", "create")}
    assert denied == ({f"{verb} {resource}" for _, resource, verb in least} if mode == "reading least" else set())
    assert observed(cluster, since) - (least if denied else set()) == granted(rendered)


def test_advice_is_all_that_is_ever_written(cluster: Cluster, begin: int) -> None:
    """This covers every operator of this file."""
    asked = [entry for entry in witness.of_the_operator(cluster, begin) if entry["verb"] in witness.WRITING]
    # A TokenReview is created for its answer only; it is never stored.
    written = [entry for entry in asked if witness.resource(entry) != "tokenreviews"]
    assert {witness.resource(entry) for entry in written} == {
        "trainingjobs",
        "trainingjobs/status",
        "gpupools",
        "gpupools/status",
        "poollearnings",
        "events",
        "leases",
    }
    for entry in written:
        match witness.resource(entry), entry["verb"]:
            case "trainingjobs", verb:
                applied = entry["requestObject"]
                assert verb == "patch"
                assert applied.keys() == {"apiVersion", "kind", "metadata"}
                assert applied["metadata"].keys() <= {"name", "namespace", "uid", "resourceVersion", "annotations"}
                assert applied["metadata"]["annotations"].keys() <= set(ADVICE_KEYS)
            case "trainingjobs/status" | "gpupools/status", verb:
                assert verb == "patch"
            case "events", verb:
                assert verb == "create"
            case "leases", verb:
                assert verb in ("create", "update")
                assert (entry["objectRef"]["namespace"], entry["objectRef"]["name"]) == (witness.NAMESPACE, "tilecast")
            case "poollearnings", verb:
                assert verb == "patch"
            case "gpupools", verb:
                assert verb in ("patch", "delete")

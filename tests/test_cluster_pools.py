"""GPUPools on a real API server: discovered, adopted, withdrawn; and free GPUs by Kueue, pods and DRA."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster, ClusterError, wait_for
from conftest import Helm
from operator_process import Operator, is_answered
from test_crds import FACTS, FAILING, PASSING
from tilecast.api import gpu_pool, model_source, training, training_job
from tilecast.api.base import ApiModel
from tilecast.api.gpu_pool import DISCOVERED
from witness import account_kubeconfig

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
VALUES = ("capacity.readPods=true", "capacity.readKueue=true", "discovery.readResourceSlices=true", "jobs.enabled=true")
SETTINGS = {
    "TILECAST_READ_PODS": "true",
    "TILECAST_READ_KUEUE": "true",
    "TILECAST_READ_RESOURCE_SLICES": "true",
    "TILECAST_JOBS": "true",
    "TILECAST_CAPACITY_SETTLE_SECONDS": "0.2",
    "TILECAST_POOL_RETENTION_SECONDS": "5",
}
WAIT_S = 60


@pytest.fixture(scope="module")
def own_cluster(binaries: Path) -> Iterator[Cluster]:
    """Yield a separate cluster, in which nodes, quotas and pods come and go."""
    with Cluster(nodes=ROOT / "examples" / "clusters" / "mixed.yaml") as started:
        started.apply(ROOT / "crds")
        started.apply("\n---\n".join(yaml.safe_dump(kueue_crd(kind)) for kind in ("ClusterQueue", "ResourceFlavor")))
        started.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        yield started


def kueue_crd(kind: str) -> dict[str, Any]:
    """Return a CRD for a kind of Kueue, with only the parts that are read here."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.kueue.x-k8s.io",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {"group": "kueue.x-k8s.io", "scope": "Cluster", "names": names, "versions": [version]},
    }


@pytest.fixture(scope="module")
def operator(own_cluster: Cluster, helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Yield an operator with the rights that the chart grants for `VALUES`, and no more."""
    path = account_kubeconfig(own_cluster, helm, tmp_path_factory.mktemp("account") / "kubeconfig.yaml", *VALUES)
    with Operator(own_cluster, path, SETTINGS) as started:
        yield started
        log = started.log_tail(100_000)
        assert "forbidden" not in log and "Traceback" not in log


def get(cluster: Cluster, kind: str, name: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(cluster.kubectl("get", kind, name, "--show-managed-fields", "-o", "json"))
    except ClusterError:
        return {}
    return document


def until(cluster: Cluster, name: str, holds: Callable[[dict[str, Any]], Any], kind: str = "gpupool") -> dict[str, Any]:
    """Return the object once `holds` is true of it."""

    def probe() -> dict[str, Any] | None:
        document = get(cluster, kind, name)
        return (document or {"gone": True}) if holds(document) else None

    return wait_for(probe, f"{kind} {name}", WAIT_S)


def reason(document: dict[str, Any], kind: str) -> str:
    conditions = document.get("status", {}).get("conditions", [])
    return next((str(item["reason"]) for item in conditions if item["type"] == kind), "")


def job(name: str, **spec: Any) -> str:
    training = {"sequenceLength": 1024, "globalBatchSize": 64, "precision": "fp16"}
    spec = {"model": {"preset": "gpt2"}, "training": training, **spec}
    metadata = {"name": name}
    return yaml.safe_dump(
        {"apiVersion": "tilecast.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}
    )


def test_pools_are_discovered_with_the_chart_s_rights(own_cluster: Cluster, operator: Operator) -> None:
    for name, nodes in (("h100-sxm", 2), ("a100-80", 4), ("l4", 4), ("t4", 4)):
        gpu_pool = until(own_cluster, name, lambda pool: "nodes" in pool.get("status", {}))
        assert gpu_pool["status"]["nodes"] == gpu_pool["spec"]["maxNodes"] == nodes
        assert gpu_pool["metadata"]["labels"] == {DISCOVERED: "true"} and "finalizers" not in gpu_pool["metadata"]
        managers = [item["manager"] for item in gpu_pool["metadata"]["managedFields"]]
        assert set(managers) == {"tilecast-advisor"}
    head, *rows = own_cluster.kubectl("get", "gpupools").strip().splitlines()
    assert head.split() == ["NAME", "GPU", "NODES", "LINK", "PRICE", "FREE", "ORIGIN", "REASON", "AGE"]
    assert len(rows) == 4


def test_a_user_takes_a_pool_over_and_hands_it_back(own_cluster: Cluster, operator: Operator) -> None:
    price = json.dumps({"spec": {"price": {"perGpuHour": 1.25}}})
    own_cluster.kubectl("patch", "gpupool", "l4", "--type=merge", "-p", price)
    gpu_pool = until(own_cluster, "l4", lambda pool: pool["status"]["summary"].get("origin") == "User")
    assert gpu_pool["status"]["facts"]["price"] == {"value": "1.25 USD", "layer": "override"}
    spec = gpu_pool["spec"]
    own_cluster.kubectl("delete", "node", "-l", "node.kubernetes.io/instance-type=g6.48xlarge", "--wait=true")
    gpu_pool = until(own_cluster, "l4", lambda pool: pool["status"]["nodes"] == 0)
    assert gpu_pool["spec"] == spec, "discovery does not write it any more"
    own_cluster.kubectl("delete", "gpupool", "l4")
    nodes = [
        item for item in mixed() if item["metadata"]["labels"]["node.kubernetes.io/instance-type"] == "g6.48xlarge"
    ]
    own_cluster.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": nodes}))
    gpu_pool = until(own_cluster, "l4", lambda pool: pool.get("status", {}).get("nodes") == 4)
    assert gpu_pool["status"]["summary"]["origin"] == "Discovered" and "price" not in gpu_pool["spec"]


def mixed() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = yaml.safe_load((ROOT / "examples" / "clusters" / "mixed.yaml").read_text())["items"]
    for item in items:
        item["metadata"].pop("creationTimestamp", None)
    return items


def test_a_pool_without_nodes_is_priced_and_forgotten_in_time(own_cluster: Cluster, operator: Operator) -> None:
    own_cluster.kubectl("delete", "node", "-l", "node.kubernetes.io/instance-type=g4dn.12xlarge", "--wait=true")
    asleep = until(own_cluster, "t4", lambda pool: reason(pool, "Ready") == "NoNodesNow")
    assert asleep["status"]["facts"]["gpu"] == {"value": "t4", "layer": "discovered"}
    until(own_cluster, "t4", lambda pool: not pool)


def test_a_users_pool_ends_the_discovered_one(own_cluster: Cluster, operator: Operator) -> None:
    mine = {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "GPUPool",
        "metadata": {"name": "ours"},
        "spec": {"selector": {"node.kubernetes.io/instance-type": "p4de.24xlarge"}, "maxNodes": 8},
    }
    own_cluster.apply(json.dumps(mine))
    until(own_cluster, "a100-80", lambda pool: not pool)
    assert until(own_cluster, "ours", lambda pool: "status" in pool)["status"]["nodes"] == 4
    own_cluster.kubectl("delete", "gpupool", "ours")
    until(own_cluster, "a100-80", lambda pool: pool.get("status", {}).get("nodes") == 4)


CLAIMING = """
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: big}
spec:
  selectors:
    - cel:
        expression: device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == "gpu"
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: gpus, namespace: default}
spec:
  spec:
    devices:
      requests:
        - name: trainer
          firstAvailable:
            - name: blackwell
              deviceClassName: big
              count: 4
              selectors: [{cel: {expression: 'device.attributes["gpu.nvidia.com"].productName.contains("B200")'}}]
            - name: large
              deviceClassName: big
              count: 4
              selectors:
                - cel:
                    expression: device.attributes["gpu.nvidia.com"].productName.lowerAscii().contains("h200")
---
apiVersion: batch/v1
kind: Job
metadata: {name: claiming, namespace: default}
spec:
  suspend: true
  template:
    spec:
      restartPolicy: Never
      resourceClaims: [{name: gpus, resourceClaimTemplateName: gpus}]
      containers: [{name: train, image: registry.example/train:1, resources: {claims: [{name: gpus}]}}]
---
apiVersion: tilecast.dev/v1alpha1
kind: TrainingJob
metadata: {name: claiming, namespace: default}
spec:
  model: {preset: gpt2}
  training: {sequenceLength: 1024, globalBatchSize: 64, precision: fp16}
  targetRef: {apiVersion: batch/v1, kind: Job, name: claiming}
"""


def test_resource_slices_name_gpus_that_no_label_does(own_cluster: Cluster, operator: Operator) -> None:
    bare = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "dra-1"}}
    own_cluster.apply(json.dumps(bare))
    device = {"type": {"string": "gpu"}, "productName": {"string": "NVIDIA H200"}}
    slices = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "dra-1-gpus"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": "dra-1",
            "pool": {"name": "dra-1", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"gpu-{index}", "attributes": device} for index in range(8)],
        },
    }
    own_cluster.apply(json.dumps(slices))
    item = until(own_cluster, "h200", lambda pool: pool.get("status", {}).get("nodes") == 1)
    assert item["status"]["facts"]["gpu"] == {"value": "h200", "layer": "resource-slice"}
    own_cluster.apply(CLAIMING)
    job = until(own_cluster, "claiming", lambda item: item and is_answered(item), "tjob")
    best, rejected = job["status"]["recommendation"], {row["pool"]: row["code"] for row in job["status"]["rejected"]}
    assert best["pool"] == "h200" and best["deviceRequests"] == ["gpus/trainer/large"]
    assert "gpus/trainer/large" in best["reason"]
    assert set(rejected.values()) == {"ClaimNotMet"} and "l4" in rejected
    own_cluster.kubectl(
        "delete", "trainingjob/claiming", "job/claiming", "resourceclaimtemplate/gpus", "deviceclass/big"
    )
    own_cluster.kubectl("delete", "resourceslice", "dra-1-gpus")
    own_cluster.kubectl("delete", "node", "dra-1")
    until(own_cluster, "h200", lambda pool: not pool)


def test_pods_and_then_kueue_say_what_is_free(own_cluster: Cluster, operator: Operator) -> None:
    gpu_pool = until(own_cluster, "h100-sxm", lambda pool: pool["status"]["gpus"].get("free") == 16)
    assert reason(gpu_pool, "CapacityKnown") == "Pods"
    own_cluster.apply(job("free", constraints={"gpus": 16, "allowedPools": ["h100-sxm"]}))
    fits = until(own_cluster, "free", lambda item: reason(item, "CapacityAvailable") == "GpusFree", "tjob")
    assert fits["status"]["recommendation"]["fitsNow"] is True
    node = json.loads(
        own_cluster.kubectl("get", "node", "-l", "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3", "-o", "json")
    )
    limits = {"nvidia.com/gpu": "4"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "busy"},
        "spec": {
            "nodeName": node["items"][0]["metadata"]["name"],
            "containers": [{"name": "c", "image": "none", "resources": {"limits": limits}}],
        },
    }
    own_cluster.apply(json.dumps(pod))
    until(own_cluster, "h100-sxm", lambda pool: pool["status"]["gpus"].get("free") == 12)
    busy = until(own_cluster, "free", lambda item: reason(item, "CapacityAvailable") == "GpusInUse", "tjob")
    assert busy["status"]["inputsHash"] == fits["status"]["inputsHash"]
    assert busy["status"]["recommendation"]["stepSeconds"] == fits["status"]["recommendation"]["stepSeconds"]

    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    quota = {"name": "nvidia.com/gpu", "nominalQuota": "24"}
    used = {"name": "nvidia.com/gpu", "total": "2"}
    for document in (
        {"kind": "ResourceFlavor", "metadata": {"name": "h100"}, "spec": {"nodeLabels": labels}},
        {
            "kind": "ClusterQueue",
            "metadata": {"name": "team"},
            "spec": {"resourceGroups": [{"flavors": [{"name": "h100", "resources": [quota]}]}]},
            "status": {"flavorsReservation": [{"name": "h100", "resources": [used]}]},
        },
    ):
        own_cluster.apply(json.dumps({"apiVersion": "kueue.x-k8s.io/v1beta1", **document}))
    gpu_pool = until(own_cluster, "h100-sxm", lambda pool: pool["status"]["gpus"].get("free") == 22)
    assert reason(gpu_pool, "CapacityKnown") == "Kueue" and gpu_pool["status"]["kueueFlavor"] == "h100"
    until(own_cluster, "free", lambda item: reason(item, "CapacityAvailable") == "GpusFree", "tjob")


def test_a_started_job_keeps_its_forecast(own_cluster: Cluster, operator: Operator) -> None:
    own_cluster.apply(job("running"))
    before = until(own_cluster, "running", lambda item: item and is_answered(item), "tjob")
    own_cluster.kubectl("annotate", "tjob", "running", "tilecast.dev/started=2026-05-01T12:00:00Z")
    frozen = until(own_cluster, "running", lambda item: "forecast" in item["status"], "tjob")
    assert frozen["status"]["forecast"] == {"frozenAt": "2026-05-01T12:00:00Z"}
    assert frozen["status"]["inputsHash"] == before["status"]["inputsHash"]


def test_unknown_accelerators_are_reported(own_cluster: Cluster, operator: Operator) -> None:
    gpus = {"nvidia.com/gpu": "8"}
    strange = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "strange", "labels": {"nvidia.com/gpu.product": "NVIDIA-Z900"}},
        "status": {"capacity": gpus, "allocatable": gpus},
    }
    own_cluster.kubectl("create", "-f", "-", input=json.dumps(strange))

    def unknown_gpu_events() -> list[dict[str, Any]]:
        events = json.loads(own_cluster.kubectl("get", "events", "--namespace=default", "-o", "json"))["items"]
        return [item for item in events if item["reason"] == "UnknownAccelerator"]

    (event,) = wait_for(unknown_gpu_events, "an Event about the node", WAIT_S)
    assert event["involvedObject"]["name"] == "strange" and "Z900" in event["message"]
    assert 'tilecast_unknown_accelerator_nodes{reason="UnknownAccelerator"} 1.0' in operator.get("/metrics")


PLACES: dict[type[ApiModel], tuple[str, str]] = {
    model_source.Transformer: ("TrainingJob", "model.transformer"),
    model_source.ModelSource: ("TrainingJob", "model"),
    model_source.HuggingFace: ("TrainingJob", "model.huggingFace"),
    training.Training: ("TrainingJob", "training"),
    training.BatchRange: ("TrainingJob", "training.globalBatchSizeRange"),
    training_job.JobBaseline: ("TrainingJob", "baseline"),
    training_job.JobConstraints: ("TrainingJob", "constraints"),
    training_job.TargetRef: ("TrainingJob", "targetRef"),
    training_job.TrainingJobSpec: ("TrainingJob", ""),
    gpu_pool.Rates: ("GPUPool", "gpu.facts.peakTflops"),
    gpu_pool.GpuSource: ("GPUPool", "gpu"),
    gpu_pool.Price: ("GPUPool", "price"),
    gpu_pool.GPUPoolSpec: ("GPUPool", ""),
}
"""Kind and field path at which each model with rules occurs."""
AROUND: dict[str, dict[str, Any]] = {
    "model": {"preset": "gpt2"},
    "training": {"globalBatchSize": 8},
    "gpu": {"name": "new"},
    "gpu.facts": FACTS,
}
"""Fields that must stand beside a sample to make it valid, by path."""


def inside(model: type[ApiModel], sample: dict[str, Any]) -> dict[str, Any]:
    """Return a whole object that contains a sample."""
    kind, path = PLACES[model]
    spec: dict[str, Any] = {"model": AROUND["model"], "training": AROUND["training"]} if kind == "TrainingJob" else {}
    parts = path.split(".") if path else []
    if parts[:1] == ["model"]:
        spec["model"] = {}
    at = spec
    for index, part in enumerate(parts[:-1]):
        beside = {} if part == "model" else AROUND.get(".".join(parts[: index + 1]), {})
        at[part] = {**beside, **at.get(part, {})}
        at = at[part]
    if parts:
        at[parts[-1]] = sample
    else:
        spec = sample
    if kind == "GPUPool" and path:
        spec.setdefault("nodeType", "p5.48xlarge")
    return {"apiVersion": "tilecast.dev/v1alpha1", "kind": kind, "metadata": {"name": "sample"}, "spec": spec}


RULES = [(model, index) for model in PASSING for index in range(len(model.rules))]


@pytest.mark.parametrize(("model", "index"), RULES, ids=[f"{model.__name__}-{index}" for model, index in RULES])
def test_the_api_server_knows_every_rule(own_cluster: Cluster, model: type[ApiModel], index: int) -> None:
    def create(sample: dict[str, Any]) -> str:
        document = json.dumps(inside(model, {key: value for key, value in sample.items() if value is not None}))
        return own_cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", input=document)

    assert "sample" in create(PASSING[model])
    with pytest.raises(ClusterError) as caught:
        create({**PASSING[model], **FAILING[model][index]})
    assert model.rules[index].problem in str(caught.value)

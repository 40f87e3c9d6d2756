"""The operator as a process, with the chart's own rights, against a real API server."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import witness
from cluster import Cluster, ClusterError, wait_for
from conftest import Helm
from operator_process import Operator, is_answered

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
JOBS = ROOT / "examples" / "jobs"
PREFIX = "tilecast.dev/"
ANNOTATIONS = (
    "recommended-node-type",
    "recommended-pool",
    "recommended-node-selector",
    "recommended-gpus",
    "recommended-parallelism",
    "predicted-step-seconds",
    "prediction-confidence",
    "advice-hash",
)


def job_document(name: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the example of the README under another name; `changes` maps dotted paths to values."""
    document: dict[str, Any] = yaml.safe_load((JOBS / "llama-7b-pretrain.yaml").read_text())
    document["metadata"]["name"] = name
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        node = document
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return document


def get(cluster: Cluster, kind: str, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(cluster.kubectl("get", kind, name, "-o", "json"))
    return document


def answered(cluster: Cluster, name: str) -> dict[str, Any]:
    """Return the job, once the operator has answered its current generation."""

    def probe() -> dict[str, Any] | None:
        job = get(cluster, "trainingjob", name)
        return job if is_answered(job) else None

    return wait_for(probe, f"an answer to {name}", timeout_s=60)


def condition(job: dict[str, Any], kind: str) -> dict[str, str]:
    (entry,) = (item for item in job["status"]["conditions"] if item["type"] == kind)
    return dict(entry)


def writes(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    """Return the audited writes to the job of that name, including refused and empty ones."""
    if not cluster.audit_log.exists():
        pytest.skip("a cluster of one's own has no audit log here")
    return [entry for entry in witness.entries(cluster) if entry["objectRef"].get("name") == name]


@pytest.fixture(scope="module")
def account(cluster: Cluster, helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return witness.account_kubeconfig(cluster, helm, tmp_path_factory.mktemp("account") / "kubeconfig.yaml")


@pytest.fixture(scope="module")
def operator(cluster: Cluster, account: Path) -> Iterator[Operator]:
    with Operator(cluster, kubeconfig=account) as started:
        yield started
        assert "is forbidden" not in started.log_tail(100_000), "the chart's role lacks a verb that the operator needs"
    cluster.kubectl("delete", "trainingjobs,events", "--all")


def test_nodes_become_ready(cluster: Cluster) -> None:
    ours = "--selector=nvidia.com/gpu.product"
    cluster.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "node", ours)
    nodes = json.loads(cluster.kubectl("get", "nodes", ours, "-o", "json"))["items"]
    gpus = sorted(int(node["status"]["allocatable"]["nvidia.com/gpu"]) for node in nodes)
    assert gpus == [4] * 4 + [8] * 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec.training.globalBatchSiz": 8}, r'unknown field "spec.training.globalBatchSiz"'),
        ({"spec.training.globalBatchSize": 0}, r"spec.training.globalBatchSize.*greater than or equal to 1"),
        ({"spec.training.globalBatchSize": "many"}, r"spec.training.globalBatchSize.*must be of type integer"),
        ({"spec.training.precision": "fp12"}, r'spec.training.precision: Unsupported value: "fp12".*"bf16"'),
        ({"spec.training.microBatchSize": 3}, r"globalBatchSize is not a multiple of microBatchSize"),
        ({"spec.objective": "speed"}, r'spec.objective: Unsupported value: "speed"'),
        ({"spec.model": {}}, r"exactly one of preset, transformer, huggingFace and graphRef"),
        ({"spec.model.huggingFace": {"config": {}}}, r"exactly one of preset, transformer, huggingFace and graphRef"),
        (
            {"spec.model.graphRef": {"configMapKeyRef": {"name": "m"}}},
            r"exactly one of preset, transformer, huggingFace and graphRef",
        ),
        ({"spec.model": {"huggingFace": {}}}, r"exactly one of config and configMapKeyRef"),
    ],
)
def test_the_api_server_refuses(cluster: Cluster, changes: dict[str, Any], message: str) -> None:
    document = json.dumps(job_document("refused", changes))
    with pytest.raises(ClusterError, match=message):
        cluster.kubectl("create", "--dry-run=server", "-f", "-", input=document)


def test_every_example_is_accepted(cluster: Cluster) -> None:
    cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", str(JOBS))


def test_kubectl_explains_every_field(cluster: Cluster) -> None:
    def undescribed(schema: dict[str, Any], path: str) -> list[str]:
        children = {f"{path}.{name}": child for name, child in schema.get("properties", {}).items()}
        children |= {f"{path}[]": schema[key] for key in ("items",) if key in schema}
        own = [] if "description" in schema or path.endswith(("[]", ".metadata")) else [path]
        return own + [one for name, child in children.items() for one in undescribed(child, name)]

    for crd in json.loads(cluster.kubectl("get", "crds", "-o", "json"))["items"]:
        for version in crd["spec"]["versions"]:
            assert undescribed(version["schema"]["openAPIV3Schema"], crd["spec"]["names"]["kind"]) == []


def test_applied_job_is_annotated(cluster: Cluster, operator: Operator, record_property: Any) -> None:
    started = time.monotonic()
    cluster.apply(JOBS / "llama-7b-pretrain.yaml")

    def annotated() -> bool:
        return PREFIX + "advice-hash" in get(cluster, "trainingjob", "llama-7b-pretrain")["metadata"]["annotations"]

    wait_for(annotated, "the advice", timeout_s=60)
    latency_s = time.monotonic() - started
    record_property("apply_to_annotated_s", round(latency_s, 2))
    print(f"apply to annotated: {latency_s:.2f} s")  # noqa: T201

    job = answered(cluster, "llama-7b-pretrain")
    notes = job["metadata"]["annotations"]
    assert {PREFIX + name for name in ANNOTATIONS} <= notes.keys()
    assert sum(len(key) + len(value) for key, value in notes.items() if key.startswith(PREFIX)) < 4096
    assert "finalizers" not in job["metadata"]
    assert not [key for key in notes if key.startswith("kopf")]

    advice = job["status"]["recommendation"]
    selector = json.loads(notes[PREFIX + "recommended-node-selector"])
    assert selector == advice["nodeSelector"]
    chosen = cluster.kubectl("get", "nodes", "-o", "name", "-l", ",".join(f"{k}={v}" for k, v in selector.items()))
    assert len(chosen.split()) >= advice["nodes"]

    split = advice["parallelism"]
    assert json.loads(notes[PREFIX + "recommended-parallelism"]) == split
    assert split["data"] * split["tensor"] * split["pipeline"] * split["context"] == advice["gpus"]
    assert split["data"] * split["microBatchSize"] * split["gradientAccumulation"] == 1024
    assert advice["gpus"] == advice["nodes"] * advice["gpusPerNode"]

    step = advice["stepSeconds"]
    assert 0 < step["lowerBound"] <= step["target"] <= step["upperBound"]
    assert sum(advice["breakdown"].values()) == pytest.approx(step["target"], rel=1e-3)
    assert condition(job, "Ready")["status"] == "True"
    assert condition(job, "RecommendationProvided")["status"] == "True"

    rows = {item["pool"] for item in job["status"].get("alternatives", []) + job["status"].get("rejected", [])}
    assert len(rows) == 4, "every pool of the cluster is a row, advised or rejected"
    assert advice["pool"] in cluster.kubectl("get", "tjob", "llama-7b-pretrain")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("unknown-preset", {"spec.model.preset": "llama-2-7"}, ("preset", "llama-2-7", "llama-2-7b")),
        ("unknown-pool", {"spec.constraints.allowedPools": ["b9000"]}, ("allowedPools", "b9000")),
        (
            "impossible-batch",
            {"spec.model.preset": "tinyllama-1.1b", "spec.training.globalBatchSize": 1, "spec.constraints.gpus": 7},
            ("no split of 7 GPUs divides batch 1", "ask for 8 GPUs"),
        ),
        ("no-bf16", {"spec.constraints.allowedPools": ["t4"]}, ("no BF16 units", "train in fp16")),
    ],
)
def test_a_wrong_job_is_told_so(
    cluster: Cluster, operator: Operator, name: str, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    cluster.kubectl("create", "-f", "-", input=json.dumps(job_document(name, changes)))
    job = answered(cluster, name)
    assert not [key for key in job["metadata"].get("annotations", {}) if key.startswith(PREFIX + "recommended")]
    for kind in ("Ready", "RecommendationProvided"):
        assert condition(job, kind)["status"] == "False"
    message = condition(job, "Ready")["message"]
    text = message + json.dumps(job["status"].get("rejected", []))
    for word in words:
        assert word in text
    assert "\n" not in message
    assert "Traceback" not in operator.log_tail(100_000)


def test_a_corrected_job_is_advised(cluster: Cluster, operator: Operator) -> None:
    cluster.kubectl("create", "-f", "-", input=json.dumps(job_document("corrected", {"spec.model.preset": "lama"})))
    assert condition(answered(cluster, "corrected"), "Ready")["status"] == "False"
    cluster.apply(json.dumps(job_document("corrected")))
    assert condition(answered(cluster, "corrected"), "Ready")["status"] == "True"


def test_a_model_in_a_config_map_is_read_with_the_chart_s_rights(cluster: Cluster, operator: Operator) -> None:
    config = yaml.safe_load((JOBS / "qwen3-8b-lora.yaml").read_text())["spec"]["model"]["huggingFace"]["config"]
    source = {"spec.model": {"huggingFace": {"configMapKeyRef": {"name": "qwen"}}}}
    cluster.apply(json.dumps(job_document("stored", source)))
    ready = condition(answered(cluster, "stored"), "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ModelNotFound")
    assert "there is no ConfigMap qwen; create it" in ready["message"]
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "qwen"}}
    cluster.apply(json.dumps({**config_map, "data": {"config.json": json.dumps(config)}}))
    cluster.apply(json.dumps(job_document("stored", {**source, "spec.training.loraRank": 16})))
    assert condition(answered(cluster, "stored"), "Ready")["status"] == "True"
    graph_job, graph = yaml.safe_load_all((JOBS.parent / "graphs" / "transformer.yaml").read_text())
    for document in (graph, graph_job):
        cluster.apply(json.dumps(document))
    assert condition(answered(cluster, "my-transformer"), "Ready")["status"] == "True"
    cluster.apply(json.dumps(job_document("inline", {"spec.model": {"huggingFace": {"config": config}}})))
    assert condition(answered(cluster, "inline"), "Ready")["status"] == "True"


def test_advice_comes_with_an_event(cluster: Cluster, operator: Operator) -> None:
    cluster.apply(json.dumps(job_document("noted")))
    answered(cluster, "noted")
    events = json.loads(cluster.kubectl("get", "events", "-o", "json"))["items"]
    (event,) = (item for item in events if item["involvedObject"]["name"] == "noted")
    assert event["type"] == "Normal"
    assert "h100-sxm" in event["message"]


def test_a_pool_that_a_user_writes_changes_the_advice(cluster: Cluster, operator: Operator) -> None:
    def pool_of(name: str) -> str:
        return str(get(cluster, "trainingjob", name)["status"]["recommendation"]["pool"])

    cluster.apply(json.dumps(job_document("thrifty", {"spec.objective": "cost"})))
    answered(cluster, "thrifty")
    before = pool_of("thrifty")
    own = {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "GPUPool",
        "metadata": {"name": "own-a100"},
        "spec": {
            "selector": {"node.kubernetes.io/instance-type": "p4de.24xlarge"},
            "price": {"perGpuHour": 0.01, "currency": "USD"},
        },
    }
    cluster.apply(json.dumps(own))
    try:
        wait_for(lambda: pool_of("thrifty") == "own-a100", "the cheap pool to be chosen", timeout_s=60)
        cluster.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "gpupool/own-a100")
        assert get(cluster, "gpupool", "own-a100")["status"]["gpus"]["total"] == 32
    finally:
        cluster.kubectl("delete", "gpupool", "own-a100")
    wait_for(lambda: pool_of("thrifty") == before, "the old pool to be chosen again", timeout_s=60)


def test_it_serves_probes_and_metrics(operator: Operator) -> None:
    assert operator.get("/healthz")
    assert operator.get("/readyz")
    assert 'tilecast_recommendations_total{result="' in operator.get("/metrics")


def test_a_killed_operator_writes_nothing_when_it_returns(cluster: Cluster, operator: Operator) -> None:
    cluster.apply(json.dumps(job_document("survivor")))
    before = answered(cluster, "survivor")["metadata"]["resourceVersion"]
    count = len(writes(cluster, "survivor"))

    operator.kill()
    cluster.apply(json.dumps(job_document("latecomer")))
    operator.start()
    # It answers the job that came while it was down, so it has also seen the earlier ones.
    assert condition(answered(cluster, "latecomer"), "Ready")["status"] == "True"
    cluster.apply(json.dumps(job_document("newcomer")))
    answered(cluster, "newcomer")

    assert get(cluster, "trainingjob", "survivor")["metadata"]["resourceVersion"] == before
    assert len(writes(cluster, "survivor")) == count > 0


def test_it_ends_when_it_is_told_to(cluster: Cluster, account: Path) -> None:
    second = Operator(cluster, kubeconfig=account)
    second.start()
    assert second.stop() == 0

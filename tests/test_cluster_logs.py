"""Steps from the log of a pod, through a real API server that asks a kubelet: the right is that of the chart."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml

import witness
from cluster import Cluster, wait_for
from conftest import Helm
from operator_process import Operator
from test_chart import of_kind
from test_pod_logs import lines
from test_server import certificate

pytestmark = pytest.mark.cluster

ANSWER_S = 90
VALUES = ("jobs.enabled=true", "observations.logs.enabled=true")
QUICK = {"TILECAST_LOG_POLL_SECONDS": "0.5", "TILECAST_SETTLE_SECONDS": "0.1", "TILECAST_OBSERVE_SETTLE_SECONDS": "0.1"}
LIMITS = {"nvidia.com/gpu": "8"}
TEMPLATE = {
    "metadata": {"labels": {"batch.kubernetes.io/job-name": "prints"}},
    "spec": {
        "restartPolicy": "Never",
        "containers": [{"name": "train", "image": "train:1", "resources": {"limits": LIMITS}}],
    },
}


class Kubelet(BaseHTTPRequestHandler):
    """Kubelet that serves one log, as far as the API server asks."""

    log: ClassVar[bytes] = b""
    asked: ClassVar[list[tuple[str, dict[str, str]]]] = []

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        self.asked.append((parts.path, query))
        content = self.log
        if "tailLines" in query:
            content = b"".join(content.splitlines(keepends=True)[-int(query["tailLines"]) :])
        content = content[: int(query.get("limitBytes", len(content)))]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[int]:
    """Serve as a kubelet, and yield the port."""
    certificate(tmp_path, "kubelet")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Kubelet)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def get(cluster: Cluster, kind: str, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(cluster.kubectl("get", kind, name, "-o", "json"))
    return document


def set_status(cluster: Cluster, kind: str, name: str, **status: Any) -> None:
    change = json.dumps({"status": status})
    cluster.kubectl("patch", kind, name, "--subresource=status", "--type=merge", f"--patch={change}")


def has(cluster: Cluster, field: str) -> Any:
    return get(cluster, "tjob", "for-prints").get("status", {}).get(field)


def test_the_log_of_a_pod_corrects_the_forecast_of_its_job(
    bare_cluster: Cluster, kubelet: int, helm: Helm, tmp_path: Path
) -> None:
    cluster = bare_cluster
    rendered = list(filter(None, yaml.safe_load_all(witness.rendered(helm, *VALUES))))
    (container,) = of_kind(rendered, "Deployment")[0]["spec"]["template"]["spec"]["containers"]
    settings = {item["name"]: item.get("value", "127.0.0.1") for item in container["env"]} | QUICK
    account = witness.account_kubeconfig(cluster, helm, tmp_path / "kubeconfig.yaml", *VALUES)
    since = witness.mark(cluster)
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "prints", "namespace": "default"},
        "spec": {"template": TEMPLATE, "suspend": True},
    }
    asked = {
        "apiVersion": "tilecast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "for-prints", "namespace": "default"},
        "spec": {
            "model": {"preset": "gpt2"},
            "training": {"sequenceLength": 1024, "globalBatchSize": 64},
            "targetRef": {"apiVersion": "batch/v1", "kind": "Job", "name": "prints"},
        },
    }
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    labelled = [(item["metadata"]["name"], str(item["metadata"]["labels"])) for item in nodes]
    node = next(name for name, labels in labelled if "H100" in labels)
    set_status(
        cluster,
        "node",
        node,
        addresses=[{"type": "InternalIP", "address": "127.0.0.1"}],
        daemonEndpoints={"kubeletEndpoint": {"Port": kubelet}},
    )
    with Operator(cluster, account, settings) as operator:
        cluster.apply(json.dumps(job))
        cluster.apply(json.dumps(asked))
        seconds = 1.25 * wait_for(partial(has, cluster, "recommendation"), "advice", ANSWER_S)["stepSeconds"]["target"]
        Kubelet.log = b"loading\n" * 20_000 + lines(seconds, count=3000)
        if "default" not in cluster.kubectl("get", "serviceaccounts", "-o", "name"):
            cluster.kubectl("create", "serviceaccount", "default")
        cluster.kubectl("patch", "job", "prints", "--type=merge", '--patch={"spec":{"suspend":false}}')
        set_status(cluster, "job", "prints", active=1, startTime="2026-01-01T00:00:00Z")
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "prints", "controller": True}
        owner["uid"] = get(cluster, "job", "prints")["metadata"]["uid"]
        metadata = {"name": "prints-0", "namespace": "default", "ownerReferences": [owner], **TEMPLATE["metadata"]}
        spec = {**TEMPLATE["spec"], "nodeName": node}
        cluster.apply(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}))
        set_status(cluster, "pod", "prints-0", phase="Running")
        observed = wait_for(partial(has, cluster, "observed"), f"a step; {operator.log_tail()}", ANSWER_S)
        assert operator.get("/healthz") == "ok"
    assert (observed["source"], observed["node"]) == ("podLog", node)
    assert observed["stepSeconds"] == pytest.approx(seconds, rel=0.01)
    (path,) = {path for path, _ in Kubelet.asked}
    assert path == "/containerLogs/default/prints-0/train"
    assert {tuple(sorted(query)) for _, query in Kubelet.asked} == {("limitBytes",), ("limitBytes", "tailLines")}
    used = {
        (witness.resource(entry), entry["verb"])
        for entry in witness.of_the_operator(cluster, since)
        if witness.resource(entry).startswith("pods")
    }
    assert used == {("pods", "list"), ("pods/log", "get")}

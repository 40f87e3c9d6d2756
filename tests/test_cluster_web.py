"""The pages beside the operator on a real control plane, by the account and the rights that the chart gives them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster import Cluster, ClusterError, wait_for
from conftest import Helm
from test_chart import NAMESPACE, rendered, web_objects
from test_operator_web import make_job, make_pool, make_queue

pytestmark = pytest.mark.cluster

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:tilecast-web"
OBJECTS = (make_pool("h100", "h100-sxm", 4, 8, free=8), make_job("llama-70b", measured_s=10.4), make_queue())
SPECS = {
    "GPUPool": {"nodeType": "p5.48xlarge"},
    "TrainingJob": {
        "model": {"preset": "gpt2"},
        "training": {"sequenceLength": 1024, "globalBatchSize": 64, "precision": "fp16"},
    },
    "QueueAdvice": {"policy": "completion", "intervalSeconds": 2},
}


@pytest.fixture
def kubeconfig(helm: Helm, bare_cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Yield a kubeconfig with nothing but the token of the account of the pages."""
    # They stay: other tests of this control plane use them too, and nothing here would end their deletion.
    for namespace in (NAMESPACE, "team-a"):
        bare_cluster.apply(json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}))
    objects = web_objects(rendered(helm, "--set=web.enabled=true"))
    for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding"):
        bare_cluster.apply(json.dumps(objects[kind]))
    bearer = bare_cluster.kubectl("create", "token", "tilecast-web", f"--namespace={NAMESPACE}")
    config = yaml.safe_load(bare_cluster.kubeconfig.read_text())
    config["users"] = [{"name": "pages", "user": {"token": bearer.strip()}}]
    config["contexts"][0]["context"]["user"] = "pages"
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    yield path
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        bare_cluster.kubectl("delete", kind, objects[kind]["metadata"]["name"])
    bare_cluster.kubectl("delete", "serviceaccount", "tilecast-web", f"--namespace={NAMESPACE}")
    bare_cluster.kubectl("delete", "gpupool", "h100", "--ignore-not-found")
    bare_cluster.kubectl("delete", "queueadvice", "cluster", "--ignore-not-found")


def read(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 (our own server)
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_the_account_of_the_pages_reads_what_they_show_and_nothing_else(
    bare_cluster: Cluster, kubeconfig: Path
) -> None:
    for item in OBJECTS:
        kind, metadata = item["kind"], item["metadata"]
        head = {"apiVersion": "tilecast.dev/v1alpha1", "kind": kind, "metadata": metadata}
        bare_cluster.apply(json.dumps({**head, "spec": SPECS[kind]}))
        scope = [f"--namespace={metadata['namespace']}"] if "namespace" in metadata else []
        arguments = ["patch", kind, metadata["name"], *scope, "--subresource=status", "--type=merge", "-p"]
        bare_cluster.kubectl(*arguments, json.dumps({"status": item["status"]}))
    for kind in ("gpupools", "trainingjobs", "queueadvices"):
        for verb in ("list", "watch"):
            allowed = bare_cluster.kubectl("auth", "can-i", verb, f"{kind}.tilecast.dev", "-A", f"--as={ACCOUNT}")
            assert allowed.strip() == "yes"
        for verb in ("create", "update", "patch", "delete"):
            with pytest.raises(ClusterError, match="no"):
                bare_cluster.kubectl("auth", "can-i", verb, f"{kind}.tilecast.dev", "-A", f"--as={ACCOUNT}")
    for denied in (
        "get secrets", "list secrets", "list pods", "list nodes", "list configmaps", "create events",
        "list poollearnings.tilecast.dev", "patch trainingjobs.tilecast.dev/status", "create pods",
    ):  # fmt: skip
        with pytest.raises(ClusterError, match="no"):
            bare_cluster.kubectl("auth", "can-i", *denied.split(), "-A", f"--as={ACCOUNT}")

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = os.environ | {"KUBECONFIG": str(kubeconfig), "TILECAST_LISTEN_PORT": str(port)}
    process = subprocess.Popen([sys.executable, "-m", "tilecast_operator.web"], env=variables)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: read(f"{url}/readyz")[0] == 200 or None, "the pages", 120)
        assert "24 of 32" in read(f"{url}/")[1] and "-21.2%" in read(f"{url}/forecasts")[1]
        assert "team-b/huge" in read(f"{url}/queue")[1] and "h100-sxm:4x8" in read(f"{url}/play/")[1]
        bare_cluster.kubectl("delete", "trainingjob", "llama-70b", "--namespace=team-a")
        wait_for(lambda: "There is no TrainingJob" in read(f"{url}/jobs")[1] or None, "the watch", 60)
        assert "Out of date" not in read(f"{url}/jobs")[1]
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 and time.monotonic() - began_s < 30
    finally:
        process.kill()
        process.wait()

"""Where the story of `story.py` is told: beside the local control plane, as processes, or in a cluster of kind as pods.
What is told is the same; only what makes the cluster differs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
import yaml

import image as builder
from cluster import Cluster, NamedCluster, free_ports, wait_for
from conftest import ROOT, Helm, ensure_or_fail
from operator_process import Operator
from scraper import DIRECT, prometheus
from story import TEAM
from witness import CHART, kubeconfig_of

NAMESPACE = "tilecast-observes"
RELEASE = "observes"
SETTINGS = {
    "TILECAST_OBSERVE_SETTLE_SECONDS": "0.2",
    "TILECAST_CALIBRATE_SETTLE_SECONDS": "0.5",
}
"""The operator writes and learns without delay."""
NODES = ROOT / "examples" / "clusters" / "mixed.yaml"
IMAGE = "localhost/tilecast:e2e"
KIND = "tilecast-e2e"
LABEL = {"tilecast-e2e": "kubelet"}
"""Of the nodes that run what is really there; kwok only says that it runs."""
SHAPE = {
    "kind": "Cluster",
    "apiVersion": "kind.x-k8s.io/v1alpha4",
    "nodes": [{"role": "control-plane"}, {"role": "worker", "labels": LABEL}],
}


class RunningOperator(Protocol):
    """What the story needs of an operator."""

    @property
    def url(self) -> str:
        """Where it answers now."""

    def get(self, path: str) -> str:
        """What it serves under `path`."""

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log."""

    def start(self) -> None:
        """Start it and wait until it is ready."""

    def stop(self) -> object:
        """End it as the kubelet does."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A cluster with the nodes of `NODES`, the operator of the chart, and a Prometheus that scrapes it."""

    cluster: Cluster
    operator: RunningOperator
    prometheus: str
    """Its URL."""


def is_ready(url: str) -> bool:
    """Whether something answers there."""
    try:
        return bool(DIRECT.open(url, timeout=5).status == 200)
    except OSError:
        return False


@contextmanager
def local(cluster: Cluster, helm: Helm, folder: Path) -> Iterator[Surroundings]:
    """Processes beside a cluster that has the nodes and the CRDs; the operator has the chart's rights."""
    chosen = ["--set=queue.enabled=true,jobs.enabled=true"]
    chosen += [f"--show-only=templates/{name}.yaml" for name in ("rbac", "serviceaccount")]
    for namespace in (NAMESPACE, TEAM):
        cluster.kubectl("create", "namespace", namespace)
    cluster.apply(helm("template", RELEASE, str(CHART), f"--namespace={NAMESPACE}", *chosen))
    account = kubeconfig_of(cluster, f"{RELEASE}-tilecast", NAMESPACE, folder / "kubeconfig.yaml")
    settings = {**SETTINGS, "TILECAST_QUEUE": "true", "TILECAST_JOBS": "true"}
    with (
        Operator(cluster, kubeconfig=account, settings=settings) as operator,
        prometheus(operator.url.removeprefix("http://"), folder) as url,
    ):
        yield Surroundings(cluster, operator, url)
    cluster.kubectl("delete", "namespace", TEAM, NAMESPACE, "--wait=false")
    cluster.kubectl("delete", "gpupools", "--all")


@contextmanager
def kind(helm: Helm, folder: Path) -> Iterator[Surroundings]:
    """A new cluster of kind with the image, the chart and a Prometheus inside; it is deleted afterwards."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode
    ):
        pytest.skip("kind needs a container engine, and no Docker engine answers")
    path, program = folder / "kubeconfig.yaml", str(ensure_or_fail("kind") / "kind")

    def run(*arguments: str) -> None:
        subprocess.run([program, *arguments, f"--name={KIND}"], check=True)

    (folder / "kind.yaml").write_text(yaml.safe_dump(SHAPE))
    builder.build(IMAGE)
    try:
        run("create", "cluster", f"--config={folder}/kind.yaml", f"--kubeconfig={path}", "--wait=5m")
        run("load", "docker-image", IMAGE)
        with NamedCluster(f"kind-{KIND}", nodes=NODES, kubeconfig=path) as cluster, _installed(cluster, helm) as site:
            yield site
    finally:
        run("delete", "cluster", f"--kubeconfig={path}")


@contextmanager
def _installed(cluster: Cluster, helm: Helm) -> Iterator[Surroundings]:
    """The chart, whose own test passes, and a Prometheus."""
    connection = [f"--kubeconfig={cluster.kubeconfig}", f"--namespace={NAMESPACE}"]
    for namespace in (NAMESPACE, TEAM):
        cluster.kubectl("create", "namespace", namespace)
    cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    repository, _, tag = IMAGE.rpartition(":")
    values = {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "queue": {"enabled": True},
        "jobs": {"enabled": True},
        "nodeSelector": LABEL,
        "settings": SETTINGS,
    }
    file = cluster.folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    helm("install", RELEASE, str(CHART), *connection, f"--values={file}", "--wait", "--timeout=5m")
    assert "Succeeded" in helm("test", RELEASE, *connection, "--timeout=5m")
    cluster.kubectl("apply", f"--namespace={NAMESPACE}", "-f", str(ROOT / "tests" / "e2e" / "prometheus.yaml"))
    cluster.kubectl("rollout", "status", f"--namespace={NAMESPACE}", "--timeout=5m", "deployment/prometheus")
    with _forwarded(cluster, "deployment/prometheus", 9090, "/-/ready") as prometheus:
        operator = DeployedOperator(cluster)
        operator.start()
        try:
            yield Surroundings(cluster, operator, prometheus)
        finally:
            operator.stop()
    helm("uninstall", RELEASE, *connection, "--wait", "--timeout=5m")


class DeployedOperator:
    """The operator in the pod of its Deployment."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._name = f"deployment/{RELEASE}-tilecast"
        self._way = ExitStack()
        self.url = ""

    def start(self) -> None:
        """Have one pod, and a way to it."""
        self._kubectl("scale", self._name, "--replicas=1")
        self._kubectl("rollout", "status", "--timeout=5m", self._name)
        self.url = self._way.enter_context(_forwarded(self._cluster, f"service/{RELEASE}-tilecast", 8080, "/readyz"))

    def stop(self) -> None:
        """Have no pod."""
        self._way.close()
        self._kubectl("scale", self._name, "--replicas=0")
        selector = f"--selector=app.kubernetes.io/instance={RELEASE}"
        self._kubectl("wait", "--for=delete", "--timeout=2m", "pod", selector)

    def get(self, path: str) -> str:
        """What it serves under `path`."""
        with DIRECT.open(f"{self.url}{path}", timeout=10) as response:
            return str(response.read().decode())

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        return self._kubectl("logs", self._name, f"--tail={lines}")

    def _kubectl(self, *arguments: str) -> str:
        return self._cluster.kubectl(f"--namespace={NAMESPACE}", *arguments)


@contextmanager
def _forwarded(cluster: Cluster, target: str, port: int, ready: str) -> Iterator[str]:
    """The URL under which a port of something in the cluster answers here."""
    (here,) = free_ports(1)
    program = str(cluster.folder / "programs" / "kubectl")
    words = [f"--kubeconfig={cluster.kubeconfig}", f"--namespace={NAMESPACE}", "port-forward", target]
    process = subprocess.Popen(
        [program, *words, f"{here}:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{here}"
    try:
        wait_for(lambda: is_ready(url + ready), target, 120)
        yield url
    finally:
        process.terminate()
        process.wait(30)

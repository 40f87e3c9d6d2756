"""The whole story on a cluster of kind: the image, the chart, kubelets, a Prometheus inside. `make e2e`

It needs a container engine; the same story runs without one in tests/test_cluster_observe.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import image as builder
from cluster import ClusterError, free_ports, wait_for
from conftest import Helm, ensure_or_fail
from story import DIRECT, TEAM, Scene, from_advice_to_a_better_forecast

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parent.parent.parent
CHART, PROMETHEUS = ROOT / "charts" / "tilecast", ROOT / "tests" / "e2e" / "prometheus.yaml"
NAME, NAMESPACE, IMAGE = "tilecast-e2e", "tilecast", "localhost/tilecast:e2e"
NODES = {
    "kind": "Cluster",
    "apiVersion": "kind.x-k8s.io/v1alpha4",
    "nodes": [{"role": "control-plane"}, {"role": "worker"}, {"role": "worker"}],
}


@dataclass(frozen=True, slots=True)
class KindCluster:
    """A cluster of kind, by its kubeconfig."""

    programs: Path
    kubeconfig: Path

    def kubectl(self, *arguments: str, input: str | None = None) -> str:  # noqa: A002 - as in subprocess.run
        """What kubectl prints."""
        done = subprocess.run(self.command(*arguments), input=input, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(done.stderr.strip())
        return done.stdout

    def command(self, *arguments: str) -> list[str]:
        """The words of a kubectl command."""
        return [str(self.programs / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]


@pytest.fixture(scope="module")
def kind(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindCluster]:
    """A new cluster that has the image; it is deleted afterwards."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode
    ):
        pytest.skip("kind needs a container engine, and no Docker engine answers")
    folder = tmp_path_factory.mktemp("kind")
    path = folder / "kubeconfig.yaml"
    program = str(ensure_or_fail("kind") / "kind")

    def run(*arguments: str) -> None:
        subprocess.run([program, *arguments, f"--name={NAME}"], check=True)

    (folder / "kind.yaml").write_text(yaml.safe_dump(NODES))
    builder.build(IMAGE)
    try:
        run("create", "cluster", f"--config={folder}/kind.yaml", f"--kubeconfig={path}", "--wait=5m")
        run("load", "docker-image", IMAGE)
        yield KindCluster(binaries, path)
    finally:
        run("delete", "cluster", f"--kubeconfig={path}")


def disguise(cluster: KindCluster) -> None:
    """Give the workers the labels and GPUs of the H100 nodes of an example."""
    nodes = yaml.safe_load((ROOT / "examples" / "clusters" / "mixed.yaml").read_text())["items"]
    models = [node for node in nodes if "H100" in node["metadata"]["labels"].get("nvidia.com/gpu.product", "")]
    workers = cluster.kubectl("get", "nodes", "--selector=!node-role.kubernetes.io/control-plane", "-o", "name").split()
    for worker, model in zip(workers, models, strict=True):
        own = ("kubernetes.io/hostname", "kubernetes.io/arch", "kubernetes.io/os")
        labels = {key: value for key, value in model["metadata"]["labels"].items() if key not in own}
        cluster.kubectl("patch", worker, "--type=merge", "-p", json.dumps({"metadata": {"labels": labels}}))
        gpus = {part: {"nvidia.com/gpu": "8"} for part in ("capacity", "allocatable")}
        cluster.kubectl("patch", worker, "--subresource=status", "--type=merge", "-p", json.dumps({"status": gpus}))


@contextmanager
def forwarded(cluster: KindCluster, target: str, port: int, ready: str) -> Iterator[str]:
    """The URL under which a port of something in the cluster answers here."""
    (local,) = free_ports(1)
    command = cluster.command(f"--namespace={NAMESPACE}", "port-forward", target, f"{local}:{port}")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{local}"

    def answers() -> bool:
        try:
            return bool(DIRECT.open(url + ready, timeout=5).status == 200)
        except OSError:
            return False

    try:
        wait_for(answers, target, 120)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def test_the_story_in_a_cluster_with_kubelets(kind: KindCluster, helm: Helm, tmp_path: Path) -> None:
    disguise(kind)
    connection = [f"--kubeconfig={kind.kubeconfig}", f"--namespace={NAMESPACE}"]
    repository, _, tag = IMAGE.rpartition(":")
    quick = "settings.TILECAST_OBSERVE_SETTLE_SECONDS=0.2,settings.TILECAST_CALIBRATE_SETTLE_SECONDS=0.5"
    given = f"image.repository={repository},image.tag={tag},image.pullPolicy=Never,queue.enabled=true,{quick}"
    for namespace in (NAMESPACE, TEAM):
        kind.kubectl("create", "namespace", namespace)
    kind.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    helm("install", "tilecast", str(CHART), *connection, "--set", given, "--wait", "--timeout=5m")
    assert "fastest" in helm("test", "tilecast", *connection, "--logs", "--timeout=5m")
    kind.kubectl("apply", f"--namespace={NAMESPACE}", "-f", str(PROMETHEUS))
    kind.kubectl("rollout", "status", f"--namespace={NAMESPACE}", "--timeout=5m", "deployment/prometheus")
    with (
        forwarded(kind, "service/tilecast", 8080, "/readyz") as operator,
        forwarded(kind, "deployment/prometheus", 9090, "/-/ready") as prometheus,
    ):
        from_advice_to_a_better_forecast(Scene(kind.kubectl, lambda: operator, prometheus), tmp_path)
    helm("uninstall", "tilecast", *connection, "--wait", "--timeout=5m")

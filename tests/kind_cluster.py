"""A cluster of kind with real kubelets, and releases of the chart in it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import image as builder
import kind_engine
from cluster import Cluster, NamedCluster, free_ports, wait_for
from conftest import ROOT, ensure_or_fail, need
from kind_node import OPERATOR
from scraper import DIRECT
from witness import CHART

KIND = "tilecast-e2e"
NODES = ROOT / "examples" / "clusters" / "mixed.yaml"
REPOSITORY, _, TAG = OPERATOR.rpartition(":")
LABEL = {"tilecast-e2e": "kubelet"}
"""Label of the nodes with a real kubelet. Elsewhere kwok only reports that pods run."""
SHAPE = {
    "kind": "Cluster",
    "apiVersion": "kind.x-k8s.io/v1alpha4",
    "nodes": [{"role": "control-plane", "labels": LABEL}, {"role": "worker", "labels": LABEL}],
}
WORKERS = (f"{KIND}-control-plane", f"{KIND}-worker")
VALUES: Mapping[str, Any] = {
    "image": {"repository": REPOSITORY, "tag": TAG, "pullPolicy": "Never"},
    "nodeSelector": LABEL,
}


@contextmanager
def started(folder: Path) -> Iterator[Cluster]:
    """Start a cluster with two nodes that run pods, and the nodes of `NODES`, which kwok simulates."""
    if not kind_engine.answers(os.environ):
        need("kind", "no Docker engine answers; `make e2e` starts one where it can")
    path, program = folder / "kubeconfig.yaml", str(ensure_or_fail("kind") / "kind")

    def run(*arguments: str) -> None:
        subprocess.run([program, *arguments, f"--name={KIND}"], check=True)

    (folder / "kind.yaml").write_text(yaml.safe_dump(SHAPE))
    node = [f"--image={name}"] if (name := os.environ.get("TILECAST_KIND_NODE")) else []
    archives = os.environ.get("TILECAST_KIND_ARCHIVES", "").split()
    if not archives:
        builder.build(OPERATOR)
    try:
        run("create", "cluster", f"--config={folder}/kind.yaml", f"--kubeconfig={path}", "--wait=5m", *node)
        for archive in archives:
            run("load", "image-archive", archive)
        if not archives:
            run("load", "docker-image", OPERATOR)
        with NamedCluster(f"kind-{KIND}", nodes=NODES, kubeconfig=path) as cluster:
            cluster.kubectl("taint", "node", WORKERS[0], "node-role.kubernetes.io/control-plane-")
            yield cluster
    finally:
        run("delete", "cluster", f"--kubeconfig={path}")


@dataclass(frozen=True, slots=True)
class ChartRelease:
    """A release of the chart in a namespace of its own."""

    cluster: Cluster
    name: str
    namespace: str

    @property
    def deployment(self) -> str:
        """Name of the operator's Deployment for kubectl."""
        return f"deployment/{self.name}-tilecast"

    def kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl(f"--namespace={self.namespace}", *arguments)

    def pods(self) -> list[dict[str, Any]]:
        """Return the operator's pods that are not being deleted."""
        labels = f"--selector=app.kubernetes.io/instance={self.name},app.kubernetes.io/component=operator"
        items = json.loads(self.kubectl("get", "pods", labels, "-o", "json"))["items"]
        return [item for item in items if "deletionTimestamp" not in item["metadata"]]

    def helm(self, verb: str, *arguments: str) -> str:
        """Run a command of helm on the release and return its output, logs of hooks included.

        Raises:
            AssertionError: helm fails.
        """
        program = ensure_or_fail("chart") / "helm"
        command = [str(program), verb, self.name, *arguments, f"--namespace={self.namespace}"]
        command += [f"--kubeconfig={self.cluster.kubeconfig}", "--timeout=5m"]
        environment = self.cluster.environment()
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, f"helm {verb}: {done.stdout}{done.stderr}"
        # helm writes the logs of hooks to standard error.
        return done.stdout + done.stderr

    @contextmanager
    def forwarded(self, target: str = "", port: int = 8080, ready: str = "/readyz") -> Iterator[str]:
        """Forward a local port to a port of `target`, the operator's Service by default, and yield the local URL."""
        with forwarded(self.cluster, self.namespace, target or f"service/{self.name}-tilecast", port, ready) as url:
            yield url


@contextmanager
def installed(
    cluster: Cluster, name: str, values: Mapping[str, Any] | None = None, *, namespace: str = "", chart: Path = CHART
) -> Iterator[ChartRelease]:
    """Install a release, wait for its pods, and afterwards uninstall it and delete its namespace.

    Args:
        cluster: where to install.
        name: of the release.
        values: for the chart, in addition to `VALUES`.
        namespace: the release's name by default. It enforces the Restricted Pod Security Standard.
        chart: a folder or an archive.
    """
    release = ChartRelease(cluster, name, namespace or name)
    cluster.kubectl("create", "namespace", release.namespace)
    cluster.kubectl("label", "namespace", release.namespace, "pod-security.kubernetes.io/enforce=restricted")
    try:
        release.helm("install", str(chart), f"--values={values_file(cluster, values)}", "--wait")
        yield release
        release.helm("uninstall", "--wait")
    finally:
        cluster.kubectl("delete", "namespace", release.namespace, "--ignore-not-found")


def values_file(cluster: Cluster, values: Mapping[str, Any] | None = None) -> Path:
    """Write a file with values for the chart, `VALUES` included, and return its path."""
    path = cluster.folder / "values.yaml"
    path.write_text(yaml.safe_dump({**VALUES, **(values or {})}))
    return path


@contextmanager
def forwarded(cluster: Cluster, namespace: str, target: str, port: int, ready: str) -> Iterator[str]:
    """Forward a local port to a port of `target` in the cluster, and yield the local URL."""
    (here,) = free_ports(1)
    program = str(cluster.folder / "programs" / "kubectl")
    words = [f"--kubeconfig={cluster.kubeconfig}", f"--namespace={namespace}", "port-forward", target]
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


def is_ready(url: str) -> bool:
    """Return whether a GET of `url` answers with status 200."""
    try:
        return bool(DIRECT.open(url, timeout=5).status == 200)
    except OSError:
        return False

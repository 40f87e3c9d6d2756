"""The clusters in which the story of `story.py` runs: beside the local control plane, or in a cluster of kind.

The operator and Prometheus are processes in the first and pods in the second. The story is the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cluster import Cluster
from conftest import ROOT, Helm
from kind_cluster import ChartRelease, installed
from operator_process import Operator
from scraper import DIRECT, prometheus
from story import TEAM
from witness import CHART, kubeconfig_of

NAMESPACE = "tilecast-observes"
RELEASE = "observes"
SETTINGS = {
    "TILECAST_OBSERVE_SETTLE_SECONDS": 0.2,
    "TILECAST_CALIBRATE_SETTLE_SECONDS": 0.5,
}
"""Settings with which the operator writes and learns almost without delay."""


class RunningOperator(Protocol):
    """The interface through which the story uses an operator."""

    @property
    def url(self) -> str:
        """URL at which it answers now."""

    def get(self, path: str) -> str:
        """Return the body that it serves under `path`."""

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of its log."""

    def start(self) -> None:
        """Start it and wait until it is ready."""

    def stop(self) -> object:
        """Stop it as the kubelet does."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """A cluster with the nodes of `NODES`, the operator of the chart, and a Prometheus that scrapes it."""

    cluster: Cluster
    operator: RunningOperator
    prometheus: str
    """URL of Prometheus."""


@contextmanager
def local(cluster: Cluster, helm: Helm, folder: Path) -> Iterator[Surroundings]:
    """Run the operator and Prometheus as processes beside a cluster that has the nodes and the CRDs.

    The operator has the chart's rights.
    """
    chosen = ["--set=queue.enabled=true", "--set=jobs.enabled=true"]
    chosen += [f"--show-only=templates/{name}.yaml" for name in ("rbac", "serviceaccount")]
    for namespace in (NAMESPACE, TEAM):
        cluster.kubectl("create", "namespace", namespace)
    cluster.apply(helm("template", RELEASE, str(CHART), f"--namespace={NAMESPACE}", *chosen))
    account = kubeconfig_of(cluster, f"{RELEASE}-tilecast", NAMESPACE, folder / "kubeconfig.yaml")
    settings = {name: str(value) for name, value in SETTINGS.items()}
    settings |= {"TILECAST_QUEUE": "true", "TILECAST_JOBS": "true"}
    with (
        Operator(cluster, kubeconfig=account, settings=settings) as operator,
        prometheus(operator.url.removeprefix("http://"), folder) as url,
    ):
        yield Surroundings(cluster, operator, url)
    cluster.kubectl("delete", "namespace", TEAM, NAMESPACE, "--wait=false")
    cluster.kubectl("delete", "gpupools", "--all")


@contextmanager
def kind(cluster: Cluster) -> Iterator[Surroundings]:
    """Install the chart and a Prometheus in a cluster of kind, and check that `helm test` passes."""
    values = {"queue": {"enabled": True}, "jobs": {"enabled": True}, "settings": SETTINGS}
    cluster.kubectl("create", "namespace", TEAM)
    with installed(cluster, RELEASE, values, namespace=NAMESPACE) as release:
        tested = release.helm("test")
        assert "Phase:          Succeeded" in tested and "fastest" in tested
        release.kubectl("apply", "-f", str(ROOT / "tests" / "e2e" / "prometheus.yaml"))
        release.kubectl("rollout", "status", "--timeout=5m", "deployment/prometheus")
        with release.forwarded("deployment/prometheus", 9090, "/-/ready") as url:
            operator = DeployedOperator(release)
            operator.start()
            try:
                yield Surroundings(cluster, operator, url)
            finally:
                operator.stop()
    cluster.kubectl("delete", "namespace", TEAM)
    cluster.kubectl("delete", "gpupools", "--all")


class DeployedOperator:
    """The operator in the pod of its Deployment."""

    def __init__(self, release: ChartRelease) -> None:
        self._release = release
        self._way = ExitStack()
        self._earlier = ""
        self.url = ""

    def start(self) -> None:
        """Scale to one pod and forward a port to it."""
        self._release.kubectl("scale", self._release.deployment, "--replicas=1")
        self._release.kubectl("rollout", "status", "--timeout=5m", self._release.deployment)
        self.url = self._way.enter_context(self._release.forwarded())

    def stop(self) -> None:
        """Scale to no pod, after saving its log."""
        self._way.close()
        self._earlier += self._log(100_000)
        self._release.kubectl("scale", self._release.deployment, "--replicas=0")
        selector = "--selector=app.kubernetes.io/component=operator"
        self._release.kubectl("wait", "--for=delete", "--timeout=2m", "pod", selector)

    def get(self, path: str) -> str:
        """Return the body that the operator serves under `path`."""
        with DIRECT.open(f"{self.url}{path}", timeout=10) as response:
            return str(response.read().decode())

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of its log, including those of stopped pods."""
        return "\n".join((self._earlier + self._log(lines)).splitlines()[-lines:])

    def _log(self, lines: int) -> str:
        return self._release.kubectl("logs", self._release.deployment, f"--tail={lines}")

"""Kueue, JobSet, Kubeflow Trainer and the training operator against a control plane of `cluster.py`.

    with Cluster(nodes=...) as cluster, Controllers(cluster, "jobset", "trainer", "kueue"):
        cluster.apply(Path("examples/existing/job.yaml"))

Each is the released program, built from its Go module by `binaries.py` and started as a plain process on loopback
ports. Its CRDs and webhooks come from the module, with `clientConfig.service` turned into a URL of 127.0.0.1. Its
certificate is the one that kwokctl made for the API server, which names 127.0.0.1.
"""

from __future__ import annotations

import base64
import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

import binaries
from cluster import Cluster, ClusterError, free_ports, wait_for
from processes import start_logged

START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 20

_WATCHED = ("kueue.x-k8s.io", "batch", "jobset.x-k8s.io", "kubeflow.org", "trainer.kubeflow.org")
"""API groups whose webhooks are installed; Kueue's manifests name many more, which it serves only on request."""


_FRAMEWORKS = ("batch/job", "jobset.x-k8s.io/jobset", "kubeflow.org/pytorchjob", "trainer.kubeflow.org/trainjob")
"""Kinds of jobs that Kueue manages; it waits for the CRDs of those that a cluster lacks."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of 127.0.0.1 on which a controller listens."""

    webhook: int
    health: int


@dataclass(frozen=True, slots=True)
class Controller:
    """Start-up of one of the programs."""

    crds: str
    """Folder of its CRDs, below the manifests of its toolset."""
    webhooks: str
    """File of its webhooks; empty if none are installed."""
    configuration: Callable[[Ports, Path], Mapping[str, Any]] | None
    """Function of its ports and the folder of its certificate that returns the content of its `--config`."""
    arguments: Callable[[Ports], tuple[str, ...]]
    runtimes: str = ""
    """File that is applied once the program runs."""
    needs: tuple[str, ...] = ()
    secret: tuple[str, str] | None = None
    """Namespace and name of the Secret that its certificate manager looks for."""
    must_exist: str = ""
    """File that the program waits for without reading it."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """Command, environment and port with which a program was started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    port: int
    """Port on which it listens once it works."""


def _kueue(ports: Ports, certificates: Path) -> Mapping[str, Any]:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": "kueue-system",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{ports.health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": ports.webhook, "host": "127.0.0.1", "certDir": str(certificates)},
        # Without its certificate manager Kueue insists on a certificate in a fixed folder under /etc.
        "internalCertManagement": {"enable": True},
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"qps": 200, "burst": 400},
        "controller": {"groupKindConcurrency": {"Job.batch": 5, "Workload.kueue.x-k8s.io": 5}},
        "featureGates": {"VisibilityOnDemand": False},
        "integrations": {"frameworks": list(_FRAMEWORKS)},
    }


def _jobset(ports: Ports, certificates: Path) -> Mapping[str, Any]:
    return {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{ports.health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": ports.webhook, "host": "127.0.0.1", "certDir": str(certificates)},
        "internalCertManagement": {"enable": False},
        "leaderElection": {"leaderElect": False},
    }


def _trainer(ports: Ports, certificates: Path) -> Mapping[str, Any]:
    return {
        "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{ports.health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": ports.webhook, "host": "127.0.0.1"},
        "certManagement": {"enable": False},
        "leaderElection": {"leaderElect": False},
    }


CONTROLLERS: Mapping[str, Controller] = {
    "jobset": Controller("crd/bases", "webhook/manifests.yaml", _jobset, lambda ports: ()),
    "trainer": Controller(
        crds="crds",
        webhooks="webhook/manifests.yaml",
        configuration=_trainer,
        arguments=lambda ports: (),
        runtimes="runtimes/torch_distributed.yaml",
        needs=("jobset",),
    ),
    "training-operator": Controller(
        crds="crds",
        webhooks="",
        configuration=None,
        arguments=lambda ports: (
            "--enable-scheme=pytorchjob",
            "--metrics-bind-address=0",
            f"--health-probe-bind-address=127.0.0.1:{ports.health}",
            f"--webhook-server-port={ports.webhook}",
        ),
        secret=("kubeflow", "training-operator-webhook-cert"),
        must_exist="/tmp/k8s-webhook-server/serving-certs/tls.crt",  # noqa: S108 - its name is in the program
    ),
    "kueue": Controller(
        crds="crd/bases",
        webhooks="webhook/manifests.yaml",
        configuration=_kueue,
        arguments=lambda ports: (),
        secret=("kueue-system", "kueue-webhook-server-cert"),
    ),
}
"""Start-up of every program, by its toolset."""


class Controllers:
    """Some of `CONTROLLERS`, running against a cluster; a context manager.

    Args:
        cluster: the control plane, started.
        names: the controllers to run; those that they need start before them.
        feature_gates: feature gates of Kueue that differ from its defaults.

    Raises:
        ClusterError: a program ended, or is not ready in time; the message ends with its last log lines.
        binaries.BinariesError: a program is missing and cannot be built.
    """

    def __init__(self, cluster: Cluster, *names: str, feature_gates: Mapping[str, bool] | None = None) -> None:
        needed = {other for name in names for other in (*CONTROLLERS[name].needs, name)}
        self.names = [name for name in CONTROLLERS if name in needed]
        self._feature_gates = dict(feature_gates or {})
        self._cluster = cluster
        self._folder = cluster.folder / "controllers"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, _Launch] = {}

    def start(self) -> None:
        """Install the CRDs, start the programs, and point the API server at their webhooks."""
        try:
            for name in self.names:
                self._start(name, CONTROLLERS[name])
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the programs; their CRDs stay."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def kill(self, name: str) -> None:
        """Kill one program without warning; its webhooks stay. `revive` starts it again."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def revive(self, name: str) -> None:
        """Start a killed program again, on the port where its webhooks are called."""
        self._launch(name, self._started[name])

    def log(self, name: str) -> Path:
        """Return the path of a program's log."""
        return self._folder / name / "log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def _start(self, name: str, controller: Controller) -> None:
        programs = binaries.ensure(name)
        manifests = programs / "manifests"
        webhook, health = free_ports(2)
        ports = Ports(webhook, health)
        folder = self._folder / name
        # controller-runtime looks for a certificate below $TMPDIR unless configured otherwise.
        certificates = folder / "k8s-webhook-server" / "serving-certs"
        certificates.mkdir(parents=True, exist_ok=True)
        own = self._cluster.certificates
        for given, file in (("admin.crt", "tls.crt"), ("admin.key", "tls.key"), ("ca.crt", "ca.crt")):
            shutil.copyfile(own / given, certificates / file)
        authority = base64.b64encode((own / "ca.crt").read_bytes()).decode()
        self._apply(_of_one_version(_documents(manifests / controller.crds), ports, authority))
        # kubectl fails on a CRD that has no condition yet.
        self._patiently("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        if controller.secret is not None:
            self._apply(_secret(*controller.secret, own))
        if controller.must_exist:
            Path(controller.must_exist).parent.mkdir(parents=True, exist_ok=True)
            Path(controller.must_exist).touch()
        arguments = [*controller.arguments(ports)]
        if controller.configuration is not None:
            config = folder / "config.yaml"
            values = dict(controller.configuration(ports, certificates))
            if name == "kueue":
                values["featureGates"] = {**values["featureGates"], **self._feature_gates}
            config.write_text(yaml.safe_dump(values))
            arguments.append(f"--config={config}")
        environment = self._cluster.environment() | {
            "KUBECONFIG": str(self._cluster.kubeconfig),
            "TMPDIR": str(folder),
        }
        port = ports.webhook if controller.webhooks else ports.health
        self._started[name] = _Launch((str(programs / name), *arguments), environment, port)
        self._launch(name, self._started[name])
        if controller.webhooks:
            documents = _documents(manifests / controller.webhooks)
            self._apply(_pointed(documents, name, ports, authority))
        if controller.runtimes:
            # A webhook that may not answer yet has to admit it.
            self._patiently("apply", "--server-side", "-f", str(manifests / controller.runtimes))

    def _launch(self, name: str, launch: _Launch) -> None:
        self._processes[name] = start_logged(launch.command, self.log(name), launch.environment, self._folder / name)
        wait_for(lambda: self._listens(name, launch.port), f"{name} on port {launch.port}", START_TIMEOUT_S)

    def _listens(self, name: str, port: int) -> bool:
        if (status := self._processes[name].poll()) is not None:
            tail = self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
            raise ClusterError(f"{name} ended with status {status}; its last words:\n" + "\n".join(tail))
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def _apply(self, documents: Iterable[Mapping[str, Any]]) -> None:
        # Server-side: the CRDs are too long for the annotation that kubectl apply writes.
        text = "\n---\n".join(json.dumps(document) for document in documents)
        self._cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=text)

    def _patiently(self, *arguments: str) -> None:
        """Run kubectl until it succeeds."""

        def done() -> bool:
            try:
                self._cluster.kubectl(*arguments)
            except ClusterError:
                return False
            return True

        wait_for(done, f"kubectl {' '.join(arguments)}", START_TIMEOUT_S)


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(path.glob("*.yaml")) if path.is_dir() else [path]:
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            if document and document.get("kind") != "Kustomization":
                yield document


def _of_one_version(crds: Iterable[dict[str, Any]], ports: Ports, authority: str) -> Iterator[dict[str, Any]]:
    """Yield CRDs with only the stored version, so that nothing is converted.

    A CRD with several versions gets one conversion webhook, which Kueue's certificate manager writes to and nobody
    calls.
    """
    for crd in crds:
        versions = crd["spec"]["versions"]
        if len(versions) > 1:
            crd["spec"]["versions"] = [version for version in versions if version["storage"]]
            client = {"url": f"https://127.0.0.1:{ports.webhook}/convert", "caBundle": authority}
            webhook = {"conversionReviewVersions": ["v1"], "clientConfig": client}
            crd["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
        yield crd


def _pointed(
    configurations: Iterable[dict[str, Any]], name: str, ports: Ports, authority: str
) -> Iterator[dict[str, Any]]:
    """Yield webhook configurations that call 127.0.0.1, under names that no certificate manager looks for."""
    for configuration in configurations:
        kind = "mutating" if configuration["kind"].startswith("Mutating") else "validating"
        configuration["metadata"]["name"] = f"{name}-{kind}-on-loopback"
        configuration["webhooks"] = [
            {**item, "clientConfig": _client(item["clientConfig"], ports, authority)}
            for item in configuration["webhooks"]
            if any(group in _WATCHED for rule in item["rules"] for group in rule["apiGroups"])
        ]
        yield configuration


def _client(config: Mapping[str, Any], ports: Ports, authority: str) -> dict[str, str]:
    return {"url": f"https://127.0.0.1:{ports.webhook}{config['service']['path']}", "caBundle": authority}


def _secret(namespace: str, name: str, certificates: Path) -> list[dict[str, Any]]:
    """Return the namespace and the Secret that a certificate manager would keep there."""
    files = {"tls.crt": "admin.crt", "tls.key": "admin.key", "ca.crt": "ca.crt", "ca.key": "ca.key"}
    data = {key: base64.b64encode((certificates / file).read_bytes()).decode() for key, file in files.items()}
    metadata = {"name": name, "namespace": namespace}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data},
    ]

"""A throw-away Kubernetes control plane: real etcd, API server, controller manager and scheduler, with kwok's nodes.

    python tools/cluster.py start --nodes examples/clusters/mixed.yaml    # prints the path of its kubeconfig
    python tools/cluster.py list
    python tools/cluster.py stop

and, from Python,

    with Cluster(nodes=Path("examples/clusters/mixed.yaml")) as cluster:
        cluster.apply(Path("crds"))
        print(cluster.kubectl("get", "nodes"))

kwokctl starts it without a container engine, as any user, on free ports of 127.0.0.1; any number may run at once. It
never reads or writes the user's own kubeconfig, nor `~/.kube` or `~/.kwok`: every program that it starts gets its own
home folder, no `KUBECONFIG`, and `--kubeconfig`. It stops at the end of the `with` block, also on Ctrl-C; the next
start removes what a killed process left behind. The programs of `binaries.py` and PyYAML are needed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

import yaml

import binaries
from processes import adopt_orphans, has_ended, is_alive, start_logged

START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 20
POLL_S = 0.1
FIRST_PORT, CLIENT_PORTS = 20000, 32768
"""Range of the ports used: below the first port that Linux gives to clients (ip_local_port_range)."""
DEFAULT_NAME = "tilecast"

_COMPONENTS = {
    "etcdBinary": "etcd",
    "kubeApiserverBinary": "kube-apiserver",
    "kubeControllerManagerBinary": "kube-controller-manager",
    "kubeSchedulerBinary": "kube-scheduler",
    "kubectlBinary": "kubectl",
    "kwokControllerBinary": "kwok",
}
"""Option of kwokctl for the path of each program."""

_PORTS = (
    "etcdPort",
    "etcdPeerPort",
    "kubeApiserverPort",
    "kubeControllerManagerPort",
    "kubeSchedulerPort",
    "kwokControllerPort",
)
"""Options of kwokctl for ports. By default it counts down from the same number in every process."""

_ALONE = ("kube-controller-manager", "kube-scheduler")
"""Components without leader election, as there is only one of each.

With it, they would end if they could not renew their lease for ten seconds, as on a busy machine, and nobody would
restart them.
"""

ValueT = TypeVar("ValueT")


class ClusterError(Exception):
    """The control plane cannot do what was requested; the message is what the failing program said."""


class Access:
    """Access to a control plane: its programs and its kubeconfig, in a folder that is the home of started programs.

    Raises:
        ClusterError: from every method, when a program fails.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig.yaml"

    def kubectl(self, *arguments: str, input: str | None = None) -> str:  # noqa: A002 - as in subprocess.run
        """Return what `kubectl ARGUMENTS` prints, with `input` on its standard input.

        Raises:
            ClusterError: kubectl exits with an error; the message is its standard error.
        """
        done = self._run(self._kubectl(*arguments), text=input)
        if done.returncode:
            raise ClusterError(done.stderr.strip() or done.stdout.strip())
        return done.stdout

    def apply(self, manifest: str | Path) -> str:
        """Apply YAML text, or a file, or every file of a folder."""
        if isinstance(manifest, Path):
            return self.kubectl("apply", "-f", str(manifest))
        return self.kubectl("apply", "-f", "-", input=manifest)

    def server(self) -> str:
        """Return the address of the API server."""
        return str(self._config()["clusters"][0]["cluster"]["server"])

    def tls(self, *, as_administrator: bool = False) -> ssl.SSLContext:
        """Return a context that trusts the API server and authenticates as the administrator, or not at all."""
        config = self._config()
        context = ssl.create_default_context(cafile=config["clusters"][0]["cluster"]["certificate-authority"])
        if as_administrator:
            user = config["users"][0]["user"]
            context.load_cert_chain(user["client-certificate"], user["client-key"])
        return context

    def environment(self) -> dict[str, str]:
        """Return the environment of this process without access to the user's own clusters."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "KWOK_", "HELM_"))
        }
        direct = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        return environment | direct | {"HOME": str(self.folder)}

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load(self.kubeconfig.read_text())
        return config

    def _kubectl(self, *arguments: str) -> list[str]:
        return [str(self.folder / "programs" / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]

    def _run(
        self, command: list[str], *, text: str | None = None, extra: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        # In its own session, so that Ctrl-C ends only this process, which then stops the others in order.
        return subprocess.run(
            command,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            env=self.environment() | dict(extra or {}),
            start_new_session=True,
            check=False,
        )


class Cluster(Access):
    """One control plane; `start` and `stop` it, or use it as a context manager.

    Args:
        name: the name by which another process finds it again; unique by default.
        nodes: a YAML file of Node objects to create; kwok keeps them Ready.
        audit_policy: a file with an audit policy; the log is then `audit_log`.
        components: the programs to start; None starts all of them.
        stages: a YAML file of kwok's Stages, which replace those that end every pod of a Job at once.

    Raises:
        ClusterError: from every method, when a program fails.
        binaries.BinariesError: from `start`, when the programs are missing and cannot be built.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        nodes: Path | None = None,
        audit_policy: Path | None = None,
        components: Sequence[str] | None = None,
        stages: Path | None = None,
    ) -> None:
        self.name = name or f"{DEFAULT_NAME}-{os.getpid()}-{time.monotonic_ns() % 10**9}"
        super().__init__(_clusters_folder() / self.name)
        self.audit_log = self.folder / "clusters" / self.name / "logs" / "audit.log"
        self.certificates = self.folder / "clusters" / self.name / "pki"
        self._nodes = nodes
        self._audit_policy = audit_policy
        self._only = components
        self._stages = stages

    def start(self, *, detached: bool = False) -> None:
        """Start every program and wait until the API server serves the `default` namespace.

        Args:
            detached: whether it outlives this process, until it is stopped by its name.
        """
        programs = binaries.ensure("controlplane")
        sweep()
        if not detached:
            adopt_orphans()
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            raise ClusterError(f"a cluster named {self.name} is there already: stop it first") from None
        try:
            (self.folder / "owner").write_text("" if detached else str(os.getpid()))
            (self.folder / "programs").symlink_to(programs)
            config = self.folder / "kwokctl.yaml"
            stages = "" if self._stages is None else f"---\n{self._stages.read_text()}"
            config.write_text(yaml.safe_dump(self._configuration()) + stages)
            waited = f"--wait={START_TIMEOUT_S}s"
            self._kwokctl("create", "cluster", f"--config={config}", f"--kubeconfig={self.kubeconfig}", waited)
            self._await_api()
            if self._nodes:
                self.kubectl("create", "-f", str(self._nodes))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop every program and delete the files; do nothing if there is nothing to stop."""
        if not self.folder.exists():
            return
        processes = [int(_read(path)) for path in self.folder.glob("clusters/*/pids/*.pid")]
        try:
            self._kwokctl("delete", "cluster", f"--kubeconfig={self.kubeconfig}")
        except (ClusterError, OSError) as error:
            binaries.say(f"kwokctl could not stop {self.name}, its processes are killed: {error}")
        for pid in filter(is_alive, processes):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: all(map(has_ended, processes)), f"the processes of {self.name} to end", STOP_TIMEOUT_S)
        shutil.rmtree(self.folder)

    def kill(self, program: str) -> None:
        """Kill one program of the control plane without warning; `revive` starts it again."""
        pid = self.pid(program)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: has_ended(pid), f"{program} to end", STOP_TIMEOUT_S)
        # kwokctl takes a zombie for a running program.
        self._pid_file(program).unlink()

    def revive(self) -> None:
        """Start the programs that have ended, and wait until the API server answers.

        A program that ends at once, because its port is not free again yet, is started a second time.
        """
        try:
            self._kwokctl("start", "cluster", f"--wait={START_TIMEOUT_S / 3:.0f}s")
        except ClusterError:
            self._kwokctl("start", "cluster", f"--wait={START_TIMEOUT_S}s")
        self._await_api()

    @contextmanager
    def paused(self, program: str) -> Iterator[None]:
        """Suspend one program of the control plane, with its connections open, as on a machine that hangs."""
        pid = self.pid(program)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def _configuration(self) -> dict[str, object]:
        options: dict[str, object] = {"runtime": "binary", "bindAddress": "127.0.0.1"}
        options |= {option: str(self.folder / "programs" / program) for option, program in _COMPONENTS.items()}
        options |= dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        if self._only is not None:
            options["components"] = list(self._only)
        if self._audit_policy:
            options["kubeAuditPolicy"] = str(self._audit_policy.resolve())
        unelected = [{"key": "leader-elect", "value": "false"}]
        return {
            "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
            "kind": "KwokctlConfiguration",
            "metadata": {"name": self.name},
            "options": options,
            "componentsPatches": [{"name": name, "extraArgs": unelected} for name in _ALONE],
        }

    def _await_api(self) -> None:
        wait_for(lambda: self._run(self._kubectl("get", "namespace", "default")).returncode == 0, "a namespace")

    def pid(self, program: str) -> int:
        """Return the process id of a component."""
        return int(_read(self._pid_file(program)))

    def _pid_file(self, program: str) -> Path:
        return self.folder / "clusters" / self.name / "pids" / f"{program}.pid"

    def _kwokctl(self, *arguments: str) -> None:
        done = self._run(
            [str(self.folder / "programs" / "kwokctl"), f"--name={self.name}", *arguments],
            extra={"KWOK_WORKDIR": str(self.folder)},
        )
        if done.returncode:
            raise ClusterError(" | ".join(done.stderr.strip().splitlines()[-5:]))


class NamedCluster(Cluster):
    """An existing cluster, for instance of kind; it is neither started nor stopped.

    Args:
        context: its name in a kubeconfig. The current context there does not matter.
        nodes: a YAML file of Node objects, which are created and, in the end, deleted. A kwok of our own keeps them
            Ready and ignores every node that lacks its annotation.
        kubeconfig: the file; the user's own by default.
    """

    def __init__(self, context: str, *, nodes: Path | None = None, kubeconfig: Path | None = None) -> None:
        super().__init__(nodes=nodes)
        self._context = context
        self._given = [] if kubeconfig is None else [f"--kubeconfig={kubeconfig}"]
        self._kwok: subprocess.Popen[bytes] | None = None

    def start(self, *, detached: bool = False) -> None:
        """Copy the access to it, create the nodes, and start a kwok that keeps them Ready."""
        programs = binaries.ensure("controlplane")
        self.folder.mkdir(parents=True)
        (self.folder / "programs").symlink_to(programs)
        view = ("config", "view", "--minify", "--flatten", "--raw", f"--context={self._context}", *self._given)
        done = subprocess.run([str(programs / "kubectl"), *view], capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(self.folder)
            raise ClusterError(f"context {self._context}: {done.stderr.strip()}")
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(done.stdout)
        if self._nodes:
            self.kubectl("apply", "-f", str(self._nodes))
            command = [str(programs / "kwok"), f"--kubeconfig={self.kubeconfig}", *_TENDED]
            self._kwok = start_logged(command, self.folder / "kwok.log", self.environment())

    def stop(self) -> None:
        """Delete the nodes and the copy."""
        if self._nodes and self.kubeconfig.exists():
            self.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", str(self._nodes))
        if self._kwok is not None:
            self._kwok.terminate()
            self._kwok.wait(STOP_TIMEOUT_S)
        shutil.rmtree(self.folder, ignore_errors=True)


_TENDED = ("--manage-all-nodes=false", "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake")
"""Arguments of a kwok that is not the cluster's own."""


def wait_for(probe: Callable[[], ValueT | None], what: str, timeout_s: float = START_TIMEOUT_S) -> ValueT:
    """Return the first true value of `probe`, which is called repeatedly.

    Raises:
        ClusterError: there was none within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (result := probe()):
        if time.monotonic() > deadline_s:
            raise ClusterError(f"waited {timeout_s:.0f} s in vain for {what}")
        time.sleep(POLL_S)
    return result


def running() -> list[Cluster]:
    """Return the clusters of this cache folder, whoever started them."""
    return [Cluster(path.parent.name) for path in sorted(_clusters_folder().glob("*/owner"))]


def sweep() -> None:
    """Stop clusters whose owner has ended without stopping them."""
    for cluster in running():
        owner = _read(cluster.folder / "owner")
        if owner and not is_alive(int(owner)):
            binaries.say(f"stopping {cluster.name}, which a killed process left behind")
            cluster.stop()


def _clusters_folder() -> Path:
    return binaries.cache_folder() / "clusters"


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 without a listener, distinct because each is held while the others are found.

    They are below the range that the system gives to clients. Otherwise a restarting program could find its port taken
    by a client that tries to reach it, even by a connection to itself.
    """
    sockets = dict[int, socket.socket]()
    try:
        while len(sockets) < count:
            port = FIRST_PORT + secrets.randbelow(CLIENT_PORTS - FIRST_PORT)
            if port in sockets:
                continue
            sockets[port] = socket.socket()
            try:
                sockets[port].bind(("127.0.0.1", port))
            except OSError:
                sockets.pop(port).close()
        return list(sockets)
    finally:
        for each in sockets.values():
            each.close()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def exit_on_sigterm() -> None:
    """Make SIGTERM end this process as Ctrl-C does, so that `with` blocks and `finally` run."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def main() -> int:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Start and stop a throw-away Kubernetes control plane.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    start = verbs.add_parser("start", help="start one and print the path of its kubeconfig")
    start.add_argument("--name", default=DEFAULT_NAME)
    start.add_argument("--nodes", type=Path, help="YAML file of Node objects to create")
    start.add_argument("--audit-policy", type=Path, help="audit policy; switches the audit log on")
    stop = verbs.add_parser("stop", help="stop it and delete its files")
    stop.add_argument("--name", default=DEFAULT_NAME)
    verbs.add_parser("list", help="print the names of the running ones")
    arguments = parser.parse_args()
    exit_on_sigterm()
    try:
        if arguments.verb == "start":
            cluster = Cluster(arguments.name, nodes=arguments.nodes, audit_policy=arguments.audit_policy)
            cluster.start(detached=True)
            print(cluster.kubeconfig)
        elif arguments.verb == "stop":
            Cluster(arguments.name).stop()
        else:
            for cluster in running():
                print(cluster.name)
    except (ClusterError, binaries.BinariesError) as error:
        binaries.say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

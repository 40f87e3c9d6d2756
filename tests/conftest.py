"""Fixtures that start real programs. Each process of a test run that needs a control plane starts one."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import processes  # noqa: E402
from binaries import BinariesError, ensure  # noqa: E402
from cluster import Cluster, NamedCluster  # noqa: E402
from required import is_required  # noqa: E402
from tilecast import hardware  # noqa: E402

if TYPE_CHECKING:
    from story import Scene

# No example has a deadline, and none is too slow to draw: a shared machine may take any time over one.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

CLUSTER_TIMEOUT_S = 1800
"""Timeout of cluster tests in seconds, enough to build the control plane from source on first use."""


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background processes with SIGINT ignored, and processes of the tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault(processes.MARK, uuid.uuid4().hex)
os.environ["HF_HUB_OFFLINE"], os.environ["HF_HUB_CACHE"] = "1", os.devnull
LEFTOVERS_S = 10.0
"""Time that processes get to end after they were asked to, in seconds."""


def _left() -> dict[int, str]:
    """Return the processes that the tests started and that still run, by id.

    Trackers of multiprocessing are left out: each ends with the process that it belongs to.
    """
    started = processes.marked(os.environ[processes.MARK])
    return {pid: command for pid, command in started.items() if "multiprocessing.resource_tracker" not in command}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a process outlives the tests.

    Workers of pytest-xdist do not check; the process that started them does.
    """
    if hasattr(session.config, "workerinput"):
        return
    ends_s = time.monotonic() + LEFTOVERS_S
    while (left := _left()) and time.monotonic() < ends_s:
        time.sleep(0.2)
    for pid, command in left.items():
        sys.stderr.write(f"\nleft behind by the tests: {pid} {command[:200]}\n")
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


STORIES = pytest.StashKey[set[str]]()
"""Ids of the tests that run on kind."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[STORIES] = {item.nodeid for item in items if item.get_closest_marker("kind")}
    for item in items:
        if item.get_closest_marker("cluster") or item.get_closest_marker("kind"):
            item.add_marker(pytest.mark.timeout(CLUSTER_TIMEOUT_S))
    # A worker that begins a long test last keeps the others waiting.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def need(feature: str, reason: str) -> NoReturn:
    """Skip a test that needs a feature of the machine, or fail it where `TILECAST_REQUIRE` names the feature."""
    if is_required(feature):
        pytest.fail(f"TILECAST_REQUIRE names {feature}, and {reason}", pytrace=False)
    pytest.skip(reason)


def ensure_or_fail(toolset: str) -> Path:
    try:
        return ensure(toolset)
    except BinariesError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def own_links() -> Iterator[None]:
    """Forget the link files that a test loads by `hardware.set_link_folder`."""
    yield
    hardware.set_link_folder("")


@pytest.fixture(scope="session")
def binaries() -> Path:
    """Return the folder that holds etcd, kube-apiserver, kubectl, kwokctl and the programs beside them."""
    return ensure_or_fail("controlplane")


@pytest.fixture(scope="session")
def chart_tools() -> Path:
    """Return the folder of helm and kubeconform."""
    return ensure_or_fail("chart")


@pytest.fixture(scope="session")
def cluster(binaries: Path) -> Iterator[Cluster]:
    """Yield a control plane with an audit log, the nodes of `examples/clusters/mixed.yaml` and the CRDs.

    If `TILECAST_TEST_CONTEXT` names a cluster, yield that one instead, without an audit log.
    """
    nodes, policy = ROOT / "examples" / "clusters" / "mixed.yaml", ROOT / "tests" / "e2e" / "audit-policy.yaml"
    context = os.environ.get("TILECAST_TEST_CONTEXT")
    with NamedCluster(context, nodes=nodes) if context else Cluster(nodes=nodes, audit_policy=policy) as started:
        started.apply(ROOT / "crds")
        started.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        yield started


@pytest.fixture(scope="session")
def shared_bare_cluster(binaries: Path) -> Iterator[Cluster]:
    """Yield the control plane that all uses of `bare_cluster` share."""
    nodes, policy = ROOT / "examples" / "clusters" / "mixed.yaml", ROOT / "tests" / "e2e" / "audit-policy.yaml"
    with Cluster(nodes=nodes, audit_policy=policy, components=("etcd", "kube-apiserver")) as started:
        started.apply(ROOT / "crds")
        started.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
        yield started


@pytest.fixture(scope="module")
def bare_cluster(shared_bare_cluster: Cluster) -> Iterator[Cluster]:
    """Yield a control plane that tests may break, and that starts fast.

    It has etcd and the API server with an audit log, the nodes of `cluster` as objects without a controller, and
    the CRDs. Jobs of an earlier module are deleted, because the operator of the next module would answer them.
    """
    yield shared_bare_cluster
    shared_bare_cluster.kubectl("delete", "trainingjobs.tilecast.dev", "--all", "--all-namespaces", "--wait=false")


@pytest.fixture(scope="session")
def kind_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster of kind that all its stories share."""
    # Imported here, because that module uses names of this one.
    import kind_cluster

    with kind_cluster.started(tmp_path_factory.mktemp("kind")) as cluster:
        yield cluster


@pytest.fixture
def team(kind_cluster: Cluster) -> Iterator["Scene"]:
    """Yield a scene with a namespace for jobs on kind; afterwards delete the namespace and all pools."""
    from story import TEAM, Scene  # that module uses names of this one

    kind_cluster.kubectl("create", "namespace", TEAM)
    yield Scene(kind_cluster.kubectl, lambda: "", "")
    kind_cluster.kubectl("delete", "namespace", TEAM)
    kind_cluster.kubectl("delete", "gpupools", "--all")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how many stories ran on kind, if any were collected."""
    stories = config.stash.get(STORIES, set[str]())
    outcomes = ("passed", "failed", "error", "skipped")
    reports = {name: {report.nodeid for report in terminalreporter.stats.get(name, ())} & stories for name in outcomes}
    if any(reports.values()):
        counts = ", ".join(f"{len(ids)} {name}" for name, ids in reports.items() if ids)
        terminalreporter.write_line(f"stories on kind: {counts}")


class HelmError(Exception):
    """helm failed; the message is its standard error."""


Helm = Callable[..., str]


@pytest.fixture(scope="session")
def helm(chart_tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Return a function that runs helm and returns its output.

    helm reaches no cluster except one that `--kubeconfig` names.
    """
    home = tmp_path_factory.mktemp("helm")
    environment = {"HOME": str(home), "PATH": "", "NO_PROXY": "127.0.0.1"}

    def run(*arguments: str) -> str:
        command = [str(chart_tools / "helm"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise HelmError(done.stderr)
        return done.stdout

    return run

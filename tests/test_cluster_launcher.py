"""The launcher of throw-away clusters finds its programs, ignores the user's own, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import binaries as builder
from cluster import Cluster, ClusterError, NamedCluster, running
from processes import is_alive

TOOLS = Path(__file__).resolve().parent.parent / "tools"
HOLD = (
    "import sys, time; from cluster import Cluster\nwith Cluster(sys.argv[1]): print('up', flush=True); time.sleep(600)"
)


def launch(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=TOOLS, capture_output=True, text=True, check=False
    )


def hold(name: str) -> subprocess.Popen[str]:
    """Start a process that keeps a cluster of that name running, and return it once the cluster is up."""
    held = subprocess.Popen([sys.executable, "-c", HOLD, name], cwd=TOOLS, stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    assert held.stdout.readline() == "up\n"
    return held


def assets(folder: Path, *programs: str) -> Path:
    folder.mkdir()
    for program in programs:
        (folder / program).touch(mode=0o755)
    return folder


def test_without_go_one_line_says_what_to_do(tmp_path: Path) -> None:
    done = launch("binaries.py", "controlplane", PATH="", TILECAST_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "go: not found" in done.stderr
    assert "KUBEBUILDER_ASSETS" in done.stderr


def test_kubebuilder_assets_come_first(tmp_path: Path) -> None:
    given = assets(tmp_path / "given", *builder.TOOLSETS["controlplane"].programs)
    cache = tmp_path / "cache"
    done = launch(
        "binaries.py", "controlplane", PATH="", TILECAST_CACHE=str(cache), KUBEBUILDER_ASSETS=str(given)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.parent == cache
    assert {path.resolve().parent for path in folder.iterdir()} == {given}


def test_incomplete_assets_are_named_and_not_used(tmp_path: Path) -> None:
    given = assets(tmp_path / "given", "kube-apiserver", "kubectl")
    done = launch("binaries.py", "controlplane", PATH="", TILECAST_CACHE=str(tmp_path), KUBEBUILDER_ASSETS=str(given))
    assert done.returncode == 1
    assert "lacks etcd" in done.stderr


@pytest.mark.cluster
def test_the_users_own_configuration_is_neither_read_nor_written(binaries: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".kube").mkdir(parents=True)
    own = home / ".kube" / "config"
    own.write_text("this is not a kubeconfig: whoever reads it fails\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "KUBECONFIG": str(own)}
    environment["TILECAST_CACHE"] = str(builder.cache_folder())
    name = f"own-{os.getpid()}"
    started = launch("cluster.py", "start", "--name", name, **environment)
    try:
        assert started.returncode == 0, started.stderr
        assert name in launch("cluster.py", "list", **environment).stdout.split()
        again = launch("cluster.py", "start", "--name", name, **environment)
        assert again.returncode == 1
        assert "is there already" in again.stderr
    finally:
        stopped = launch("cluster.py", "stop", "--name", name, **environment)
    assert stopped.returncode == 0, stopped.stderr
    assert sorted(home.rglob("*")) == [home / ".kube", own]
    assert own.read_text().startswith("this is not a kubeconfig")
    assert not Path(started.stdout.strip()).parent.exists()


@pytest.mark.cluster
def test_ctrl_c_stops_the_cluster(binaries: Path) -> None:
    cluster = Cluster(f"interrupted-{os.getpid()}")
    held = hold(cluster.name)
    held.send_signal(signal.SIGINT)
    held.wait(60)
    assert not cluster.folder.exists()


@pytest.mark.cluster
def test_the_next_start_sweeps_what_a_killed_process_left(binaries: Path) -> None:
    left = Cluster(f"left-{os.getpid()}")
    held = hold(left.name)
    processes = [int(path.read_text()) for path in left.folder.glob("clusters/*/pids/*.pid")]
    assert len(processes) == 5
    held.kill()
    held.wait(60)
    assert left.folder.exists()

    # Two clusters at once do not take each other's ports.
    with Cluster() as other:
        assert other.kubectl("get", "namespace", "default")
        assert left.name not in [cluster.name for cluster in running()]
        assert not any(map(is_alive, processes))


@pytest.mark.cluster
def test_a_failing_command_carries_kubectls_own_words(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match='namespaces "nowhere" not found'):
        cluster.kubectl("get", "namespace", "nowhere")


@pytest.mark.cluster
def test_a_named_context_is_used_and_the_current_one_never(
    bare_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load(bare_cluster.kubeconfig.read_text())
    context = {**config["contexts"][0], "name": "named"}
    config["clusters"].append({"name": "elsewhere", "cluster": {"server": "https://127.0.0.1:1"}})
    elsewhere = {"name": "elsewhere", "context": {**context["context"], "cluster": "elsewhere"}}
    config |= {"contexts": [context, elsewhere], "current-context": "elsewhere"}
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "lent"}}
    (tmp_path / "nodes.yaml").write_text(yaml.safe_dump(node))

    with NamedCluster("named", nodes=tmp_path / "nodes.yaml") as cluster:
        assert "lent" in cluster.kubectl("get", "nodes")
        assert "KUBECONFIG" not in cluster.environment()
    assert not cluster.folder.exists()
    assert "lent" not in bare_cluster.kubectl("get", "nodes"), "and it is still there, without what was lent"
    with pytest.raises(ClusterError, match="nobody"):
        NamedCluster("nobody").start()

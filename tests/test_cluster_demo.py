"""`make cluster-demo` as a user runs it: to its end, and interrupted half way."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import Cluster, running

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, str(ROOT / "tools" / "demo.py")]


def own_clusters(pid: int) -> list[Cluster]:
    return [cluster for cluster in running() if f"-{pid}-" in cluster.name]


def left_behind(pid: int) -> list[str]:
    return [cluster.name for cluster in own_clusters(pid)]


def test_it_shows_advice_for_every_example(binaries: Path) -> None:
    # The operator does not inherit the caller's settings.
    environment = os.environ | {"TILECAST_DATA": "/nowhere"}
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as demo:
        shown, problems = demo.communicate(timeout=300)
    assert demo.returncode == 0, problems
    jobs = sorted(path.stem for path in (ROOT / "examples" / "jobs").glob("*.yaml"))
    assert shown.count("tilecast.dev/recommended-pool: ") == len(jobs)
    table = [line.split()[1] for line in shown.splitlines() if line.startswith("default ")]
    assert table == jobs
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith("gpupool.tilecast.dev/")}
    assert {name.partition("/")[2] for name in rows} == {"bargain", "h100-sxm", "l4", "t4"}, "a100-80 is withdrawn"
    assert rows["gpupool.tilecast.dev/t4"][2] == "0x4"
    assert re.search(r"thrifty: .*replaces .* on \d+ (?!bargain)", shown)
    assert left_behind(demo.pid) == []


def test_ctrl_c_stops_everything(binaries: Path) -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        line = next(line for line in demo.stdout if "the operator is ready" in line)
        (port,) = re.findall(r"http://127.0.0.1:(\d+)", line)
        socket.create_connection(("127.0.0.1", int(port))).close()
        pids = [path.read_text().strip() for own in own_clusters(demo.pid) for path in own.folder.glob("**/pids/*.pid")]
        assert len(pids) > 4
        demo.send_signal(signal.SIGINT)
        _, problems = demo.communicate(timeout=120)
    assert demo.returncode == 130
    assert problems == "interrupted; everything is stopped\n"
    assert left_behind(demo.pid) == []
    assert [pid for pid in pids if Path("/proc", pid).exists()] == [], "not even as zombies"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))

"""The engine for kind on a machine without Docker: it starts a privileged container, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import archives
import kind_node
from conftest import ROOT, need
from kind_engine import Engine

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]

ENGINE = Engine("tilecast-try")
IMAGE = "localhost/sleeper:1"
MACHINE = (Path("/proc/self/mountinfo"), Path("/proc/net/dev"), Path("/proc/net/route"))
PROGRAM = """
#include <unistd.h>
int main(void) { for (;;) pause(); }
"""
RUN = """
import sys, time
from kind_engine import Engine
from processes import adopt_orphans
engine, archive = Engine(sys.argv[1]), sys.argv[2]
adopt_orphans()
with engine.locked(), engine.running():
    engine.docker("load", "--input", archive)
    options = ("--privileged", "--network=none", "--restart=always", "--volume=/data")
    engine.docker("run", "--detach", *options, sys.argv[3])
    open("/proc/sys/vm/overcommit_memory", "w").write("1")
    print("started", flush=True)
    sys.stdin.readline()
print("ended", flush=True)
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an image of one small program, and return its archive."""
    if reason := kind_node.obstacle():
        need("kind", f"no engine can be started: {reason}")
    folder = tmp_path_factory.mktemp("sleeper")
    (folder / "sleeper.c").write_text(PROGRAM)
    subprocess.run(["cc", "-static", "-o", folder / "sleeper", folder / "sleeper.c"], check=True)
    layer = archives.layer({"/sleeper": folder / "sleeper"})
    archives.write(folder / "sleeper.tar", {IMAGE: archives.Contents([layer], ["/sleeper"])})
    return folder / "sleeper.tar"


def start(archive: Path) -> subprocess.Popen[str]:
    """Start a process that has an engine with a container, and that has changed a kernel setting."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    command = [sys.executable, "-c", RUN, ENGINE.name, str(archive), IMAGE]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "started\n", "the engine did not start"
    return process


def setting() -> str:
    return Path("/proc/sys/vm/overcommit_memory").read_text()


def machine() -> dict[str, list[str]]:
    """Return this machine's mount points, interfaces and routes."""
    columns = {"mountinfo": 4, "dev": 0, "route": 1}
    return {
        path.name: sorted(line.split()[columns[path.name]] for line in path.read_text().splitlines())
        for path in MACHINE
    }


def test_nothing_is_left_of_it_in_the_end(archive: Path) -> None:
    before = setting(), machine()
    process = start(archive)
    assert setting() == "1\n"
    assert any("sleeper" in each for each in ENGINE.leftovers())
    out, _ = process.communicate("\n", timeout=300)
    assert (process.returncode, out) == (0, "ended\n")
    assert ENGINE.leftovers() == []
    assert (setting(), machine()) == before


def test_the_next_run_ends_what_a_killed_one_left(archive: Path) -> None:
    before = setting(), machine()
    killed = start(archive)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert any("sleeper" in each for each in ENGINE.leftovers())
    process = start(archive)
    assert len(ENGINE.docker("ps", "--all", "--quiet").split()) == 1
    process.communicate("\n", timeout=300)
    assert process.returncode == 0 and ENGINE.leftovers() == []
    assert (setting(), machine()) == before


def test_a_second_run_waits_for_the_first(archive: Path) -> None:
    first = start(archive)
    waiting = subprocess.Popen(
        [sys.executable, "-c", f"from kind_engine import Engine\nwith Engine({ENGINE.name!r}).locked(): print('in')"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiting.stderr is not None
    assert waiting.stderr.readline() == "waiting for another run of kind on this machine\n"
    assert waiting.poll() is None
    first.communicate("\n", timeout=300)
    out, _ = waiting.communicate(timeout=300)
    assert out == "in\n"

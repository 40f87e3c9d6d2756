"""Processes that the tests and the demo start end with them; one that does not is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

import processes
from cluster import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc and prctl")

TOOLS = Path(__file__).resolve().parent.parent / "tools"
PARENT = """
import subprocess, sys, time
from processes import die_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn=die_with_parent)
print(child.pid, flush=True)
time.sleep(600)
"""
ORPHAN = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid)"


def test_a_process_ends_with_the_one_that_started_it() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=TOOLS, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert processes.is_alive(child)
        parent.kill()
    wait_for(lambda: not processes.is_alive(child), "the child to end", 30)


def test_orphans_are_seen_by_their_mark_and_taken_off_the_table() -> None:
    processes.adopt_orphans()
    mark = uuid.uuid4().hex
    environment = os.environ | {processes.MARK: mark}
    made = subprocess.run([sys.executable, "-c", ORPHAN], env=environment, capture_output=True, text=True, check=True)
    orphan = int(made.stdout)
    assert processes.marked(mark) == {orphan: "sleep 600"}
    assert not processes.has_ended(orphan)
    os.kill(orphan, signal.SIGKILL)
    wait_for(lambda: processes.has_ended(orphan), "the orphan to end", 30)
    assert processes.marked(mark) == {}
    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)


def test_a_process_that_still_executes_its_program_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "4194305"
    folder.mkdir()
    (folder / "exe").symlink_to("/bin/sleep")
    for name in ("environ", "cmdline"):
        (folder / name).touch()
    assert processes.marked("m", tmp_path) == {}
    (folder / "cmdline").write_bytes(b"sleep\x00600\x00")
    write = threading.Timer(0.05, (folder / "environ").write_bytes, [f"{processes.MARK}=m\0".encode()])
    write.start()
    assert processes.marked("m", tmp_path) == {4194305: "sleep 600"}


FAILING = """
import subprocess

def test_that_leaves_a_process_behind():
    subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=-3, stderr=-3)
"""


@pytest.mark.slow
def test_a_run_that_leaves_a_process_behind_fails_and_names_it(tmp_path: Path) -> None:
    tests, mark = Path(__file__).resolve().parent, uuid.uuid4().hex
    (tmp_path / "conftest.py").write_text(
        (tests / "conftest.py")
        .read_text()
        .replace("Path(__file__).resolve().parent.parent", f"__import__('pathlib').Path({str(tests.parent)!r})")
        .replace("LEFTOVERS_S = 10.0", "LEFTOVERS_S = 0.5")
    )
    (tmp_path / "test_leaves.py").write_text(FAILING)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path)],
        env=os.environ | {processes.MARK: mark}, capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    left = processes.marked(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert list(left.values()) == ["sleep 600"]
    assert done.returncode == 1 and "left behind by the tests" in done.stderr
    assert "sleep 600" in done.stderr

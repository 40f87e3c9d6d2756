"""Messages of `make e2e` where kind cannot run, and its list of stories, which leaves none out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import archives
import binaries
import kind_node
from conftest import ROOT


def test_one_line_says_why_the_stories_are_skipped(tmp_path: Path) -> None:
    """On a machine without Docker and without Debian's packages, a run passes, unless kind is required."""
    (tmp_path / "python3").symlink_to(sys.executable)
    command = [sys.executable, str(ROOT / "tools" / "kind_node.py"), "--", "false"]
    variables = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    for required, status in (("", 0), ("kind", 1)):
        environment = {**variables, "TILECAST_REQUIRE": required}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (status, ""), done.stderr
        assert re.fullmatch("the stories on kind are skipped: no Docker engine answers, and .+\n", done.stderr)


def test_where_an_engine_answers_the_command_runs_as_it_is(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\n")
    docker.chmod(0o755)
    command = [sys.executable, str(ROOT / "tools" / "kind_node.py"), "--", "sh", "-c", "echo $DOCKER_HOST; exit 3"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DOCKER_HOST": "unix:///users.sock"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "unix:///users.sock\n"), done.stderr


def test_make_e2e_leaves_no_story_out() -> None:
    named = set(re.findall(r"tests/test_\w+\.py", (ROOT / "Makefile").read_text()))
    for path in (ROOT / "tests").glob("test_*.py"):
        if re.search(r"pytest\.mark\.kind\b", path.read_text()):
            assert f"tests/{path.name}" in named or path.name.startswith("test_kind_"), path.name


def test_the_operator_of_kind_is_the_image_that_the_chart_asks_for() -> None:
    version = re.search(r"^appVersion: (\S+)$", (ROOT / "charts" / "tilecast" / "Chart.yaml").read_text(), re.MULTILINE)
    assert version is not None and f"localhost/tilecast:{version[1]}" == kind_node.OPERATOR


def test_equal_files_make_equal_layers(tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(b"x")
    os.utime(tmp_path / "program", (1, 1))
    first = archives.layer({"/usr/bin/program": tmp_path / "program"}, {"/bin": "usr/bin"})
    os.utime(tmp_path / "program", (2, 2))
    assert archives.layer({"/usr/bin/program": tmp_path / "program"}, {"/bin": "usr/bin"}) == first


def test_programs_of_a_node_are_left_to_those_who_run_one() -> None:
    names = {name for name, toolset in binaries.TOOLSETS.items() if toolset.of_node}
    assert names == {"containerd", "coredns", "crictl", "kube-router", "kubelet"}

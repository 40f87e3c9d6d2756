"""The commands of the README, the chart and the operator's page, run word by word on real kubelets."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster, wait_for
from conftest import ROOT, ensure_or_fail
from kind_cluster import ChartRelease, values_file
from kind_node import OPERATOR
from operator_process import is_answered
from story import TEAM, Scene
from test_releases import RELEASES, crds_of_today

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

Shell = Callable[..., str]
WAIT_S = 120
JOBS = [f"live-{number}" for number in range(10)]


@pytest.fixture
def bare(kind_cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster without any object of Tilecast, and clean it afterwards."""
    remove(kind_cluster)
    yield kind_cluster
    remove(kind_cluster)


def remove(cluster: Cluster) -> None:
    cluster.kubectl("delete", "crd", "--ignore-not-found", *crds_of_today())
    cluster.kubectl("delete", "namespace", "tilecast", TEAM, "--ignore-not-found")


@pytest.fixture
def shell(bare: Cluster) -> Shell:
    """Return `shell(COMMAND, in_folder=ROOT)`, which runs a command and returns its output.

    helm and kubectl find this cluster in their environment, as a user's do.
    """
    programs = bare.folder / "path"
    programs.mkdir(exist_ok=True)
    for program in (ensure_or_fail("chart") / "helm", bare.folder / "programs" / "kubectl"):
        if not (programs / program.name).exists():
            (programs / program.name).symlink_to(program.resolve())
    environment = bare.environment() | {"KUBECONFIG": str(bare.kubeconfig), "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(command: str, in_folder: Path = ROOT) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=in_folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    return run


def commands(page: str, beginning: str) -> list[str]:
    """Return the lines of the page's block that begins with that command, for a registry that this cluster has."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (block,) = (block for block in blocks if block.startswith(beginning))
    return [line.replace("REGISTRY", OPERATOR.partition("/")[0]) for line in block.splitlines()]


def test_the_readme_says_how_to_install_it_and_ask(shell: Shell, bare: Cluster) -> None:
    _, install, test, apply, get = commands("README.md", "docker build")
    notes = shell(f"{install} --wait")
    assert "Phase:          Succeeded" in shell(test)
    assert "llama-7b-pretrain created" in shell(apply)
    wait_for(lambda: "llama-7b-pretrain" in (shown := shell(get)) and "h100" in shown, "advice", WAIT_S)
    follow_the_notes(shell, notes, bare.folder)
    shell("helm uninstall tilecast --namespace tilecast --wait")


def follow_the_notes(shell: Shell, notes: str, folder: Path) -> None:
    """Check that every command of NOTES.txt does what the notes say."""
    lines = re.findall(r"^  ((?:helm|kubectl) .*)$", notes, re.MULTILINE)
    assert [line.split()[1] for line in lines][:3] == ["test", "apply", "get"], notes
    job = yaml.safe_load((ROOT / "examples" / "jobs" / "llama-7b-pretrain.yaml").read_text())
    job["metadata"]["name"] = "of-the-notes"
    (folder / "training-job.yaml").write_text(yaml.safe_dump(job))
    for line in lines:
        shell(line, folder)
    wait_for(lambda: "of-the-notes" in shell(lines[2], folder), "the job", WAIT_S)


def test_the_readme_of_the_chart_says_how_to_upgrade_and_uninstall_it(shell: Shell, bare: Cluster) -> None:
    install, *others = commands("charts/tilecast/README.md", "helm install tilecast")
    shell(f"{install} --wait")
    for line in others:
        shell(line)
    pods = "kubectl get pods --namespace tilecast --selector app.kubernetes.io/component=operator -o name"
    wait_for(lambda: not shell(pods).startswith("pod/"), "the pods to end", WAIT_S)
    remaining = shell("kubectl get crd -o name")
    assert all(name in remaining for name in crds_of_today())


@pytest.mark.parametrize("chart", RELEASES, ids=lambda chart: chart.stem)
def test_an_upgrade_brings_the_jobs_of_an_earlier_release_along(shell: Shell, bare: Cluster, chart: Path) -> None:
    """The operator is today's, because no earlier image exists; the rest of the release is the earlier one's."""
    release, team = ChartRelease(bare, "tilecast", "tilecast"), Scene(bare.kubectl, lambda: "", "")
    shell(f"helm install tilecast {chart} --namespace tilecast --create-namespace --values {values_file(bare)}")
    bare.kubectl("create", "namespace", TEAM)
    bare.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd/trainingjobs.tilecast.dev")
    for name in JOBS:
        team.create(name)
    before = specs(bare)
    crds, upgrade, _ = commands("docs/operations.md", "helm show crds charts/tilecast | kubectl apply")
    shell(crds)
    shell(f"{upgrade} --wait --timeout=5m")
    assert "Phase:          Succeeded" in release.helm("test")
    wait_for(lambda: all(map(is_answered, jobs(bare))), "answers", WAIT_S)
    after = specs(bare)
    assert len(before) == len(after) == len(JOBS)
    assert all(has_all_of(after[name], spec) for name, spec in before.items()), "newer defaults may be added"
    team.apply("created-after")
    shell("helm uninstall tilecast --namespace tilecast --wait")
    assert len(jobs(bare)) == len(JOBS) + 1


def jobs(cluster: Cluster) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads(
        cluster.kubectl("get", "trainingjobs.tilecast.dev", f"--namespace={TEAM}", "-o", "json")
    )["items"]
    return items


def has_all_of(document: Any, earlier: Any) -> bool:
    """Return whether every field of an earlier document is present and unchanged."""
    if isinstance(earlier, dict):
        return all(name in document and has_all_of(document[name], value) for name, value in earlier.items())
    return bool(document == earlier)


def specs(cluster: Cluster) -> dict[str, Any]:
    return {job["metadata"]["name"]: job["spec"] for job in jobs(cluster)}

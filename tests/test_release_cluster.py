"""The command that lets every held job go, on a real API server and with the rights that the chart gives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster import Cluster
from conftest import Helm
from test_chart import before_uninstall, rendered
from test_jobs_cluster import annotations, create, example, get
from tilecast.jobs import ADMISSION_GATES, APPLIED, MODE, NEXT_QUEUE, QUEUE
from witness import kubeconfig_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
SERVED = "--api-versions=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"
NAMES = ("released-plain", "released-parked", "released-gated")


@pytest.fixture
def hook(bare_cluster: Cluster, helm: Helm, tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A kubeconfig of the account that the chart makes before an uninstall, and the arguments that it gives."""
    shown = rendered(helm, SERVED, "--set=jobs.enabled=true,jobs.gate=true,jobs.place=true")
    hooks = before_uninstall(shown)
    policy = [item for item in shown if item["kind"].startswith("MutatingAdmissionPolicy")]
    rights = [hooks[kind] for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")]
    account = hooks["ServiceAccount"]["metadata"]
    bare_cluster.apply(
        json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": account["namespace"]}})
    )
    bare_cluster.apply("\n---\n".join(yaml.safe_dump(item) for item in [*rights, *policy]))
    path = kubeconfig_of(bare_cluster, account["name"], account["namespace"], tmp_path / "kubeconfig.yaml")
    yield path, hooks["Job"]["spec"]["template"]["spec"]["containers"][0]["args"]
    names = [f"{item['kind']}/{item['metadata']['name']}" for item in [*rights[1:], policy[0]]]
    bare_cluster.kubectl("delete", *names, "--ignore-not-found")


def release(cluster: Cluster, kubeconfig: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("operator", "predictor"))
    return subprocess.run(
        [sys.executable, "-m", "tilecast_operator.release", *arguments],
        env=cluster.environment() | {"KUBECONFIG": str(kubeconfig), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_held_job_is_let_go_with_the_rights_of_the_hook(
    bare_cluster: Cluster, hook: tuple[Path, list[str]]
) -> None:
    kubeconfig, arguments = hook
    # JobSet, PyTorchJob and TrainJob are not served here.
    create(
        bare_cluster,
        example("job", NAMES[0], {MODE: "Initial"}),
        example("job-kueue", NAMES[1]),
        example("job-gated", NAMES[2]),
        example("job", "released-not", {MODE: None}),
    )
    try:
        dry = release(bare_cluster, kubeconfig, "--dry-run", *arguments)
        assert dry.returncode == 0 and dry.stdout.endswith("3 jobs would be let go\n"), dry
        assert all(APPLIED not in annotations(get(bare_cluster, "job", name)) for name in NAMES)
        done = release(bare_cluster, kubeconfig, *arguments)
        assert (done.returncode, done.stderr) == (0, ""), done
        assert done.stdout.splitlines()[0] == "policy binding tilecast-gate was deleted"
        assert done.stdout.endswith("3 jobs were let go\n")
        plain, parked, gated = (get(bare_cluster, "job", name) for name in NAMES)
        assert plain["spec"]["suspend"] is False and annotations(plain)[APPLIED] == "Uninstalled"
        assert parked["metadata"]["labels"][QUEUE] == "team" and NEXT_QUEUE not in annotations(parked)
        assert ADMISSION_GATES not in annotations(gated)
        assert get(bare_cluster, "job", "released-not")["spec"]["suspend"] is True
        again = release(bare_cluster, kubeconfig, *arguments)
        assert (again.returncode, again.stdout) == (0, "0 jobs were let go\n"), again
        bindings = bare_cluster.kubectl("get", "mutatingadmissionpolicybindings", "-o", "json")
        assert not json.loads(bindings)["items"]
    finally:
        bare_cluster.kubectl("delete", "jobs.batch", *NAMES, "released-not", "--wait=false")

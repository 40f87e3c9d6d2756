"""The commands that release every held job, on a real API server and with the rights that the chart gives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from cluster import Cluster, ClusterError, wait_for
from conftest import Helm
from operator_process import Operator
from test_chart import before_uninstall, rendered
from test_jobs_cluster import PLACE_VALUES, PLACING, annotations, applied, create, example, get, granted, until
from test_release_chart import while_down
from tilecast.jobs import ADMISSION_GATES, APPLIED, MODE, NEXT_QUEUE, QUEUE
from witness import NAMESPACE, entries, kubeconfig_of, mark, resource

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parent.parent
SERVED = "--api-versions=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"
NAMES = ("released-plain", "released-parked", "released-gated")


@pytest.fixture
def hook(bare_cluster: Cluster, helm: Helm, tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a kubeconfig of the chart's account for the uninstall, and the arguments of its Job."""
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


@pytest.fixture
def when_down(bare_cluster: Cluster, helm: Helm, tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a kubeconfig of the account of the chart's CronJob, and the arguments of its Job."""
    values = "jobs.enabled=true,jobs.gate=true,jobs.place=true,jobs.releaseWhenDown.afterSeconds=30"
    objects = while_down(rendered(helm, f"--set={values}"))
    cron = objects.pop("CronJob")
    bare_cluster.apply(json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}))
    bare_cluster.apply("\n---\n".join(yaml.safe_dump(item) for item in objects.values()))
    name = objects["ServiceAccount"]["metadata"]["name"]
    path = kubeconfig_of(bare_cluster, name, NAMESPACE, tmp_path / "down.yaml")
    yield path, cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["args"]
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        bare_cluster.kubectl("delete", kind, name)


def is_allowed(cluster: Cluster, account: str, verb: str, resource_name: str) -> bool:
    arguments = ("auth", "can-i", verb, resource_name, f"--as={account}", f"--namespace={NAMESPACE}")
    try:
        return cluster.kubectl(*arguments).strip() == "yes"
    except ClusterError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("skew_s", [-86400.0, 0.0])
def test_jobs_are_let_go_once_the_operator_is_dead_and_none_while_it_lives(
    bare_cluster: Cluster, helm: Helm, when_down: tuple[Path, list[str]], tmp_path: Path, skew_s: float
) -> None:
    """The command and account are exactly those of the CronJob; its clock is right, or a day behind."""
    kubeconfig, arguments = when_down
    bare_cluster.apply(granted(helm, *PLACE_VALUES))
    bare_cluster.kubectl("delete", "lease", "tilecast", f"--namespace={NAMESPACE}", "--ignore-not-found")
    account = kubeconfig_of(bare_cluster, "tilecast", NAMESPACE, tmp_path / "operator.yaml")
    settings = PLACING | {"TILECAST_LEASE": f"{NAMESPACE}/tilecast", "TILECAST_READ_KUEUE": "false"}
    since = mark(bare_cluster)
    names = [f"down-{number}" for number in range(4)]
    try:
        with Operator(bare_cluster, account, settings, clock_skew_s=skew_s) as operator:
            wait_for(lambda: "tilecast_leader 1.0" in operator.get("/metrics"), "a leader", 60)
            create(bare_cluster, example("job", names[0], {MODE: "Initial"}))
            done = release(bare_cluster, kubeconfig, *arguments)
            assert (done.returncode, done.stderr) == (0, ""), done
            assert done.stdout.endswith("the operator lives\n0 jobs were let go\n")
            assert applied(until(bare_cluster, "job", names[0], applied, "is let go")) not in (None, "OperatorDown")
            operator.kill()
            create(
                bare_cluster,
                example("job", names[1], {MODE: "Initial"}),
                example("job-kueue", names[2]),
                example("job-gated", names[3]),
            )
            done = release(bare_cluster, kubeconfig, *arguments)
            assert (done.returncode, done.stderr) == (0, ""), done
            assert done.stdout.endswith("3 jobs were let go\n")
        plain, parked, gated = (get(bare_cluster, "job", name) for name in names[1:])
        assert {applied(item) for item in (plain, parked, gated)} == {"OperatorDown"}
        assert plain["spec"]["suspend"] is False and parked["metadata"]["labels"][QUEUE] == "team"
        assert NEXT_QUEUE not in annotations(parked) and ADMISSION_GATES not in annotations(gated)
        own = [entry for entry in entries(bare_cluster, since) if "release-when-down" in entry["user"]["username"]]
        assert {(resource(entry), entry["verb"]) for entry in own if entry["verb"] != "get"} == {("jobs", "patch")}
        may = partial(is_allowed, bare_cluster, f"system:serviceaccount:{NAMESPACE}:tilecast-release-when-down")
        assert may("get", "leases/tilecast") and may("patch", "jobs.batch")
        more = (("get", "leases/other"), ("update", "leases/tilecast"), ("create", "jobs.batch"), ("list", "secrets"))
        assert not [asked for asked in (*more, ("delete", "jobs.batch"), ("list", "pods")) if may(*asked)]
    finally:
        bare_cluster.kubectl("delete", "jobs.batch", *names, "--wait=false", "--ignore-not-found")
